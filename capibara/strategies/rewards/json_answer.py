"""A verifier of JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError
from capibara.strategies.rewards.verifier import Verifier

_FENCED = re.compile(r"```[ \t]*(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class _Validator(Protocol):
    def is_valid(self, instance: object) -> bool: ...


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonAnswer(Verifier):
    """1 if an answer is JSON that the record's JSON Schema accepts, alone or in its only fenced code block; otherwise 0.

    Numbers that JSON does not have (NaN, Infinity) and keys that come twice make an answer wrong. `format` is not checked, which
    JSON Schema leaves open. Needs the package jsonschema.

    Attributes:
      field: field of the record with the schema, as an object or its text.
    """

    field: str = "schema"

    concurrent = False

    def __post_init__(self) -> None:
        extras.require("jsonschema", extra="verifiers", why="@JsonAnswer()")

    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        del prompt
        blocks = _FENCED.findall(answer)
        try:
            value = json.loads(
                blocks[0] if len(blocks) == 1 else answer,
                parse_constant=_refuse_constant,
                object_pairs_hook=_without_duplicates,
            )
            return float(self._validator(record).is_valid(value))
        except (ValueError, RecursionError):
            return 0.0

    def check_record(self, record: Mapping[str, Any]) -> None:
        self._validator(record)

    def _validator(self, record: Mapping[str, Any]) -> _Validator:
        if self.field not in record:
            raise UserError(
                f"a record has no field {self.field!r} (it has: {', '.join(record)}): set JsonAnswer.field to the one with the schema"
            )
        schema = record[self.field]
        return _validator(schema if isinstance(schema, str) else json.dumps(schema), self.field)


@functools.lru_cache(256)
def _validator(text: str, field: str) -> _Validator:
    import jsonschema
    import referencing

    try:
        schema = json.loads(text)
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
        # An empty registry: a schema of the data must not have this process open addresses.
        validator: _Validator = kind(schema, registry=referencing.Registry())
        validator.is_valid(None)
    except Exception as error:  # of the parser, the meta-schema, a reference that leads nowhere
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"JsonAnswer.field ({field!r}) of a record is {text[:80]!r}, must be a JSON Schema: {first}"
        ) from None
    return validator


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key comes twice")
    return result
