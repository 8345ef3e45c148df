"""Self-consistency: the answer that most of several samples have."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.inference.thinking.strategy import Answer, Ask, Draft, Draw, Rate, Strategy

MOST_SAMPLES = 1024


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfConsistency(Strategy):
    r"""Draws samples and takes the answer with the most votes (Wang et al. 2022, arXiv:2203.11171).

    Of answers with equally many votes, the one that was drawn first wins, and `tie` is true. A text without an answer has no
    vote; if no text has one, the first is taken, with 0 votes.

    Attributes:
      samples: how many texts are drawn; 1: one text.
      pattern: a regular expression whose last match in a text, after the thought, is its answer (the first group, if there is
        one), such as "-?\d+"; None: the whole, without case and with single spaces.
    """

    samples: int = 8
    pattern: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise UserError(f"SelfConsistency.samples is {self.samples}, must be from 1 to {MOST_SAMPLES}: try 8")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise UserError(
                f"SelfConsistency.pattern is {self.pattern!r}, which is no regular expression ({error}): try '-?\\d+'"
            ) from None

    @property
    def draws_samples(self) -> bool:
        return self.samples > 1

    def answers(self, texts: Sequence[str], ask: Ask, rate: Rate | None) -> list[Answer]:
        del rate
        return [self._elected(draws) for draws in samples_of(self.samples, texts, ask)]

    def _elected(self, draws: Sequence[Draw]) -> Answer:
        votes: collections.Counter[str] = collections.Counter()
        first: dict[str, Draw] = {}
        for draw in draws:
            if (vote := self._vote(draw.answer)) is not None:
                votes[vote] += 1
                first.setdefault(vote, draw)
        most = max(votes.values(), default=0)
        winners = [vote for vote in first if votes[vote] == most]  # in the order in which they were drawn
        text = first[winners[0]].text if winners else draws[0].text
        about = {"votes": most, "tie": len(winners) > 1, "answers": dict(votes)}
        return Answer(text, len(draws), sum(draw.tokens for draw in draws), about)

    def _vote(self, answer: str) -> str | None:
        """What a text votes for; None: it has no answer."""
        if self._compiled is None:
            return " ".join(answer.casefold().split()) or None
        matches = list(self._compiled.finditer(answer))
        return matches[-1][1 if self._compiled.groups else 0] if matches else None

    @functools.cached_property
    def _compiled(self) -> re.Pattern[str] | None:
        return None if self.pattern is None else re.compile(self.pattern)


def samples_of(samples: int, texts: Sequence[str], ask: Ask) -> list[Sequence[Draw]]:
    """Samples of each prompt."""
    draws = ask([Draft(number, text, sample) for number, text in enumerate(texts) for sample in range(samples)])
    return [draws[i : i + samples] for i in range(0, len(draws), samples)]
