"""Merges along spheres: directions are averaged apart from lengths."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from capibara.config import configurable
from capibara.consensus.merging.method import (
    Array,
    BaseUse,
    Floored,
    Floors,
    Weighted,
    check_share,
    dot,
    norm,
    weighted_sum,
)
from capibara.core.types import UserError

_STRAIGHT = 1e-12  # square of the sine, below which an arc is straight but for rounding
_CANCELLED = 1e-6  # share of the weights, below which a mean of directions is rounding


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slerp(Floored):
    """Spherical interpolation between two models (Shoemake 1985); straight if they are parallel or opposite.

    mergekit's floors: a model shorter than 1e-8 has no direction, and an arc of less than 1.8 degrees is straight.

    Attributes:
      t: 0 gives the first model, 1 the second.
    """

    name: ClassVar[str] = "slerp"
    most: ClassVar[int | None] = 2

    t: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.t <= 1:
            raise UserError(f"t is {self.t}, must be from 0 (the first model) to 1 (the second): try 0.5")

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        first, second = tensors
        lengths = [length if (length := norm(item)) > self.floor(1e-8) else 1.0 for item in (first, second)]
        cosine = min(max(dot(first, second) / (lengths[0] * lengths[1]), -1.0), 1.0)
        a, b = 1 - self.t, self.t
        if abs(cosine) <= 0.9995 if self.floors is Floors.MERGEKIT else 1 - cosine**2 > _STRAIGHT:
            angle = math.acos(cosine)
            a, b = math.sin(a * angle) / math.sin(angle), math.sin(b * angle) / math.sin(angle)
        return np.float32(a) * first + np.float32(b) * second


class Along(enum.StrEnum):
    """What has a direction of its own."""

    TENSOR = "tensor"
    ROWS = "rows"
    COLUMNS = "columns"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class NuSlerp(Weighted, Floored):
    """Spherical interpolation between two models with weights, of their offsets from the base if there is one.

    mergekit's floors: a vector has a length of at least 1e-7, and weights whose sum is less than 1e-6 are equal.

    Attributes:
      along: what is interpolated: whole tensors, or each row or column of the matrices.
    """

    name: ClassVar[str] = "nuslerp"
    base: ClassVar[BaseUse] = BaseUse.OPTIONAL
    most: ClassVar[int | None] = 2

    along: Along = Along.TENSOR

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floors is Floors.NONE:
            check_share(self.weights)

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        first, second = tensors if base is None else [tensor - base for tensor in tensors]
        shape, weights = first.shape, self.weights_of(2)
        t = 0.5 if abs(sum(weights)) < self.floor(1e-6) else weights[1] / sum(weights)
        if self.along is Along.TENSOR:
            first, second = first.reshape(1, -1), second.reshape(1, -1)
        # A vector has one row, and each of its values is a column.
        axis = 0 if self.along is Along.COLUMNS else -1
        merged = _interpolated(t, first, second, axis, self.floor(1e-7)).reshape(shape)
        return merged if base is None else base + merged


def _interpolated(t: float, first: Array, second: Array, axis: int, least: float) -> Array:
    """Spherical interpolation of the vectors along an axis, which are at least `least` long."""
    if not first.ndim:
        return np.float32(1 - t) * first + np.float32(t) * second

    def inner(a: Array, b: Array) -> Array:
        rows_a, rows_b = np.moveaxis(a, axis, -1), np.moveaxis(b, axis, -1)
        return np.expand_dims(np.einsum("...i,...i->...", rows_a, rows_b, dtype=np.float64), axis)

    lengths = [np.maximum(np.sqrt(inner(x, x)), least) for x in (first, second)]
    dots, product = inner(first, second), lengths[0] * lengths[1]
    cosine = np.clip(np.divide(dots, product, out=np.zeros_like(dots), where=product > 0), -1, 1)
    straight = 1 - cosine**2 <= _STRAIGHT
    angle = np.arccos(np.where(straight, 0, cosine))
    a = np.where(straight, 1 - t, np.sin((1 - t) * angle) / np.sin(angle)).astype(np.float32)
    b = np.where(straight, t, np.sin(t * angle) / np.sin(angle)).astype(np.float32)
    return a * first + b * second


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiSlerp(Weighted, Floored):
    """The mean direction of several models at their mean length, of their offsets from the base if there is one.

    mergekit's floors: 1e-8 is added to each length, and a shorter mean of directions is none.

    mergekit's multislerp adds the mean of the projections to the tangent plane at the mean direction. That mean is zero by
    the choice of the plane, so this is the same result. `Karcher` is the mean along the sphere.

    Attributes:
      normalize: divide the weights by their sum; otherwise the length is their weighted sum.
    """

    name: ClassVar[str] = "multislerp"
    base: ClassVar[BaseUse] = BaseUse.OPTIONAL

    normalize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize:
            check_share(self.weights)

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        offsets = list(tensors) if base is None else [tensor - base for tensor in tensors]
        weights = self.weights_of(len(offsets))
        if self.normalize:
            weights = [weight / sum(weights) for weight in weights]
        lengths = [norm(offset) for offset in offsets]
        mean = weighted_sum(
            offsets,
            [
                weight / (length + self.floor(1e-8)) if length else 0.0
                for weight, length in zip(weights, lengths, strict=True)
            ],
        )
        size = norm(mean)
        if size <= max(_CANCELLED * sum(map(abs, weights)), self.floor(1e-8)):
            if len(offsets) > 2 and max(lengths) > self.floor(1e-8):
                raise UserError(
                    "the weighted directions of the models cancel out: try other weights, or --method=linear"
                )
            merged = weighted_sum(offsets, weights)
        else:
            merged = np.float32(sum(w * length for w, length in zip(weights, lengths, strict=True)) / size) * mean
        return merged if base is None else base + merged


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Karcher(Weighted, Floored):
    """The mean of directions along the sphere (Karcher 1977) by iteration, at the mean length.

    mergekit's floors: a tensor that is shorter than `tolerance` has no direction.

    Attributes:
      max_iterations: of each tensor.
      tolerance: angle in radians at which the iteration ends.
    """

    name: ClassVar[str] = "karcher"

    max_iterations: int = 10
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.weights)
        if self.max_iterations < 1:
            raise UserError(f"max_iterations is {self.max_iterations}, must be at least 1: try 10")
        if not self.tolerance > 0:
            raise UserError(f"tolerance is {self.tolerance}, must be greater than 0: try 1e-5")

    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        tensors = list(tensors)
        weights = self.weights_of(len(tensors))
        weights = [weight / sum(weights) for weight in weights]
        lengths = [norm(tensor) for tensor in tensors]
        retained = [i for i, length in enumerate(lengths) if length > self.floor(self.tolerance)]
        if not retained:
            return np.zeros_like(tensors[0])
        units = [tensors[i] / np.float32(lengths[i]) for i in retained]
        total = sum(weights[i] for i in retained)
        mean = self._mean(units, [weights[i] / total for i in retained])
        return np.float32(sum(w * length for w, length in zip(weights, lengths, strict=True))) * mean

    def _mean(self, units: Sequence[Array], weights: Sequence[float]) -> Array:
        mean = weighted_sum(units, weights)
        mean = units[0] if (size := norm(mean)) < self.tolerance else mean / np.float32(size)
        for _ in range(self.max_iterations):
            tangent = np.zeros_like(mean)  # the weighted mean of the directions to the units, as long as their angles
            for unit, weight in zip(units, weights, strict=True):
                cosine = min(max(dot(mean, unit), -1.0), 1.0)
                angle = math.acos(cosine)
                if angle >= self.tolerance and math.sin(angle) > 0:
                    tangent += np.float32(weight * angle / math.sin(angle)) * (unit - np.float32(cosine) * mean)
            if (step := norm(tangent)) < self.tolerance:
                break
            mean = np.float32(math.cos(step)) * mean + np.float32(math.sin(step) / step) * tangent
            mean = mean / np.float32(norm(mean))
        return mean
