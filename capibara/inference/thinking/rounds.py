"""Multi-round thinking: the question is answered again with the previous answer beside it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.inference.thinking.strategy import Answer, Ask, Draft, Rate, Strategy

_FIELDS = re.compile(r"\{(prompt|answer)\}")
_MOST = 64


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(Strategy):
    """Asks again with the previous answer, and takes the last one (Tian et al. 2025, arXiv:2503.19855).

    Only the answer is given back, without the thought before it.

    Attributes:
      rounds: how often a prompt is answered; 1: one text.
      again: the prompt of all rounds but the first, with {prompt} and {answer}.
    """

    rounds: int = 2
    again: str = "{prompt}\n\nAn earlier attempt had this answer:\n{answer}\n\nAnswer the question anew."

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= _MOST:
            raise UserError(f"Rounds.rounds is {self.rounds}, must be from 1 to {_MOST}: try 2")
        for name in ("{prompt}", "{answer}"):
            if name not in self.again:
                raise UserError(f"Rounds.again is {self.again[:60]!r}, must have {name} where that goes")

    @property
    def draws_samples(self) -> bool:
        return False

    def answers(self, texts: Sequence[str], ask: Ask, rate: Rate | None) -> list[Answer]:
        del rate
        rounds = [ask([Draft(number, text) for number, text in enumerate(texts)])]
        for _ in range(1, self.rounds):
            previous = rounds[-1]
            drafts = [Draft(n, self._again(text, draw.answer)) for n, (text, draw) in enumerate(zip(texts, previous))]
            rounds.append(ask(drafts))
        return [
            Answer(
                draws[-1].text, len(draws), sum(draw.tokens for draw in draws), {"answers": [d.answer for d in draws]}
            )
            for draws in zip(*rounds)
        ]

    def _again(self, prompt: str, answer: str) -> str:
        # In one pass: a prompt may have "{answer}" of its own.
        return _FIELDS.sub(lambda match: {"prompt": prompt, "answer": answer}[match[1]], self.again)
