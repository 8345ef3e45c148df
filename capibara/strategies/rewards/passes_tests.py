"""A verifier that runs unit tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.sandbox import answers, sandbox
from capibara.sandbox.sandbox import Sandbox
from capibara.strategies.rewards.verifier import Verifier


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassesTests(Verifier):
    """1 if the program of an answer passes the record's tests in a `sandbox`; otherwise 0.

    The program is the code in an answer's fenced block that defines the record's "entry_point", else in its first block, else the
    whole answer; what the record's "setup" has (MBPP's "test_setup_code" and "test_imports") runs before it. Tests are decided in a process of their own, which the program
    does not reach (see `dialogue`).

    Attributes:
      field: field of the record with the tests: Python, as a text or a list of statements; if the record has an "entry_point",
        they define `check`, which is called with that function.
      limits: of a program.
    """

    field: str = "test"
    limits: Sandbox = Sandbox()

    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        del prompt
        return float(sandbox.run(answers.judged(self._target(record), answer), self.limits).passed)

    def check_record(self, record: Mapping[str, object]) -> None:
        answers.judged(self._target(record), "")

    def _target(self, record: Mapping[str, Any]) -> dict[str, Any]:
        if self.field not in record:
            raise UserError(
                f"a record has no field {self.field!r} (it has: {', '.join(record)}): set PassesTests.field to the one with the tests"
            )
        parts = [record.get(name) or "" for name in ("setup", "test_setup_code", "test_imports")]
        texts = [text for part in parts for text in (part if isinstance(part, list) else [part])]
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        setup = "\n".join(filter(None, texts)) if wrong is None else wrong
        return {"test": record[self.field], "setup": setup, "entry_point": record.get("entry_point")}
