"""A verifier of mathematics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError
from capibara.strategies.rewards.math_process import is_readable, verifying
from capibara.strategies.rewards.verifier import Verifier


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MathAnswer(Verifier):
    r"""1 if the last formula or number of an answer equals the record's answer, otherwise 0, by Hugging Face's math-verify.

    It reads LaTeX (\boxed{...} first) and plain expressions, and compares them as SymPy does: 1/2, 0.5 and \frac{1}{2} are equal, and
    so are sets, intervals, matrices and equations. Formulas are read in a process of its own: one that takes longer than
    `seconds`, or more than its memory, is wrong. Needs the package math-verify.

    Attributes:
      field: field of the record with the right answer: a number, or one formula of LaTeX, with $ or without; after "####", as in
        GSM8K.
      boxed: whether only a formula in \boxed{...} is an answer.
      seconds: of an answer, at most.
    """

    field: str = "answer"
    boxed: bool = False
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise UserError(f"MathAnswer.seconds is {self.seconds}, must be above 0: try 5")
        extras.require("math_verify", extra="verifiers", why="@MathAnswer()")

    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        del prompt
        return float(verifying().equal(self._right(record), answer, self.seconds, self.boxed))

    def check_record(self, record: Mapping[str, object]) -> None:
        right = self._right(record)
        if not is_readable(right, self.seconds):
            raise UserError(
                f"MathAnswer.field ({self.field!r}) of a record is {right[:100]!r}, must be one number or formula: write it as "
                "LaTeX, between $ where it has words"
            )

    def _right(self, record: Mapping[str, object]) -> str:
        if self.field not in record:
            raise UserError(
                f"a record has no field {self.field!r} (it has: {', '.join(record)}): set MathAnswer.field to the one with the answer"
            )
        return str(record[self.field])
