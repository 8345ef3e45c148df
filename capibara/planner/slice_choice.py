"""Which slice to rent: the best plan on every slice of some chips, and the slice that an objective asks for."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

from capibara.planner import search, slices
from capibara.planner.search import Question, Ranked
from capibara.planner.slices import Slice
from capibara.planner.workload import Workload
from capibara.types import UserError

KINDS = ("v5e", "v6e")


class SliceObjective(enum.StrEnum):
    """The fewest chips that train the model, the fewest dollars for the tokens, the fewest chips for the speed."""

    SMALLEST_SLICE = "smallest_slice"
    CHEAPEST = "cheapest"
    TARGET_THROUGHPUT = "target_throughput"


@dataclasses.dataclass(frozen=True)
class Offer:
    """A slice with its best plans; those of `ranked` that do not fit come last."""

    slice_: Slice
    ranked: list[Ranked]

    @property
    def best(self) -> Ranked:
        return self.ranked[0]

    def usd_per_million_tokens(self, usd: float | None) -> float | None:
        """Predicted; None without a price."""
        return self.best.cost.usd(1e6, usd)


def offers(
    work: Workload,
    kinds: Iterable[str],
    question: Question,
    status: Callable[[str], None] = lambda name: None,
) -> list[Offer]:
    """The slices of these chips that the model fits, by their number of chips; one slice each, no several."""
    found = []
    for kind in kinds:
        for slice_ in slices.sizes(kind):
            if slice_.devices & (slice_.devices - 1):
                continue  # numbers of chips that are no power of two divide few models
            status(slice_.name)
            try:
                ranked = search.search(work, slice_, question)
            except UserError:  # no mesh of this slice divides the model or the batch
                continue
            if ranked[0].fits:
                found.append(Offer(slice_, ranked))
    return sorted(found, key=lambda offer: (offer.slice_.chips, offer.slice_.name))


def best(
    found: Sequence[Offer],
    objective: SliceObjective | str,
    *,
    target: float | None = None,
    tokens: float | None = None,
    days: float | None = None,
    usd: float | None = None,
) -> Offer:
    """The offer that the objective asks for.

    Args:
      found: of `offers`.
      objective: what to look for.
      target: tokens a second, for the target throughput.
      tokens, days: of the whole training, and in how many days it must be done; None: in any time.
      usd: per chip-hour in place of the list prices.

    Raises:
      UserError: none does it.
    """
    if not found:
        raise UserError("no slice of these chips has a plan that fits: add larger chips, e.g. --chips=v5p, or shorten --length")
    match SliceObjective(objective):
        case SliceObjective.SMALLEST_SLICE:
            return min(found, key=lambda offer: (offer.slice_.chips, -offer.best.cost.tokens_per_s))
        case SliceObjective.CHEAPEST:
            priced = [offer for offer in found if offer.usd_per_million_tokens(usd) is not None]
            if not priced:
                raise UserError("no list price is known of these chips: give one with --usd_per_chip_hour")
            if days is not None:
                quickest = min(offer.best.cost.days(tokens) for offer in priced)
                priced = [offer for offer in priced if offer.best.cost.days(tokens) <= days]
                if not priced:
                    raise UserError(
                        f"no slice trains {tokens:.3g} tokens in {days:g} days: the quickest takes {quickest:.1f} "
                        "(predicted); ask for several, e.g. --slice=4xv5e-256, or for more days"
                    )
            return min(priced, key=lambda offer: offer.usd_per_million_tokens(usd))
    reached = [offer for offer in found if offer.best.cost.tokens_per_s >= target]
    if not reached:
        most = max(found, key=lambda offer: offer.best.cost.tokens_per_s)
        raise UserError(
            f"no slice reaches {target:,.0f} tokens/s: {most.slice_.name} is predicted to make "
            f"{most.best.cost.tokens_per_s:,.0f}; several of them do it, e.g. --slice=2x{most.slice_.name}"
        )
    return min(reached, key=lambda offer: (offer.slice_.chips, -offer.best.cost.tokens_per_s))
