"""Averages of models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from capibara.config import configurable
from capibara.consensus.merging.method import Array, BaseUse, Floored, Weighted, check_share, weighted_sum


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Weighted):
    """The weighted mean (model soups, Wortsman et al. 2022).

    Attributes:
      normalize: divide by the sum of the weights.
    """

    name: ClassVar[str] = "linear"

    normalize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize:
            check_share(self.weights)

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        weights = self.weights_of(len(tensors))
        total = weighted_sum(tensors, weights)
        return total / np.float32(sum(weights)) if self.normalize else total


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStock(Floored):
    """Between the base and the mean of its fine-tunes, closer to the mean the more they agree (Jang et al. 2024).

    With k models whose offsets from the base have the mean cosine c: t = k c / (1 + (k - 1) c) of the mean.

    Attributes:
      by_row: a t for each row of a matrix, not one for the tensor.
    """

    name: ClassVar[str] = "model_stock"
    base: ClassVar[BaseUse] = BaseUse.REQUIRED

    by_row: bool = False

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        assert base is not None, "check sees to it"
        rows = base.shape[-1] if self.by_row and base.ndim else base.size
        offsets = [(tensor - base).reshape(-1, rows) for tensor in tensors]
        norms = [np.sqrt(_dots(offset, offset)) for offset in offsets]

        def cosine_of(first: int, second: int) -> Array:
            below = np.maximum(norms[first] * norms[second], self.floor(1e-6))
            dots = _dots(offsets[first], offsets[second])
            return np.clip(np.divide(dots, below, out=np.zeros_like(dots), where=below > 0), -1, 1)

        cosines = [cosine_of(first, second) for first, second in itertools.combinations(range(len(offsets)), 2)]
        cosine, count = np.mean(cosines, axis=0), len(tensors)
        below = 1 + (count - 1) * cosine
        # Opposite offsets: no finite t, the base remains.
        t = np.divide(count * cosine, below, out=np.zeros_like(cosine), where=np.abs(below) >= 1e-6)
        mean_offset = sum(offsets[1:], start=offsets[0]) / np.float32(count)
        return base + (t.astype(np.float32)[:, None] * mean_offset).reshape(base.shape)


def _dots(a: Array, b: Array) -> Array:
    """Inner products [R] of rows [R, C], in float64: squares of small offsets are not in float32."""
    return np.einsum("rc,rc->r", a, b, dtype=np.float64)
