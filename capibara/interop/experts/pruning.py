"""Removes experts, and their rows of the router."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from capibara.config import configurable
from capibara.interop.experts import operation
from capibara.interop.experts.operation import Arrays, ExpertOperation, Place

if TYPE_CHECKING:
    from capibara.models.api import DecoderConfig


class Criterion(enum.StrEnum):
    """By what an expert counts.

    activation: mean norm of what it adds to the tokens that choose it, gate included (REAP, Lasby et al. 2025,
    arXiv:2510.13999). use: tokens that choose it. gate: sum of its gates. random: a baseline.
    """

    ACTIVATION = "activation"
    USE = "use"
    GATE = "gate"
    RANDOM = "random"

    def scores(self, place: Place, experts: int) -> np.ndarray:
        """[E], higher for experts that count more."""
        if self is Criterion.RANDOM:
            return place.draw.random(experts)
        assert place.use is not None, "it is checked before"
        match self:
            case Criterion.USE:
                return place.use.routed
            case Criterion.GATE:
                return place.use.gate * place.use.routed
            case _:
                return place.use.activation


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneExperts(ExpertOperation):
    """Removes the experts of each layer that count least, the same number in each of the router's groups.

    Attributes:
      experts: number of experts of a layer that stay.
      by: how experts count.
      domain: the domain whose tokens count; None: all.
      seed: of random choices.
    """

    name: ClassVar[str] = "prune"

    experts: int
    by: Criterion = Criterion.ACTIVATION
    domain: str | None = None
    seed: int = 0

    @property
    def needs_statistics(self) -> bool:
        return self.by is not Criterion.RANDOM

    def result(self, config: DecoderConfig) -> DecoderConfig:
        moe = operation.mixture(config, self.name)
        operation.check_count(moe, self.experts, self.name)
        return dataclasses.replace(config, moe=dataclasses.replace(moe, num_experts=self.experts, hints=None))

    def layer(self, weights: Arrays, place: Place) -> tuple[Arrays, list[list[int]]]:
        assert place.moe is not None
        scores, most = self.by.scores(place, place.moe.num_experts), self.experts // place.moe.groups
        best = [
            np.sort(group[np.argsort(-scores[group], kind="stable")[:most]]) for group in operation.groups(place.moe)
        ]
        retained = np.concatenate(best)
        return {name: value[retained] for name, value in weights.items()}, [[int(expert)] for expert in retained]
