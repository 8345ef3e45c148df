"""Rows of a frozen token embedding that are trained beside adapters, as PEFT's trainable_token_indices are.

They are a parameter of their own, "embedding_lora/rows" [tokens, D], which begins as the rows of the embedding and stands in
their place, in a tied head too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from capibara.core.types import UserError
from capibara.models.layers import embedding

ATTRIBUTE, PART = "embedding_lora", "rows"
NAME = f"{ATTRIBUTE}/{PART}"


class Rows(nnx.Module):
    """The rows [tokens, D] in float32, on every device."""

    def __init__(self, table_VD: jax.Array, ids: Sequence[int]):
        self.rows = nnx.Param(table_VD[np.asarray(ids)].astype(jnp.float32), axes=(None, None))


class _Lora(Protocol):
    trainable_tokens: tuple[int, ...]


class _Config(Protocol):
    @property
    def lora(self) -> _Lora | None: ...


class Embedding(Protocol):
    """A model with a token embedding [V, D]."""

    config: _Config
    embedding: nnx.Param


def check(ids: Sequence[int]) -> None:
    """Refuses what is no choice of tokens.

    Raises:
      UserError: they are no ids of tokens, each there once.
    """
    for one in ids:
        if one < 0:
            raise UserError(f"Lora.trainable_tokens has {one!r}, must be ids of tokens, from 0: try (5, 7)")
        if ids.count(one) > 1:
            raise UserError(f"Lora.trainable_tokens has {one} twice: name each token once")


def check_sizes(ids: Sequence[int], vocab_size: int, data_kind: str, whole: bool) -> None:
    """Refuses tokens that this model cannot train by themselves.

    Args:
      ids: of the tokens.
      vocab_size, data_kind: of the model.
      whole: the embedding is trained as a whole.

    Raises:
      UserError: the model can have no such rows.
    """
    if data_kind not in ("causal", "prefix"):
        raise UserError(
            f"Lora.trainable_tokens is of decoders, and this model is trained on {data_kind!r}: leave it out"
        )
    if max(ids) >= vocab_size:
        raise UserError(f"Lora.trainable_tokens has {max(ids)}, must be below vocab_size ({vocab_size}): leave it out")
    if whole:
        raise UserError(
            "Lora.modules_to_save has embedding, whose rows are in trainable_tokens: leave it out of one of the two"
        )


def lookup(model: Embedding, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rows that the tokens name, [B, T, D] in `dtype`."""
    x_BTD = embedding.lookup(model.embedding[...], tokens_BT, dtype)
    rows = getattr(model, ATTRIBUTE, None)
    if rows is None:
        return x_BTD
    ids = np.asarray(model.config.lora.trainable_tokens)
    place_V = jnp.full(model.embedding.shape[0], -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))
    place_BT = place_V[tokens_BT]
    own_BTD = rows.rows[...].astype(dtype)[jnp.maximum(place_BT, 0)]
    return jnp.where(place_BT[..., None] >= 0, own_BTD, x_BTD)


def table(model: Embedding) -> jax.Array:
    """The embedding [V, D] with the rows in their places."""
    whole, rows = model.embedding[...], getattr(model, ATTRIBUTE, None)
    return whole if rows is None else replaced(whole, rows.rows[...], model.config.lora.trainable_tokens)


def replaced(table_VD: jax.Array, rows: jax.Array, ids: Sequence[int]) -> jax.Array:
    """A table with rows in the places of these tokens."""
    return table_VD.at[np.asarray(ids)].set(rows.astype(table_VD.dtype))
