"""Several texts of the model as one answer: what stands between their pieces, and at the end."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.inference.engine.requests.stream import Completion, Piece


@dataclasses.dataclass(frozen=True)
class NextTurn(Piece):
    """Between the pieces of two texts: another text begins.

    Attributes:
      thinks: whether its prompt ends inside a thought.
    """

    text: str = ""
    token: int | None = None
    thinks: bool = False


@dataclasses.dataclass(frozen=True)
class JoinedCompletion(Completion):
    """The end of an answer from several texts.

    Attributes:
      more_read: tokens of prompts besides that of the request.
      more_written: tokens of texts besides the pieces.
      report: further fields of the response.
    """

    more_read: int = 0
    more_written: int = 0
    report: dict[str, Any] = dataclasses.field(default_factory=dict)


def more_read(completion: Completion) -> int:
    """Tokens of prompts besides that of the request."""
    return completion.more_read if isinstance(completion, JoinedCompletion) else 0


def written(completion: Completion) -> int:
    """Tokens of all texts that an answer has cost."""
    more = completion.more_written if isinstance(completion, JoinedCompletion) else 0
    return len(completion.tokens) + more


def report(completion: Completion) -> dict[str, Any]:
    """Further fields of the response."""
    return completion.report if isinstance(completion, JoinedCompletion) else {}
