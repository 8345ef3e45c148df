"""Reads texts without continuing them: their embeddings, and the log probabilities of their tokens."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core.types import Params, UserError
from capibara.inference.engine.cache.batching import bucket
from capibara.inference.engine.placement.parameters import ServedParams
from capibara.inference.engine.programs import programs
from capibara.inference.engine.requests.adapters import Adapters
from capibara.models.api import Model, ReadBatch
from capibara.sharding import Rules

_CHUNK = 128  # tokens whose logits are in memory at once


class Pooling(enum.StrEnum):
    """Which of a text's last hidden states is its embedding: that of its first or last token, or the mean of all."""

    FIRST = "first"
    LAST = "last"
    MEAN = "mean"


class TokenScores(NamedTuple):
    """Of each token after the first: its log probability and rank [T - 1], and the likeliest tokens [T - 1, n] with theirs.

    The likeliest token has rank 1.
    """

    log_probabilities: np.ndarray
    ranks: np.ndarray
    likeliest: np.ndarray
    their_log_probabilities: np.ndarray


class Reader:
    """Reads texts beside an engine, with its parameters; thread-safe, one batch at a time.

    Args:
      model: of the engine.
      params: that the engine serves.
      adapters: of the engine.
      rules: how rows are sharded.
      leads: says whether other processes make the engine's steps, too: they would not read these texts.
      usable: ids of its vocabulary.
      length: most tokens of a text.
      prefill_tokens: about how many tokens are read at once.
    """

    def __init__(
        self,
        model: Model,
        params: ServedParams,
        adapters: Adapters,
        rules: Rules,
        leads: Callable[[], bool],
        *,
        usable: int,
        length: int,
        prefill_tokens: int,
    ):
        self._params, self._length, self._most_tokens = params, length, prefill_tokens
        self._encodes, self._leads, self._adapters = model.encode is not None, leads, adapters
        plain, self._reading = model.plain, threading.Lock()

        def hidden_of(params: Params, batch: ReadBatch) -> jax.Array:
            assert plain.read is not None, "the engine has checked it"
            rows, size = batch["tokens"].shape
            return plain.read(params, batch, plain.start_cache(rows, size), True)[0]

        def embed(params: Params, batch: ReadBatch, pooling: Pooling) -> jax.Array:
            return pooled(hidden_of(params, batch).astype(jnp.float32), batch["counts"], pooling)

        def score(params: Params, batch: ReadBatch, likeliest: int) -> tuple[jax.Array, ...]:
            return _scores(plain, params, hidden_of(params, batch)[0], batch["tokens"][0], usable, likeliest)

        mesh = programs.mesh_of(params.current)
        self._embed: Callable[..., jax.Array] = programs.on_mesh(mesh, rules, embed, static_argnums=2)
        self._score: Callable[..., tuple[jax.Array, ...]] = programs.on_mesh(mesh, rules, score, static_argnums=2)

    def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling, adapter: str | None = None) -> np.ndarray:
        """The embeddings of texts, given as token ids: [texts, D] float32, each of length 1.

        Args:
          texts: token ids of each.
          pooling: which hidden states are its embedding.
          adapter: name of the adapter to use; None: no adapter.

        Raises:
          UserError: a text is empty or too long, or there is no such adapter.
        """
        for ids in texts:
            self._check(ids)
        result = np.zeros((len(texts), 0), np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        while order:
            size = bucket(max(2, len(texts[order[-1]])), self._length)
            group = [order.pop() for _ in range(min(len(order), max(1, self._most_tokens // size)))]
            # Few numbers of rows, so that few programs are compiled.
            rows = 1 << (len(group) - 1).bit_length()
            batch = self._batch([texts[i] for i in group], rows, size)
            with self._reading, self._adapters.using(adapter) as number:
                batch["adapters"] = self._adapters.of([number] * rows)
                read = np.asarray(self._embed(self._params.current, batch, pooling))
            if not result.size:
                result = np.zeros((len(texts), read.shape[1]), np.float32)
            result[group] = read[: len(group)]
        return result

    def score(self, ids: Sequence[int], likeliest: int, adapter: str | None = None) -> TokenScores:
        """The scores of a text's tokens by the model itself, and of the `likeliest` tokens in each place.

        Raises:
          UserError: the text is empty or too long, or there is no such adapter.
        """
        self._check(ids)
        batch = self._batch([ids], 1, bucket(max(2, len(ids)), self._length))
        with self._reading, self._adapters.using(adapter) as number:
            batch["adapters"] = self._adapters.of([number])
            scores = self._score(self._params.current, batch, likeliest)
            return TokenScores(*(np.asarray(x)[: len(ids) - 1] for x in scores))

    def _batch(self, texts: Sequence[Sequence[int]], rows: int, size: int) -> dict[str, Any]:
        tokens, counts = np.zeros((rows, size), np.int32), np.ones(rows, np.int32)
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)], counts[row] = ids, len(ids)
        return {"tokens": tokens, "counts": counts}

    def _check(self, ids: Sequence[int]) -> None:
        if self._encodes:
            raise UserError("the model is an encoder-decoder, whose texts are not read alone: use a decoder")
        if self._leads():
            raise UserError(
                "the model is on the chips of several processes, which read no texts alone: serve it on one"
            )
        if not 1 <= len(ids) <= self._length:
            raise UserError(f"a text has {len(ids)} tokens, must have 1 to {self._length}")


def pooled(hidden_BTD: jax.Array, counts_B: jax.Array, pooling: Pooling) -> jax.Array:
    """The embeddings of rows, each of length 1: float32 [B, D].

    Args:
      hidden_BTD: the last hidden states, float32.
      counts_B: tokens of each row.
      pooling: which of them are its embedding.
    """
    B, T, _ = hidden_BTD.shape
    match pooling:
        case Pooling.FIRST:
            pooled_BD = hidden_BTD[:, 0]
        case Pooling.LAST:
            pooled_BD = hidden_BTD[jnp.arange(B), counts_B - 1]
        case Pooling.MEAN:
            inside_BT = jnp.arange(T) < counts_B[:, None]
            pooled_BD = jnp.sum(jnp.where(inside_BT[..., None], hidden_BTD, 0.0), axis=1) / counts_B[:, None].astype(
                jnp.float32
            )
    return pooled_BD / jnp.maximum(jnp.linalg.norm(pooled_BD, axis=-1, keepdims=True), 1e-12)


def _scores(
    model: Model, params: Params, hidden_TD: jax.Array, tokens_T: jax.Array, usable: int, likeliest: int
) -> tuple[jax.Array, ...]:
    """The fields of `TokenScores`, for all T tokens: the last place has no next token."""
    next_T = jnp.roll(tokens_T, -1)

    def of_chunk(of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        logits_CV = model.logits_of(params, of[0][None])[0]
        logits_CV = jnp.where(jnp.arange(logits_CV.shape[-1]) < usable, logits_CV, -jnp.inf)
        log_p_CV = jax.nn.log_softmax(logits_CV, axis=-1)
        theirs, ids = jax.lax.top_k(log_p_CV, likeliest)
        chosen_C1 = jnp.take_along_axis(log_p_CV, of[1][:, None], axis=-1)
        ranks_C = 1 + jnp.sum((log_p_CV > chosen_C1).astype(jnp.int32), axis=-1)
        return chosen_C1[:, 0], ranks_C, ids, theirs

    count = -(-len(next_T) // _CHUNK)
    padded = [jnp.pad(x, ((0, count * _CHUNK - len(x)), *((0, 0),) * (x.ndim - 1))) for x in (hidden_TD, next_T)]
    hidden, following = (x.reshape(count, _CHUNK, *x.shape[1:]) for x in padded)
    return tuple(x.reshape(count * _CHUNK, *x.shape[2:]) for x in jax.lax.map(of_chunk, (hidden, following)))
