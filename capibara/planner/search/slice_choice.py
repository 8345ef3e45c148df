"""Chooses the slice to rent: the best plan on every slice of some chips, and the slice that meets a goal."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence

from capibara.core.types import UserError
from capibara.planner.hardware import chips, slices
from capibara.planner.hardware.slices import Slice
from capibara.planner.model.workload import Run, Workload
from capibara.planner.search import ranking
from capibara.planner.search.questions import SliceGoal
from capibara.planner.search.ranking import Question, Ranked

_MANY = 64  # most slices to suggest
_MOST_CHIPS = 1024  # of a slice: larger ones take minutes to search, and must be requested by name


@dataclasses.dataclass(frozen=True)
class Offer:
    """A slice with its plans; those of `ranked` that do not fit come last."""

    slice_: Slice
    ranked: list[Ranked]

    @property
    def best(self) -> Ranked:
        return self.ranked[0]

    def usd_per_million_tokens(self, usd: float | None) -> float | None:
        """A prediction; None without a price."""
        return self.best.cost.usd(1e6, usd)


def check_all_train(run: Run, goal: str) -> None:
    """Raises UserError for a run of which devices draw answers beside training: a goal is of the devices that train."""
    if run.loss is not None and run.loss.rollout_devices:
        raise UserError(
            f"--goal={goal} is for slices that train alone, and {type(run.loss).__name__}.rollout_devices is "
            f"{run.loss.rollout_devices}: name a slice, e.g. --slice=v5e-8"
        )


def offers(
    work: Workload, args: argparse.Namespace, question: Question, status: Callable[[str], None] = lambda name: None
) -> list[Offer]:
    """The slices that the model fits, by number of chips, up to those that the goal needs.

    Args:
      work: the workload.
      args: the flags of questions.add_arguments: chips, goal and tokens_per_s are used.
      question: the search's question for each slice.
      status: called with the slice that is being searched.

    Raises:
      UserError: no slice suits the model, the batch or the fixed mesh axes.
    """
    kinds = {chips.chip(name).name: None for name in args.chips.split(",")}
    weighed = [slice_ for kind in kinds for slice_ in slices.sizes(kind) if slice_.chips <= _MOST_CHIPS]
    # Numbers of chips that are not powers of two divide few models.
    weighed = [slice_ for slice_ in weighed if not slice_.devices & (slice_.devices - 1)]
    result: list[Offer] = []
    error_of_largest: UserError | None = None  # unless the largest slice has a mesh
    for slice_ in sorted(weighed, key=lambda slice_: (slice_.chips, slice_.name)):
        if result and slice_.chips > result[-1].slice_.chips and _enough(result, args):
            break
        status(slice_.name)
        try:
            ranked = ranking.search(work, slice_, question)
        except UserError as error:  # no mesh of this slice divides the model or the batch
            error_of_largest = error
            continue
        error_of_largest = None
        if ranked[0].fits:
            result.append(Offer(slice_, ranked))
    if not result and error_of_largest is not None:
        raise error_of_largest
    return result


def _enough(offers: Sequence[Offer], args: argparse.Namespace) -> bool:
    """Whether slices with more chips can be ruled out."""
    if args.goal == SliceGoal.TARGET_THROUGHPUT:
        return any(offer.best.cost.tokens_per_s >= args.tokens_per_s for offer in offers)
    return args.goal == SliceGoal.SMALLEST_SLICE


def best(offers: Sequence[Offer], args: argparse.Namespace) -> Offer:
    """The offer that meets the goal best.

    Args:
      offers: from `offers`.
      args: the flags: goal, tokens_per_s, tokens, max_days, usd_per_chip_hour.

    Raises:
      UserError: no offer meets the goal.
    """
    if not offers:
        raise UserError(
            "no slice of these chips has a plan that fits: add larger chips, e.g. --chips=v5p, or shorten --length"
        )
    usd = args.usd_per_chip_hour
    match SliceGoal(args.goal):
        case SliceGoal.SMALLEST_SLICE:
            return min(offers, key=lambda offer: (offer.slice_.chips, -offer.best.cost.tokens_per_s))
        case SliceGoal.TARGET_THROUGHPUT:
            return _fastest_enough(offers, args.tokens_per_s)
    priced = [(price, offer) for offer in offers if (price := offer.usd_per_million_tokens(usd)) is not None]
    if not priced:
        raise UserError("these chips have no known list price: set --usd_per_chip_hour")
    if args.max_days is not None:
        quickest = min(offer.best.cost.days(args.tokens) for _, offer in priced)
        priced = [(price, offer) for price, offer in priced if offer.best.cost.days(args.tokens) <= args.max_days]
        if not priced:
            raise UserError(
                f"no slice trains {args.tokens:.3g} tokens in {args.max_days:g} days: the fastest takes {quickest:.1f} "
                "(predicted); allow more days, or plan for several: --slice=4xv5e-256 without --goal and --max_days"
            )
    return min(priced, key=lambda item: item[0])[1]


def _fastest_enough(offers: Sequence[Offer], target: float) -> Offer:
    reached = [offer for offer in offers if offer.best.cost.tokens_per_s >= target]
    if not reached:
        most = max(offers, key=lambda offer: offer.best.cost.tokens_per_s)
        count = math.ceil(target / most.best.cost.tokens_per_s)
        several = f"several may do it: --slice={count}x{most.slice_.name} without --goal and --tokens_per_s"
        fix = several if count <= _MANY else "ask for fewer"
        raise UserError(
            f"no slice reaches {target:,.0f} tokens/s: {most.slice_.name} is predicted to make "
            f"{most.best.cost.tokens_per_s:,.0f}; {fix}"
        )
    return min(reached, key=lambda offer: (offer.slice_.chips, -offer.best.cost.tokens_per_s))
