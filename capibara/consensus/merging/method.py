"""What all ways to merge models have in common: inputs, settings per model, checks."""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from capibara.core.types import UserError

Array = np.ndarray


class BaseUse(enum.StrEnum):
    """Whether a method needs the base model, which the merged models were fine-tuned from."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    UNUSED = "unused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """A way to merge tensors of the same name, one from each model, into one. Subclasses are bound by Gin.

    Attributes (of the class):
      name: its name on the command line.
      base: whether it needs the base model.
      fewest, most: number of models, without the base.
    """

    name: ClassVar[str]
    base: ClassVar[BaseUse] = BaseUse.UNUSED
    fewest: ClassVar[int] = 2
    most: ClassVar[int | None] = None

    @abc.abstractmethod
    def merge(self, tensors: Sequence[Array], base: Array | None, draw: np.random.Generator) -> Array:
        """The merged tensor, float32.

        Args:
          tensors: of the models, float32, of one shape; each is read from its file when it is taken from the sequence.
          base: of the base model; None: there is none.
          draw: of this tensor, for methods with random masks (`draw_of`).
        """

    def alone(self, tensor: Array) -> Array:
        """A tensor that the result has of one of the models only, float32."""
        return tensor

    def check(self, models: int, *, has_base: bool) -> None:
        """Compares the settings with the models.

        Args:
          models: their number, without the base.
          has_base: whether there is a base.

        Raises:
          UserError: too few or too many models, no base, or settings for another number of models.
        """
        if models < self.fewest or self.most is not None and models > self.most:
            exactly = self.fewest == self.most
            must = f"exactly {self.fewest}" if exactly else f"at least {self.fewest}"
            raise UserError(f"{self.name} is given {models} models, must have {must}: name others, or another --method")
        if self.base is BaseUse.REQUIRED and not has_base:
            raise UserError(
                f"{self.name} needs the base model, which the others were fine-tuned from, and there is none: set --base=PATH"
            )
        if self.base is BaseUse.UNUSED and has_base:
            raise UserError(
                f"{self.name} has no use for a base model: leave --base out, or merge it as one of the models"
            )
        for field in ("weights", "density"):
            values = getattr(self, field, ())
            if (
                isinstance(values, tuple)
                and values
                and len(values) not in (models, 1 if field == "density" else models)
            ):
                raise UserError(
                    f"{field} has {len(values)} numbers, must have one for each of the {models} models: "
                    f"{', '.join(map(str, values))}"
                )


class Floors(enum.StrEnum):
    """Absolute bounds of a method, below which a norm, a sum or a weight is not what it is."""

    NONE = "none"  # the published formula, for models and offsets of any size
    MERGEKIT = "mergekit"  # those of mergekit 0.1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floored(Method):
    """A method that mergekit computes with absolute bounds.

    Attributes:
      floors: none, as published; or mergekit: what is smaller than its bounds gives other results than a multiple of it.
    """

    floors: Floors = Floors.NONE

    def floor(self, bound: float) -> float:
        """The bound with mergekit's floors, otherwise 0."""
        return bound if self.floors is Floors.MERGEKIT else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(Method):
    """A method in which models have weights.

    Attributes:
      weights: one for each model, in their order; empty: 1 each.
    """

    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for weight in self.weights:
            if not math.isfinite(weight):
                raise UserError(f"weights has {weight}, must be finite: try 0.5")

    def weights_of(self, models: int) -> list[float]:
        """The weight of each model."""
        return list(self.weights) or [1.0] * models


_CANCELLED = 1e-8  # of the sum of their magnitudes: weights whose sum is smaller cancel out, but for rounding


def check_share(weights: Sequence[float]) -> None:
    """Raises UserError if weights cannot be scaled to sum to 1."""
    if weights and abs(sum(weights)) <= _CANCELLED * sum(map(abs, weights)):
        shown = ", ".join(f"{weight:g}" for weight in weights)
        raise UserError(f"weights are {shown}, their sum must not be 0: try 1 for each, or normalize = False")


def draw_of(seed: int, name: str) -> np.random.Generator:
    """The random numbers of one tensor: the same in whatever order tensors are merged.

    Args:
      seed: of the merge.
      name: of the tensor.
    """
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


_PIECE = 1 << 16  # elements that are float64 at a time: squares of small and of large float32 are not in float32


def dot(a: Array, b: Array) -> float:
    """Sum of products of two arrays."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)

    def piece(start: int) -> float:
        part_a = flat_a[start : start + _PIECE].astype(np.float64)
        part_b = part_a if b is a else flat_b[start : start + _PIECE].astype(np.float64)
        return float(np.dot(part_a, part_b))

    return sum(map(piece, range(0, flat_a.size, _PIECE)))


def norm(a: Array) -> float:
    """Euclidean norm of all values."""
    return math.sqrt(dot(a, a))


def weighted_sum(tensors: Iterable[Array], weights: Iterable[float]) -> Array:
    """The sum of tensors times their weights, which holds one of them at a time."""
    total: Array | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        weighted = np.float32(weight) * tensor
        total = weighted if total is None else np.add(total, weighted, out=np.asarray(total))
    assert total is not None, "check sees to it"
    return np.asarray(total)
