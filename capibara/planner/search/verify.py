"""Walks down a ranking with the TPU compiler until a plan is proven; what it learns corrects the memory model.

The correction is of plans of the same kind (Choice.kind): what the model gets wrong of a pipeline says nothing of fsdp.
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

_BETTER = 1.01  # a plan that promises less than this over a proven one is not worth a compile
_BEYOND = 1.02  # how far beyond the limit a plan is taken to be that does not fit, where the compiler does not say


@dataclasses.dataclass(frozen=True)
class Tried:
    """A plan that was compiled.

    Attributes:
      ranked: with the prediction as it stood before.
      verdict: the compiler's.
      scale: correction of the memory model that it showed; None where it showed none.
    """

    ranked: Ranked
    verdict: Verdict
    scale: float | None

    @property
    def good(self) -> bool:
        """Whether it compiled, and left as much HBM free as was asked."""
        compiled = self.verdict.compiled
        fits = self.verdict.outcome is Outcome.FITS
        return fits and compiled is not None and (compiled.peak_bytes or 0) <= self.ranked.limit_bytes


@dataclasses.dataclass(frozen=True)
class Walk:
    """What came of it.

    Attributes:
      ranked: all plans, with what was learned, the proven one first.
      tried: plans that were compiled, in their order.
      proven: the best of those that are good; None: nothing was compiled.
      question: what was asked, with the corrections that were learned.
    """

    ranked: list[Ranked]
    tried: list[Tried]
    proven: Tried | None
    question: Question

    def of(self, ranked: Ranked) -> Tried | None:
        """What was tried of a plan; None: nothing."""
        return next((one for one in self.tried if one.ranked.choice == ranked.choice), None)


def unproven(ranked: list[Ranked], question: Question) -> Walk:
    """A ranking of which nothing is compiled."""
    return Walk(ranked, [], None, question)


def walk(
    work: Workload, slice_: Slice, question: Question, prove: Callable[[Ranked], Verdict], *, most: int = 6
) -> Walk:
    """Compiles the best plan, learns, ranks again, until no plan promises more than a proven one.

    Args:
      work, slice_, question: of the search.
      prove: compiles a plan.
      most: compiles at most.

    Raises:
      UserError: no plan was proven, or as search.search does.
    """
    tried: list[Tried] = []

    def score(ranked: Ranked) -> float:
        largest = question.goal is Goal.LARGEST_BATCH
        return ranked.choice.batch_size(work) if largest else ranked.cost.tokens_per_s

    while True:
        ranked = ranking.search(work, slice_, question)
        done = {one.ranked.choice for one in tried}
        good = [one for one in tried if one.good]
        proven = max(good, key=lambda one: score(one.ranked), default=None)
        new = next((one for one in ranked if one.choice not in done), None)
        worth = new is not None and new.fits and (proven is None or score(new) > _BETTER * score(proven.ranked))
        if new is None or not worth or len(tried) == most:
            if proven is None:
                raise UserError(_nothing_proven(tried, new, slice_, question))
            return Walk(_with_first(ranked, proven, tried), tried, proven, question)
        verdict = prove(new)
        shown = learned(work, new, verdict)
        tried.append(Tried(new, verdict, shown))
        if shown is not None:
            scales = dict(question.scales) | {new.choice.kind: shown}
            question = dataclasses.replace(question, scales=tuple(scales.items()))


def learned(work: Workload, ranked: Ranked, verdict: Verdict) -> float | None:
    """The correction with which the memory model would have said what the compiler says; None: it says nothing.

    The state is exact: the correction is of all else.
    """
    if verdict.compiled is None:
        return None
    # What was refused does not fit in the leaner order of work either.
    lean = ranked.memory.lean or verdict.outcome is Outcome.DOES_NOT_FIT
    plain = memory.memory(work, ranked.choice, most_bytes=0 if lean else math.inf)
    peak = float(verdict.compiled.peak_bytes or 0)
    if verdict.outcome is Outcome.DOES_NOT_FIT:  # what the error names may be a part of the need
        peak = max(peak, _BEYOND * max(ranked.memory.peak, verdict.compiled.limit_bytes or 0))
    return max(0.1, (peak - plain.state) / (plain.peak - plain.state))


def _with_first(ranked: list[Ranked], proven: Tried, tried: list[Tried]) -> list[Ranked]:
    """Without the plans that turned out bad, the proven one first."""
    bad = {one.ranked.choice for one in tried if not one.good}
    first = next((one for one in ranked if one.choice == proven.ranked.choice), proven.ranked)
    return [first, *(one for one in ranked if one.choice not in bad and one.choice != first.choice)]


def _nothing_proven(tried: list[Tried], new: Ranked | None, slice_: Slice, question: Question) -> str:
    """One line on what stood in the way."""
    last = tried[-1] if tried else None
    if last and last.verdict.compiled is None:
        return f"{last.ranked.choice.describe()} on {slice_.name} cannot be compiled: {last.verdict.message}"
    if new is not None and new.fits:
        return f"none of {len(tried)} plans fits {slice_.name} with {question.headroom:.0%} to spare: raise --tries"
    peak = min((one.verdict.compiled.peak_bytes or math.inf for one in tried if one.verdict.compiled), default=math.inf)
    need = f": the leanest that was compiled needs {peak / 2**30:.2f} GiB a chip" if peak < math.inf else ""
    return f"no plan fits {slice_.name} with {question.headroom:.0%} to spare{need}: use a larger slice, or lower --headroom"
