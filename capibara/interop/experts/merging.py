"""Merges experts that are alike into one."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from capibara.config import configurable
from capibara.interop.experts import operation
from capibara.interop.experts.operation import HIDDEN, Arrays, ExpertOperation, Place
from capibara.interop.experts.statistics import Use

if TYPE_CHECKING:
    from capibara.models.api import DecoderConfig


class Similarity(enum.StrEnum):
    """What two experts are compared by.

    outputs: their mean outputs (HC-SMoE, Chen et al. 2024, arXiv:2410.08589). router: their rows of the router.
    """

    OUTPUTS = "outputs"
    ROUTER = "router"

    def features(self, weights: Arrays, use: Use) -> np.ndarray:
        """[E, N]."""
        return use.outputs if self is Similarity.OUTPUTS else np.asarray(weights["router"], np.float64)


class Alignment(enum.StrEnum):
    """Whether hidden units are matched before their weights are averaged (M-SMoE, Li et al. 2024, arXiv:2310.01334).

    Experts whose hidden units stand in another order compute the same, and their plain average does not.
    """

    HIDDEN = "hidden"
    NONE = "none"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeExperts(ExpertOperation):
    """Groups the experts of each layer by hierarchical clustering, and averages each cluster by its experts' use.

    The router's row of a cluster is the mean of its experts' rows, with the same weights.

    Attributes:
      experts: number of experts of a layer in the result.
      similarity: what experts are compared by, with Euclidean distances and average linkage.
      alignment: whether hidden units are matched with those of the cluster's most used expert.
      domain: the domain whose tokens weigh; None: all.
    """

    name: ClassVar[str] = "merge"

    experts: int
    similarity: Similarity = Similarity.OUTPUTS
    alignment: Alignment = Alignment.HIDDEN
    domain: str | None = None

    @property
    def needs_statistics(self) -> bool:
        return True

    def result(self, config: DecoderConfig) -> DecoderConfig:
        moe = operation.mixture(config, self.name)
        operation.check_count(moe, self.experts, self.name)
        return dataclasses.replace(config, moe=dataclasses.replace(moe, num_experts=self.experts, hints=None))

    def layer(self, weights: Arrays, place: Place) -> tuple[Arrays, list[list[int]]]:
        assert place.moe is not None and place.use is not None
        features = self.similarity.features(weights, place.use)
        made_of: list[list[int]] = []
        for group in operation.groups(place.moe):
            of_group = clusters(features[group], self.experts // place.moe.groups)
            made_of += [[int(group[index]) for index in cluster] for cluster in of_group]
        merged = [self._merged(weights, np.asarray(cluster), place.use.routed) for cluster in made_of]
        return {name: np.stack([expert[name] for expert in merged]) for name in weights}, made_of

    def _merged(self, weights: Arrays, cluster: np.ndarray, routed: np.ndarray) -> Arrays:
        share = (
            routed[cluster] / routed[cluster].sum()
            if routed[cluster].any()
            else np.full(len(cluster), 1 / len(cluster))
        )
        experts: list[Arrays] = [{name: value[expert] for name, value in weights.items()} for expert in cluster]
        if self.alignment is Alignment.HIDDEN:
            most_used = experts[int(share.argmax())]
            experts = [aligned(expert, most_used) for expert in experts]
        return {
            name: np.sum([part * expert[name] for part, expert in zip(share, experts, strict=True)], 0)
            for name in weights
        }


def clusters(features: np.ndarray, count: int) -> list[list[int]]:
    """Agglomerative clustering with average linkage: so many clusters of rows, ordered by their first members."""
    members = [[index] for index in range(len(features))]
    distances = np.linalg.norm(features[:, None] - features[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    while len(members) > count:
        first, second = sorted(np.unravel_index(int(distances.argmin()), distances.shape))
        sizes = len(members[first]), len(members[second])
        joined = (sizes[0] * distances[first] + sizes[1] * distances[second]) / sum(sizes)
        distances[first], distances[:, first] = joined, joined
        distances[first, first] = np.inf
        distances = np.delete(np.delete(distances, second, 0), second, 1)
        members[first] += members.pop(second)
    return sorted(sorted(cluster) for cluster in members)


def aligned(expert: Arrays, like: Arrays) -> Arrays:
    """An expert that computes the same, its hidden units in the order in which they are most like another's."""
    from scipy.optimize import linear_sum_assignment  # late: it takes most of a second, and --help needs none of it

    if expert is like:
        return expert
    ours, theirs = (np.concatenate([_by_unit(of, name) for name in HIDDEN if name in of], 1) for of in (expert, like))
    _, order = linear_sum_assignment(-theirs @ ours.T)
    return {
        name: np.take(value, order, HIDDEN[name] - 1) if name in HIDDEN else value for name, value in expert.items()
    }


def _by_unit(expert: Arrays, name: str) -> np.ndarray:
    """A weight of one expert as [F, N]."""
    value = np.moveaxis(expert[name], HIDDEN[name] - 1, 0)
    return value.reshape(len(value), -1)
