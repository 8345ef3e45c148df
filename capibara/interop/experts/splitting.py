"""Splits experts into smaller ones, or doubles those that are used most."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.interop.experts import operation
from capibara.interop.experts.operation import HIDDEN, Arrays, ExpertOperation, Place

if TYPE_CHECKING:
    from capibara.models.api import DecoderConfig, Moe


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitExperts(ExpertOperation):
    """Parts the hidden units of every expert among several experts, which a token chooses together.

    A token then has `parts` times as many experts of 1 / parts of the width. The function is the same: parts have the same row of
    the router, and their outputs are scaled where gates become smaller. It changes where groups of experts are chosen by their two
    best (DeepSeek-V3), and by the offset of LFM2's gates.

    Attributes:
      parts: number of parts of an expert.
    """

    name: ClassVar[str] = "split"

    parts: int = 2

    def __post_init__(self) -> None:
        if self.parts < 2:
            raise UserError(f"parts is {self.parts}, must be at least 2")

    def result(self, config: DecoderConfig) -> DecoderConfig:
        moe = operation.mixture(config, self.name)
        width = config.mlp_dim if moe.expert_dim is None else moe.expert_dim
        if width % self.parts:
            divisor = next(parts for parts in range(2, width + 1) if width % parts == 0)
            raise UserError(f"parts ({self.parts}) must divide the {width} hidden units of an expert: try {divisor}")
        if moe.gates == "close":
            raise UserError(
                "split is not for Moe.gates = 'close', where experts with equal logits share a gate: prune or merge them"
            )
        if moe.weighted == "inputs" and _scale(moe, self.parts) != 1:
            raise UserError(
                "split is not for Moe.weighted = 'inputs' with gates that sum to 1, which would scale inputs: prune or merge"
            )
        moe = dataclasses.replace(
            moe,
            num_experts=moe.num_experts * self.parts,
            top_k=moe.top_k * self.parts,
            expert_dim=width // self.parts,
            # Their width is a multiple of an expert's where it is not given.
            shared_experts=moe.shared_experts * (self.parts if moe.shared_dim is None else 1),
            hints=None,
        )
        return dataclasses.replace(config, moe=moe)

    def caveat(self, config: DecoderConfig) -> str | None:
        moe = operation.mixture(config, self.name)
        if moe.groups == moe.top_groups or moe.group_score != "pair":
            return None
        return "groups are chosen by their two best experts, which become parts of one"

    def layer(self, weights: Arrays, place: Place) -> tuple[Arrays, list[list[int]]]:
        assert place.moe is not None
        scale, result = _scale(place.moe, self.parts), {}
        for name, value in weights.items():
            if name in HIDDEN:
                pieces = np.stack(np.split(value, self.parts, HIDDEN[name]), 1)
                value = pieces.reshape(-1, *pieces.shape[2:])
            else:
                value = np.repeat(value, self.parts, 0)
            result[name] = value * {"down": scale, "down_bias": scale / self.parts}.get(name, 1.0)
        # It is added to probabilities, which are divided; logits are as they were.
        if place.moe.correction == "expert" and place.moe.score == "softmax":
            result["correction"] = result["correction"] / self.parts
        return result, [[expert] for expert in range(place.moe.num_experts) for _ in range(self.parts)]


def _scale(moe: Moe, parts: int) -> float:
    """What a gate is divided by where an expert becomes so many with equal logits that are chosen together."""
    return 1.0 if moe.score == "sigmoid" and moe.gates == "scores" else float(parts)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DuplicateExperts(ExpertOperation):
    """Doubles the experts of each layer that most tokens choose; the copies have half of the probability each.

    Logits are lowered by log 2 where the router has a bias (gpt-oss) and scores are a softmax. The function is the same where a token has
    both copies whenever it had the expert, as with all experts chosen; otherwise a copy takes the place of another expert. Train
    it: copies become different by `noise`.

    Attributes:
      experts: number of experts of a layer in the result.
      noise: standard deviation of noise on the copies' rows of the router, relative to the row's root mean square.
      domain: the domain whose tokens count; None: all.
      seed: of the noise.
    """

    name: ClassVar[str] = "duplicate"

    experts: int
    noise: float = 0.0
    domain: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise UserError(f"noise is {self.noise}, must be finite and at least 0: try 0.01")

    @property
    def needs_statistics(self) -> bool:
        return True

    def result(self, config: DecoderConfig) -> DecoderConfig:
        moe = operation.mixture(config, self.name)
        if not moe.num_experts < self.experts <= 2 * moe.num_experts or self.experts % moe.groups:
            raise UserError(
                f"experts is {self.experts}, must be from {moe.num_experts + 1} to {2 * moe.num_experts} and a multiple of the groups "
                f"({moe.groups}) for duplicate: try {moe.num_experts + moe.groups}"
            )
        return dataclasses.replace(config, moe=dataclasses.replace(moe, num_experts=self.experts, hints=None))

    def caveat(self, config: DecoderConfig) -> str | None:
        moe = operation.mixture(config, self.name)
        if moe.score != "softmax" or moe.bias != "all":
            return "the router has no bias, or its scores are no softmax: copies have the gates of the expert"
        return None if moe.top_k == moe.num_experts else "copies take the places of other experts"

    def layer(self, weights: Arrays, place: Place) -> tuple[Arrays, list[list[int]]]:
        assert place.moe is not None and place.use is not None
        most = (self.experts - place.moe.num_experts) // place.moe.groups
        order: list[int] = []
        copied: list[int] = []
        for group in operation.groups(place.moe):
            heaviest = group[np.argsort(-place.use.routed[group], kind="stable")[:most]]
            order += [*map(int, group), *map(int, heaviest)]
            copied += map(int, heaviest)
        result = {name: value[order] for name, value in weights.items()}
        halved = np.isin(order, copied)
        if "router_bias" in result and place.moe.score == "softmax":
            result["router_bias"] = result["router_bias"] - math.log(2) * halved
        if self.noise:
            rows = result["router"]
            size = self.noise * np.sqrt(np.mean(np.square(rows), -1, keepdims=True)) * halved[:, None]
            result["router"] = rows + size * place.draw.standard_normal(rows.shape)
        return result, [[expert] for expert in order]
