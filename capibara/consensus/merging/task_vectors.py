"""Merges of offsets from a base: weighted sums of task vectors, sparse, with a vote on each value's sign, or both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from capibara.config import configurable
from capibara.consensus.merging import sparsify
from capibara.consensus.merging.method import Array, BaseUse, Floored, Floors, Weighted, check_share, dot, weighted_sum
from capibara.consensus.merging.sparsify import Rescale
from capibara.core.types import UserError

_CANCELLED = 1e-6  # share of the weights, below which their sum in float32 is rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TaskVectors(Weighted, Floored):
    """The base and a weighted sum of offsets from it.

    mergekit's floors: sums of weights below 1e-8 are not divided by.

    Attributes:
      scale: factor of the sum (lambda).
      normalize: divide the sum by that of the weights: of all models, or with a vote of those that contribute.
    """

    base: ClassVar[BaseUse] = BaseUse.REQUIRED
    fewest: ClassVar[int] = 1
    votes: ClassVar[bool] = False

    scale: float = 1.0
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.scale):
            raise UserError(f"scale is {self.scale}, must be finite: try 1.0")
        if self.normalize and not self.votes and self.floors is Floors.NONE:
            check_share(self.weights)

    def sparsified(self, offset: Array, model: int, draw: np.random.Generator) -> Array:
        """What is left of a model's offset."""
        return offset

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        assert base is not None, "check sees to it"
        weights = self.weights_of(len(tensors))
        retained = (self.sparsified(tensor - base, i, draw) for i, tensor in enumerate(tensors))
        if self.votes:
            offsets = [np.float32(weight) * offset for offset, weight in zip(retained, weights, strict=True)]
            total, share = voted_sum(offsets, weights)
        else:
            total, share = weighted_sum(retained, weights), np.asarray(sum(weights))
        if self.normalize:
            # Of weights that are not negative no sum is rounding, however small: one model may be alone with its sign.
            rounding = _CANCELLED * sum(map(abs, weights)) if min(weights) < 0 else 0.0
            cancelled = np.abs(share) < max(self.floor(1e-8), rounding)
            total = total / np.where(cancelled | (share == 0), 1, share).astype(np.float32)
        return base + np.float32(self.scale) * total


def voted_sum(offsets: Sequence[Array], weights: Sequence[Array | float]) -> tuple[Array, Array]:
    """The sum of the values that have the sign of the sum of all, and the sum of their weights."""
    positive = weighted_sum(offsets, [1.0] * len(offsets)) >= 0
    total, share = np.zeros_like(offsets[0]), np.zeros_like(offsets[0])
    for offset, weight in zip(offsets, weights, strict=True):
        agrees = np.where(positive, offset > 0, offset < 0)
        total += offset * agrees
        share += np.float32(weight) * agrees
    return total, share


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskArithmetic(_TaskVectors):
    """The base and a weighted sum of offsets from it (Ilharco et al. 2023)."""

    name: ClassVar[str] = "task_arithmetic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sparse(_TaskVectors):
    """Like _TaskVectors, of offsets of which only a part is kept.

    Attributes:
      density: the share of values to keep of each model, or of all.
    """

    density: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.density:
            raise UserError("density is empty, must have one number for all models or one for each: try 0.5")
        for density in self.density:
            check_density(density)

    def density_of(self, model: int) -> float:
        """The share of values to keep of a model."""
        return self.density[model if len(self.density) > 1 else 0]


