"""Compiles the best-ranked plans with the TPU compiler until one is proven; the results correct the memory model.

A correction applies to plans of the same kind (Choice.kind): the model's error for a pipeline says nothing about fsdp.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from capibara.core.types import UserError
from capibara.planner.compiler.compile_cache import Outcome, Verdict
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import memory
from capibara.planner.model.workload import Workload
from capibara.planner.search import ranking
from capibara.planner.search.ranking import Goal, Question, Ranked

_BETTER = 1.01  # a plan that promises less than this over a proven one is not compiled
_BEYOND = 1.02  # assumed ratio of need to limit for a plan that does not fit, if the compiler does not say


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """A plan that was compiled.

    Attributes:
      ranked: the plan with its prediction before the compile.
      verdict: the compile result.
      scale: correction of the memory model from it; None: no correction.
    """

    ranked: Ranked
    verdict: Verdict
    scale: float | None

    @property
    def is_usable(self) -> bool:
        """Whether it compiled and leaves the requested headroom."""
        compiled = self.verdict.compiled
        fits = self.verdict.outcome is Outcome.FITS
        return fits and compiled is not None and (compiled.peak_bytes or 0) <= self.ranked.limit_bytes


@dataclasses.dataclass(frozen=True)
class VerifiedRanking:
    """The result of the compiles.

    Attributes:
      ranked: all plans with corrected predictions, the proven one first.
      tried: compiled plans, in order.
      proven: the best compiled plan that fits; None: nothing was compiled.
      question: the question with the learned corrections.
    """

    ranked: list[Ranked]
    tried: list[CompiledPlan]
    proven: CompiledPlan | None
    question: Question

    def of(self, ranked: Ranked) -> CompiledPlan | None:
        """The compile result of a plan; None: not compiled."""
        return next((item for item in self.tried if item.ranked.choice == ranked.choice), None)


def unproven(ranked: list[Ranked], question: Question) -> VerifiedRanking:
    """A ranking without compiled plans."""
    return VerifiedRanking(ranked, [], None, question)


def walk(
    work: Workload, slice_: Slice, question: Question, prove: Callable[[Ranked], Verdict], *, most: int = 6
) -> VerifiedRanking:
    """Compiles the best plan, learns, ranks again, until no plan promises more than a proven one.

    Args:
      work, slice_, question: of the search.
      prove: compiles a plan.
      most: most compiles.

    Raises:
      UserError: no plan was proven, or as in ranking.search.
    """
    tried: list[CompiledPlan] = []

    def score(ranked: Ranked) -> float:
        largest = question.goal is Goal.LARGEST_BATCH
        return ranked.choice.batch_size(work) if largest else ranked.cost.tokens_per_s

    while True:
        ranked = ranking.search(work, slice_, question)
        done = {item.ranked.choice for item in tried}
        usable = [item for item in tried if item.is_usable]
        proven = max(usable, key=lambda item: score(item.ranked), default=None)
        new = next((item for item in ranked if item.choice not in done), None)
        worth = new is not None and new.fits and (proven is None or score(new) > _BETTER * score(proven.ranked))
        if new is None or not worth or len(tried) == most:
            if proven is None:
                raise UserError(_nothing_proven(tried, new, slice_, question))
            return VerifiedRanking(_with_first(ranked, proven, tried), tried, proven, question)
        verdict = prove(new)
        shown = correction_from(work, new, verdict)
        tried.append(CompiledPlan(new, verdict, shown))
        if shown is not None:
            scales = dict(question.scales) | {new.choice.kind: shown}
            question = dataclasses.replace(question, scales=tuple(scales.items()))


def correction_from(work: Workload, ranked: Ranked, verdict: Verdict) -> float | None:
    """The correction that makes the memory model agree with the compiler; None: the result implies none.

    The state's size is exact: the correction applies to everything else.
    """
    if verdict.compiled is None:
        return None
    # A plan that was rejected does not fit with the memory-saving schedule either.
    lean = ranked.memory.lean or verdict.outcome is Outcome.DOES_NOT_FIT
    plain = memory.memory(work, ranked.choice, ranked.slice_.chip, most_bytes=0 if lean else math.inf)
    peak = float(verdict.compiled.peak_bytes or 0)
    if verdict.outcome is Outcome.DOES_NOT_FIT:  # the error may name only a part of the need
        peak = max(peak, _BEYOND * max(ranked.memory.peak, verdict.compiled.limit_bytes or 0))
    return max(0.1, (peak - plain.state) / (plain.peak - plain.state))


def _with_first(ranked: list[Ranked], proven: CompiledPlan, tried: list[CompiledPlan]) -> list[Ranked]:
    """The ranking without plans that failed, the proven one first."""
    bad = {item.ranked.choice for item in tried if not item.is_usable}
    first = next((item for item in ranked if item.choice == proven.ranked.choice), proven.ranked)
    return [first, *(item for item in ranked if item.choice not in bad and item.choice != first.choice)]


def _nothing_proven(tried: list[CompiledPlan], new: Ranked | None, slice_: Slice, question: Question) -> str:
    """An error that says why no plan was proven."""
    last = tried[-1] if tried else None
    if last and last.verdict.compiled is None:
        return f"{last.ranked.choice.describe()} on {slice_.name} cannot be compiled: {last.verdict.message}"
    if new is not None and new.fits:
        return f"none of {len(tried)} plans fits {slice_.name} with {question.headroom:.0%} to spare: raise --tries"
    peak = min(
        (item.verdict.compiled.peak_bytes or math.inf for item in tried if item.verdict.compiled), default=math.inf
    )
    need = f": the leanest that was compiled needs {peak / 2**30:.2f} GiB a chip" if peak < math.inf else ""
    return f"no plan fits {slice_.name} with {question.headroom:.0%} to spare{need}: use a larger slice, or lower --headroom"
