"""What a decoder does with its modules that predict further tokens: the loss's states, and drafts in generation."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from capibara.core.types import Batch
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.cache import dense
from capibara.models.layers import stack
from capibara.models.mtp import module as mtp_module
from capibara.models.mtp.module import Module
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.transformer import Rows, Shared
from capibara.sharding import RematPolicy


class Predicting(abc.ABC):
    """A decoder with modules that predict further tokens.

    Attributes:
      mtp: the modules, stacked; missing without them.
    """

    mtp: Module

    @abc.abstractmethod
    def _embed(self, batch: Batch) -> jax.Array: ...

    @abc.abstractmethod
    def _rows(self, batch: Batch, length: int | None = None) -> Rows: ...

    @abc.abstractmethod
    def _kinds(self) -> dict[LayerKind, AttentionSpec]: ...

    @abc.abstractmethod
    def _length(self, cache: dense.Cache) -> int: ...

    def predict_ahead(
        self, hidden: jax.Array, tokens: Sequence[jax.Array], batch: Batch, remat: RematPolicy, step: jax.Array | None
    ) -> tuple[list[jax.Array], list[stack.Stats]]:
        """What the head reads of each module of `mtp`, [B, T, D], and the statistics of their layers.

        Args:
          hidden: what `__call__` returned for the batch.
          tokens: the tokens [B, T] that each module reads.
          batch, remat, step: as for `__call__`.
        """
        embedded = [self._embed({**batch, "tokens": item}) for item in tokens]
        shared, spec = Shared(row_positions=batch.get("row_positions"), step=step), self._kinds()[self.mtp.options.kind]
        return mtp_module.run(self.mtp, hidden, embedded, self._rows(batch), shared, spec, remat)

    def draft(
        self, hidden: jax.Array, tokens: jax.Array, now: dense.PrefillInputs, cache: dense.Cache
    ) -> tuple[jax.Array, dense.LayerCache]:
        """What the head reads of the first module, and its updated cache.

        Args:
          hidden: [B, T, D], final hidden states of the model, or of the module.
          tokens: [B, T], those after them.
          now: how many of them count, and where they are.
          cache: of the model; the last layer is the module's.
        """
        module, kind, layer = mtp_module.first(self.mtp), self.mtp.options.kind, cache["layers"][-1]
        whole = {"tokens": tokens, "positions": now.positions, "segment_ids": now.real.astype(jnp.int32)}
        rows = self._rows(whole, self._length(cache))
        x = module.joined(hidden, self._embed(whole))
        x, new = module.block.cached(x, layer, now, rows, Shared(), self._kinds()[kind], kind)
        return module.normed(x), layer | new

    def remembered(
        self, hidden: jax.Array, tokens: jax.Array, now: dense.PrefillInputs, cache: dense.Cache
    ) -> dense.LayerCache:
        """The cache of the first module after new tokens."""
        layer = cache["layers"][-1]
        if not now.is_prefill or tokens.shape[1] > 1:
            states, after, where = mtp_module.pairs(hidden, tokens, now, layer[mtp_module.STATE])
            _, layer = self.draft(states, after, where, cache)
        return layer | mtp_module.state_at(layer, hidden, jnp.maximum(now.counts - 1, 0))
