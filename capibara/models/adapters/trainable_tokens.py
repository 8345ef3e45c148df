"""Trains some rows of a frozen token embedding beside adapters, like PEFT's trainable_token_indices.

The rows are a parameter of their own, "embedding_lora/rows" [tokens, D]. It starts as a copy of the embedding's rows
and replaces them, in a tied head too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from capibara.core.types import UserError
from capibara.kernels import lookup_tables
from capibara.models.layers import embedding

ATTRIBUTE, PART = "embedding_lora", "rows"
NAME = f"{ATTRIBUTE}/{PART}"


class Rows(nnx.Module):
    """The rows [tokens, D] in float32, replicated on every device."""

    def __init__(self, table_VD: jax.Array, ids: Sequence[int]):
        self.rows = nnx.Param(table_VD[np.asarray(ids)].astype(jnp.float32), axes=(None, None))


class _Lora(Protocol):
    @property
    def trainable_tokens(self) -> tuple[int, ...]: ...


class _Config(Protocol):
    @property
    def lora(self) -> _Lora | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def data_kind(self) -> str: ...


class Embedding(Protocol):
    """A model with a token embedding [V, D]."""

    @property
    def config(self) -> _Config: ...
    @property
    def embedding(self) -> nnx.Param: ...


def check(ids: Sequence[int]) -> None:
    """Checks the choice of tokens.

    Raises:
      UserError: an id is negative or occurs twice.
    """
    for item in ids:
        if item < 0:
            raise UserError(f"Lora.trainable_tokens has {item!r}, must be token ids of at least 0: try (5, 7)")
        if ids.count(item) > 1:
            raise UserError(f"Lora.trainable_tokens has {item} twice: name each token once")


def check_sizes(ids: Sequence[int], vocab_size: int, data_kind: str, whole: bool) -> None:
    """Checks that this model can train single tokens.

    Args:
      ids: the tokens' ids.
      vocab_size, data_kind: of the model.
      whole: whether the embedding is trained as a whole.

    Raises:
      UserError: the model has no such rows, or trains them already.
    """
    if data_kind not in ("causal", "prefix"):
        raise UserError(
            f"Lora.trainable_tokens is for decoders, and this model is trained on {data_kind!r}: leave it out"
        )
    if max(ids) >= vocab_size:
        raise UserError(f"Lora.trainable_tokens has {max(ids)}, must be below vocab_size ({vocab_size}): leave it out")
    if whole:
        raise UserError("Lora.modules_to_save has embedding, whose rows are in trainable_tokens: remove one of the two")


def lookup(model: Embedding, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The embeddings of the tokens, [B, T, D] in `dtype`."""
    x_BTD = lookup_tables.columns(embedding.lookup(model.embedding[...], tokens_BT, dtype), model.config.embed_dim)
    rows = getattr(model, ATTRIBUTE, None)
    if rows is None:
        return x_BTD
    ids = np.asarray(_ids(model))
    index_V = jnp.full(model.embedding.shape[0], -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))
    index_BT = index_V[tokens_BT]
    own_BTD = rows.rows[...].astype(dtype)[jnp.maximum(index_BT, 0)]
    return jnp.where(index_BT[..., None] >= 0, own_BTD, x_BTD)


def table(model: Embedding) -> jax.Array:
    """The embedding [V, D] with the trained rows in it."""
    whole, rows = lookup_tables.columns(model.embedding[...], model.config.embed_dim), getattr(model, ATTRIBUTE, None)
    return whole if rows is None else replaced(whole, rows.rows[...], _ids(model))


def _ids(model: Embedding) -> tuple[int, ...]:
    assert model.config.lora is not None, "there are trained rows"
    return model.config.lora.trainable_tokens


def replaced(table_VD: jax.Array, rows: jax.Array, ids: Sequence[int]) -> jax.Array:
    """A table with the rows of these tokens replaced."""
    return table_VD.at[np.asarray(ids)].set(rows.astype(table_VD.dtype))
