"""Whether no text matches two schemas; a proof by types, values, bounds and properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from capibara.inference.grammars.negation import TYPES, type_of
from capibara.inference.grammars.references import Schema

_DEPTH = 6  # of properties and references that are looked into
_MOST_STEPS = 1 << 17  # which take a tenth of a second


class Reader:
    """Follows the references of a schema for as many steps as it may.

    Args:
      target: the schema that a reference names.
    """

    def __init__(self, target: Callable[[int], Schema]):
        self.target, self._left = target, _MOST_STEPS

    def may_go_on(self, steps: int = 1) -> bool:
        """Whether so many further steps are left; takes them."""
        self._left -= steps
        return self._left >= 0


def is_disjoint(first: Schema, second: Schema, reader: Reader, depth: int = _DEPTH) -> bool:
    """Whether it is certain that nothing matches both schemas; not certain if the reader may not go on.

    Args:
      first: a schema whose references are numbers.
      second: another.
      reader: of their references.
      depth: how many properties and references in each other are looked into.
    """
    if first is False or second is False:
        return True
    if not depth or not reader.may_go_on():
        return False
    left, right = [*_conjuncts(first, reader, depth)], [*_conjuncts(second, reader, depth)]
    for conjuncts, against in ((left, second), (right, first)):
        branches = [schema[key] for schema in conjuncts for key in ("anyOf", "oneOf") if key in schema]
        if any(all(is_disjoint(item, against, reader, depth - 1) for item in each) for each in branches):
            return True
    return _differ(left, right, reader) or any(
        _excludes(here, there, reader, depth) for here, there in ((left, right), (right, left))
    )


def _conjuncts(schema: Schema, reader: Reader, depth: int) -> Iterator[dict[str, Any]]:
    """What a text must match, each."""
    if isinstance(schema, bool) or not depth or not reader.may_go_on():
        return
    yield schema
    for item in schema.get("allOf", ()):
        yield from _conjuncts(item, reader, depth - 1)
    if "$ref" in schema:
        yield from _conjuncts(reader.target(schema["$ref"]), reader, depth - 1)


def _differ(left: list[dict[str, Any]], right: list[dict[str, Any]], reader: Reader) -> bool:
    """By types, values and bounds."""
    if not _types(left) & _types(right):
        return True
    first, second = _values(left), _values(right)
    if first is not None and second is not None:
        return reader.may_go_on(len(first) * len(second)) and not any(_equal(x, y) for x in first for y in second)
    return _types(left) & _types(right) <= {"number", "integer"} and any(
        _least(here) > _most(there) for here, there in ((left, right), (right, left))
    )


def _types(schemas: list[dict[str, Any]]) -> set[str]:
    """The types that are left, `number` without integers."""
    left = {*TYPES, "integer"}
    for schema in schemas:
        if (value := schema.get("type")) is not None:
            names = {value} if isinstance(value, str) else {*value}
            left &= names | ({"integer"} if "number" in names else set())
        if "const" in schema or "enum" in schema:
            kinds = {type_of(value) for value in _values([schema]) or ()}
            left &= kinds | ({"integer"} if "number" in kinds else set())
    return left


def _values(schemas: list[dict[str, Any]]) -> list[Any] | None:
    each = [
        [schema["const"]] if "const" in schema else schema["enum"]
        for schema in schemas
        if "const" in schema or "enum" in schema
    ]
    return each[0] if each else None


def _equal(first: Any, second: Any) -> bool:
    """As JSON Schema compares: 1 is 1.0, and true is not 1."""
    if type_of(first) != type_of(second):
        return False
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(value, second[key]) for key, value in first.items())
    return bool(first == second)


def _least(schemas: list[dict[str, Any]]) -> float:
    return max((schema["minimum"] for schema in schemas if "minimum" in schema), default=-float("inf"))


def _most(schemas: list[dict[str, Any]]) -> float:
    return min((schema["maximum"] for schema in schemas if "maximum" in schema), default=float("inf"))


def _excludes(left: list[dict[str, Any]], right: list[dict[str, Any]], reader: Reader, depth: int) -> bool:
    """Whether objects of the first have a property that those of the second cannot have."""
    if _types(left) & _types(right) != {"object"}:
        return False
    for name in {name for schema in left for name in schema.get("required", ())}:
        if not reader.may_go_on(len(left) + len(right)):
            return False
        here = [schema["properties"][name] for schema in left if name in schema.get("properties", ())]
        there = [schema["properties"][name] for schema in right if name in schema.get("properties", ())]
        closed = (
            name not in schema.get("properties", ())
            and schema.get("additionalProperties") is False
            and not schema.get("patternProperties")
            for schema in right
        )
        if any(closed) or False in there or any(is_disjoint(x, y, reader, depth - 1) for x in here for y in there):
            return True
    return False
