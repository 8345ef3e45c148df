"""Embeddings of many texts by a decoder or an encoder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from capibara.core.types import Batch, Params, UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.engine.reading import Pooling, pooled
from capibara.models.api import Model

_BATCH_TOKENS = 8192
_STEP = 16  # tokens by which the rows of two programs differ
_SAMPLED = 1 << 16  # values of a weight that its digest reads


class TextEmbedder:
    """Embeds texts by a model's last hidden states.

    Args:
      path: of the model.
      model: a decoder or an encoder.
      params: its parameters, on one device.
      vocabulary: its tokenizer.
      length: most tokens of a text.
      pooling: which hidden states of a text are its embedding.

    Raises:
      UserError: the model is an encoder-decoder.
    """

    def __init__(self, path: str, model: Model, params: Params, vocabulary: Vocabulary, length: int, pooling: Pooling):
        if model.encode is not None:
            raise UserError(f"{path} is an encoder-decoder: embed texts by a decoder or an encoder")
        self.path, self.vocabulary, self.length, self.pooling = path, vocabulary, length, pooling
        self._params = params

        def embed(params: Params, batch: Batch) -> jax.Array:
            hidden_BTD, _ = model.hidden(params, batch)
            counts_B = jnp.sum(batch["segment_ids"], axis=1)
            return pooled(hidden_BTD.astype(jnp.float32), counts_B, pooling)

        self._embed: Callable[..., jax.Array] = jax.jit(embed)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What decides the embeddings, as JSON values: a digest of the weights, the tokenizer and the pooling."""
        return {
            "weights": weights_digest(self._params),
            "tokenizer": self.vocabulary.fingerprint(),
            "pooling": str(self.pooling),
        }

    def __call__(self, texts: Sequence[str], done: Callable[[int], None] = lambda count: None) -> np.ndarray:
        """The embeddings of texts: float32 [texts, D], each of length 1.

        Args:
          texts: at least one.
          done: is called with the number of texts that are embedded.

        Raises:
          UserError: a text has more tokens than `length`, or an embedding is not finite.
        """
        encoded = self.vocabulary.encode_batch(texts)
        begin, closing = self.vocabulary.begin_ids, self.vocabulary.closing_ids
        rows = [np.array([*begin, *ids, *closing] or [self.vocabulary.bos_id], np.int32) for ids in encoded]
        longest = max(map(len, rows))
        if longest > self.length:
            raise UserError(f"a text has {longest} tokens, must have at most {self.length} to be embedded: cut it")
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        result, count = None, 0
        while order:
            size = min(-(-len(rows[order[-1]]) // _STEP) * _STEP, self.length)
            # As many rows in each batch of a length, so that few programs are compiled.
            batch_rows = max(1, _BATCH_TOKENS // size) if len(rows) > 1 else 1
            group = [order.pop() for _ in range(min(len(order), batch_rows))]
            vectors = np.asarray(self._embed(self._params, _batch([rows[i] for i in group], batch_rows, size)))
            if result is None:
                result = np.empty((len(rows), vectors.shape[1]), np.float32)
            result[group] = vectors[: len(group)]
            if not np.isfinite(result[group]).all():
                raise UserError(
                    f"{self.path} embeds a text as values that are not finite: name a model whose training has not diverged"
                )
            count += len(group)
            done(count)
        assert result is not None, "there is at least one text"
        return result


def weights_digest(params: Params) -> str:
    """A digest of at most 65,536 evenly spaced values of each weight, rounded to bfloat16: devices compute in other dtypes."""
    digest = xxhash.xxh3_128()
    for path, value in sorted(_leaves(params).items()):
        flat = jnp.ravel(value)
        sampled = flat[:: max(1, flat.size // _SAMPLED)]
        if jnp.issubdtype(sampled.dtype, jnp.floating):
            sampled = sampled.astype(jnp.bfloat16)
        digest.update(f"{path} {value.shape}".encode())
        digest.update(np.asarray(sampled).tobytes())
    return digest.hexdigest()


def _leaves(params: Params) -> Mapping[str, jax.Array]:
    return {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(params)}


def _batch(texts: Sequence[np.ndarray], rows: int, size: int) -> dict[str, np.ndarray]:
    tokens, segments = np.zeros((rows, size), np.int32), np.zeros((rows, size), np.int32)
    segments[:, 0] = 1  # a row without a token has no mean
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    positions = np.broadcast_to(np.arange(size, dtype=np.int32), (rows, size))
    return {"tokens": tokens, "positions": positions, "segment_ids": segments}