def check_density(density: float) -> None:
    """Raises UserError if a share is not in (0, 1]."""
    if not 0 < density <= 1:
        raise UserError(f"density is {density}, must be greater than 0 and at most 1: try 0.5")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ties(_Sparse):
    """Largest values only, then a vote on the sign of each, then the mean of those that agree (Yadav et al. 2023)."""

    name: ClassVar[str] = "ties"
    votes: ClassVar[bool] = True

    normalize: bool = True

    def sparsified(self, offset: Array, model: int, draw: np.random.Generator) -> Array:
        return sparsify.keep_largest(offset, self.density_of(model))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Random(_Sparse):
    """Like _Sparse, by random masks.

    mergekit's floors: a sum of magnitudes below 1e-7 is not rescaled.

    Attributes:
      rescale: how kept values make up for dropped ones: norm, as in mergekit; probability, as published; or none.
    """

    rescale: Rescale = Rescale.NORM

    def probability(self, offset: Array, density: float) -> Array | float:
        """Of each value, to be kept."""
        return density

    def sparsified(self, offset: Array, model: int, draw: np.random.Generator) -> Array:
        density = self.density_of(model)
        if density == 1:
            return offset
        probability = self.probability(offset, density)
        return sparsify.keep_random(offset, probability, draw, self.rescale, self.floor(1e-7))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DareLinear(_Random):
    """Random values are dropped, the others scaled up, and summed (Yu et al. 2024)."""

    name: ClassVar[str] = "dare_linear"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DareTies(_Random):
    """Like DareLinear, with the vote of Ties on the sign of each value."""

    name: ClassVar[str] = "dare_ties"
    votes: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Breadcrumbs(_Sparse):
    """Like _Sparse; the largest values are dropped as well.

    Attributes:
      outliers: the share of the largest values to drop (gamma).
    """

    outliers: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.outliers < 1:
            raise UserError(f"outliers is {self.outliers}, must be at least 0 and less than 1: try 0.01")

    def sparsified(self, offset: Array, model: int, draw: np.random.Generator) -> Array:
        return sparsify.keep_middle(offset, self.density_of(model), self.outliers)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Breadcrumbs(_Breadcrumbs):
    """Neither the smallest nor the largest values, summed (Davari and Belilovsky 2024)."""

    name: ClassVar[str] = "breadcrumbs"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BreadcrumbsTies(_Breadcrumbs):
    """Like Breadcrumbs, with the vote of Ties on the sign of each value."""

    name: ClassVar[str] = "breadcrumbs_ties"
    votes: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Della(_Random):
    """Like _Random; in each row larger values are kept with higher probability.

    Attributes:
      spread: probabilities are from density - spread to density + spread (epsilon).
    """

    spread: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        for density in self.density:
            if density < 1 and not (0 <= self.spread < density and density + self.spread < 1):
                most = min(density, 1 - density)
                raise UserError(
                    f"spread is {self.spread}, must be at least 0 and keep density +/- spread in (0, 1), for density "
                    f"{density} less than {most:.4g}: try {most / 2:.3g}"
                )

    def probability(self, offset: Array, density: float) -> Array | float:
        return sparsify.probabilities(offset, density, self.spread)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Della(_Della):
    """Random values are dropped, small ones more often, then as in Ties (Deep et al. 2024)."""

    name: ClassVar[str] = "della"
    votes: ClassVar[bool] = True

    normalize: bool = True


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DellaLinear(_Della):
    """Like Della, summed without the vote."""

    name: ClassVar[str] = "della_linear"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sce(Floored):
    """Select, calculate, erase: values in which models differ most, weighted by energy, after a vote (Wan et al. 2024).

    mergekit's floors: below 1e-6, a sum of mean squares of a tensor's offsets gives all models the same weight, and a sum of
    weights counts as 1e-6.

    Attributes:
      density: the share of the values with the highest variance between models to keep, of those that differ.
    """

    name: ClassVar[str] = "sce"
    base: ClassVar[BaseUse] = BaseUse.REQUIRED
    fewest: ClassVar[int] = 1

    density: float = 1.0

    def __post_init__(self) -> None:
        check_density(self.density)

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        assert base is not None, "check sees to it"
        offsets = [tensor - base for tensor in tensors]
        if self.density < 1:
            variance = _variance(offsets)
            selected = int(np.count_nonzero(variance) * self.density)
            mask = np.zeros(variance.size, bool)
            if selected:
                mask[np.argpartition(variance.reshape(-1), -selected)[-selected:]] = True
            offsets = [offset * mask.reshape(offset.shape) for offset in offsets]
        energies = [dot(offset, offset) / max(offset.size, 1) for offset in offsets]
        total = sum(energies)
        same = total == 0 or total < self.floor(1e-6)
        weights = [1 / len(offsets) if same else energy / total for energy in energies]
        positive = weighted_sum(offsets, [1.0] * len(offsets)) >= 0
        merged, share = np.zeros_like(base), np.zeros_like(base)
        for offset, weight in zip(offsets, weights, strict=True):
            agrees = np.where(positive, offset > 0, offset < 0)
            merged += np.float32(weight) * offset * agrees
            share += np.float32(weight) * agrees
        share = np.maximum(share, np.float32(self.floor(1e-6)))
        return base + np.divide(merged, share, out=np.zeros_like(merged), where=share > 0)


def _variance(offsets: Sequence[Array]) -> Array:
    """The variance of each value between models, up to a common factor; 0 where all are equal, whatever is rounded."""
    stacked = np.stack(offsets)
    largest = np.abs(stacked).max(initial=0)
    if largest > 0:
        stacked = stacked / largest  # squares of small offsets are not in float32
    return np.where(stacked.max(axis=0) > stacked.min(axis=0), np.var(stacked, axis=0), 0)
