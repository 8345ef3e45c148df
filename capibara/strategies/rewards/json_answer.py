"""A verifier of JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError
from capibara.strategies.rewards.bounded_process import BoundedProcesses
from capibara.strategies.rewards.verifier import Verifier

_CHECK_S = 30.0  # of a schema, at most


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonAnswer(Verifier):
    """1 if an answer is JSON that the record's JSON Schema accepts, alone or in its only fenced code block; otherwise 0.

    Numbers that JSON or floats do not have (NaN, Infinity, 1e400) and keys that come twice make an answer wrong. `format` is not
    checked, which JSON Schema leaves open. Answers are validated in a process of its own: one that takes longer than `seconds`, as
    a regular expression may, is wrong. Needs the package jsonschema.

    Attributes:
      field: field of the record with the schema, as an object or its text.
      seconds: of an answer, at most.
    """

    field: str = "schema"
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise UserError(f"JsonAnswer.seconds is {self.seconds}, must be finite and above 0: try 5")
        extras.require("jsonschema", extra="verifiers", why="@JsonAnswer()")

    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        del prompt
        return float(_processes().ask({"schema": self._schema(record), "answer": answer}, self.seconds) is True)

    def check_record(self, record: Mapping[str, object]) -> None:
        if mistake := _mistake(schema := self._schema(record)):
            raise UserError(
                f"JsonAnswer.field ({self.field!r}) of a record is {schema[:80]!r}, must be a JSON Schema: {mistake}"
            )

    def _schema(self, record: Mapping[str, object]) -> str:
        if self.field not in record:
            raise UserError(
                f"a record has no field {self.field!r} (it has: {', '.join(record)}): set JsonAnswer.field to the one with the schema"
            )
        schema = record[self.field]
        return schema if isinstance(schema, str) else json.dumps(schema)


@functools.lru_cache(256)
def _mistake(schema: str) -> str:
    mistake = _processes().ask({"schema": schema}, _CHECK_S)
    return f"it is not checked within {_CHECK_S:g} s" if mistake is None else str(mistake)


@functools.cache
def _processes() -> BoundedProcesses:
    return BoundedProcesses("json_worker.py", "jsonschema")
