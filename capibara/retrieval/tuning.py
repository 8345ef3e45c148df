"""Searches the settings of an index: the fewest bytes that find what an exact search finds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.core.types import UserError
from capibara.retrieval.quantizers import Codes, Quantizer, divisors, library, one_thread, rotated_sizes

if TYPE_CHECKING:
    import faiss

_TIMED = 100  # queries, one at a time
_LEAST_LISTED = 10_000  # vectors; fewer are compared with a query within a millisecond

Progress = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What an index must reach.

    Attributes:
      recall: share of the k nearest of an exact search that it finds, on average over queries.
      k: how many are searched.
      ms: most milliseconds of a query, on one core.
      train_vectors: from which codes are learned, drawn at random.
      seed: of the draw and the codes.
    """

    recall: float
    k: int
    ms: float
    train_vectors: int
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings that were tried.

    Attributes:
      quantizer: how vectors are stored.
      effort: how much of them is searched (`Quantizer.searched`).
      bytes: of the index's file.
      recall: on the queries by which settings are chosen.
      recall_error: its standard error.
      held_out_recall: on the other queries.
      ms: of a query on one core, the median.
    """

    quantizer: Quantizer
    effort: int
    bytes: int
    recall: float
    recall_error: float
    held_out_recall: float
    ms: float

    def finds(self, goal: Goal) -> bool:
        """Whether it has the recall, by a standard error: the best of many trials would otherwise be a lucky one."""
        return self.recall - self.recall_error >= goal.recall

    def reaches(self, goal: Goal) -> bool:
        return self.finds(goal) and self.ms <= goal.ms

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("recall", "recall_error", "held_out_recall", "ms")}
        return (
            self.quantizer.as_json()
            | {"effort": self.effort, "bytes": self.bytes}
            | {k: round(v, 5) for k, v in values.items()}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a search.

    Attributes:
      index: with the chosen settings, and all vectors.
      chosen: its settings.
      trials: all that were tried.
    """

    index: faiss.Index
    chosen: Trial
    trials: tuple[Trial, ...]


class Tuner:
    """Tries settings on vectors and queries.

    Args:
      vectors_ND: float32 [N, D], which the index holds.
      queries_QD: float32 [Q, D]; settings are chosen by the first half, and scored by the second, too.
      goal: what must be reached.
      progress: is called with a topic and a detail.
    """

    def __init__(self, vectors_ND: np.ndarray, queries_QD: np.ndarray, goal: Goal, progress: Progress):
        self._vectors_ND, self._queries_QD, self._goal, self._progress = vectors_ND, queries_QD, goal, progress
        rng = np.random.default_rng(goal.seed)
        drawn = np.sort(rng.permutation(len(vectors_ND))[: goal.train_vectors])
        self._sample_SD = vectors_ND[drawn]
        exact = library().IndexFlatIP(vectors_ND.shape[1])
        exact.add(vectors_ND)
        self._nearest_QK = exact.search(queries_QD, min(goal.k, len(vectors_ND)))[1]
        self._trials: list[Trial] = []
        self._best: tuple[Trial, faiss.Index] | None = None

    def run(self) -> Tuned:
        """Tries the settings.

        The size of codes is bisected: a longer code finds more.

        Raises:
          UserError: none reaches the goal.
        """
        for codes in (Codes.FLOAT32, Codes.FLOAT16, Codes.INT8):
            self._try(Quantizer(codes=codes))
        count, dims = self._vectors_ND.shape
        sizes = divisors(dims)
        if (
            len(self._sample_SD) >= max(256, dims + 1) and sizes
        ):  # a byte's values, each of which is the mean of some vectors
            self._bisect([Quantizer(opq=True, pq_bytes=size) for size in rotated_sizes(dims)])
            self._bisect([Quantizer(pq_bytes=size) for size in sizes])
            self._bisect([Quantizer(codes=Codes.INT8, reduced=dims * part // 12) for part in range(1, 12)])
            is_slow = self._best is None or not self._best[0].quantizer.pq_bytes
            if is_slow and count >= _LEAST_LISTED:  # lists cost 8 bytes a vector, and time is all that they save
                lists = 1 << round(math.log2(math.sqrt(count)))
                self._bisect([Quantizer(lists=lists, pq_bytes=size) for size in sizes])
            self._try(Quantizer(pq_bytes=sizes[len(sizes) // 3], refined=Codes.INT8))
        if self._best is None:
            most = max(self._trials, key=lambda trial: trial.recall)
            raise UserError(
                f"no index reaches IndexPreparation.recall ({self._goal.recall}) within IndexPreparation.ms ({self._goal.ms}) a "
                f"query: {most.quantizer.factory} has recall {most.recall:.3f} in {most.ms:.2f} ms; lower one or raise the other"
            )
        chosen, index = self._best
        chosen.quantizer.searched(index, chosen.effort)
        return Tuned(index=index, chosen=chosen, trials=tuple(self._trials))

    def _bisect(self, family: Sequence[Quantizer]) -> None:
        """Tries settings of rising size, of which the longer find more, but none that cannot be smaller than the best."""
        count, most = len(self._vectors_ND), math.inf if self._best is None else self._best[0].bytes
        smaller = [quantizer for quantizer in family if quantizer.code_bytes * count < most]
        low, high = 0, len(smaller)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._try(smaller[middle]) else (middle + 1, high)

    def _try(self, quantizer: Quantizer) -> bool:
        """Whether an index with these settings has the recall; remembers the smallest that reaches the goal."""
        goal, half = self._goal, len(self._queries_QD) // 2
        latest = f"; the latest had recall {self._trials[-1].recall:.3f}" if self._trials else ""
        self._progress("searching the settings", f"{quantizer.as_json()['factory']}, {len(self._trials)} tried{latest}")
        index = quantizer.trained(self._sample_SD, goal.seed)
        index.add(self._vectors_ND)
        size, finds = len(library().serialize_index(index)), False
        for effort in quantizer.efforts:
            quantizer.searched(index, effort)
            shares_Q = self._shares(quantizer, index)
            trial = Trial(
                quantizer=quantizer,
                effort=effort,
                bytes=size,
                recall=float(shares_Q[:half].mean()),
                recall_error=float(shares_Q[:half].std(ddof=1) / math.sqrt(half)),
                held_out_recall=float(shares_Q[half:].mean()),
                ms=self._ms(quantizer, index),
            )
            self._trials.append(trial)
            finds |= trial.finds(goal)
            if trial.reaches(goal) and (self._best is None or _cost(trial) < _cost(self._best[0])):
                self._best = trial, index
            if trial.finds(goal) or trial.ms > goal.ms:  # more effort takes longer
                break
        return finds

    def _shares(self, quantizer: Quantizer, index: faiss.Index) -> np.ndarray:
        """The share of the nearest that an index finds, of each query: float64 [Q]."""
        indices_QK = quantizer.nearest(index, self._queries_QD, self._nearest_QK.shape[1])[1]
        pairs = zip(indices_QK, self._nearest_QK)
        return np.array([len(np.intersect1d(ours, exact)) / len(exact) for ours, exact in pairs])

    def _ms(self, quantizer: Quantizer, index: faiss.Index) -> float:
        """The median time of a query on one core, in milliseconds."""
        times = []
        with one_thread():
            for query_D in self._queries_QD[:_TIMED]:
                start = time.perf_counter()
                quantizer.nearest(index, query_D[None], self._goal.k)
                times.append(time.perf_counter() - start)
        return float(np.median(times) * 1e3)


def _cost(trial: Trial) -> tuple[int, float]:
    return trial.bytes, trial.ms
