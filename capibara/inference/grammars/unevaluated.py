"""`unevaluatedProperties` and `unevaluatedItems`: alternatives that each know what they have evaluated."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from capibara.core.types import UserError
from capibara.inference.grammars.disjoint import Reader
from capibara.inference.grammars.negation import all_of, any_of, no
from capibara.inference.grammars.references import Schema

_DEPTH = 8  # of references in each other
_MOST = 64  # alternatives
_WAY_STEPS = 64  # of a reader, for the ways of a schema


@dataclasses.dataclass(frozen=True)
class _Way:
    """A way to match a schema.

    Attributes:
      matches: the schemas of the branches that it takes.
      names: properties that these evaluate.
      patterns: of names that they evaluate.
      items: how many first items they evaluate.
      rest: whether they evaluate all other properties.
      rest_items: whether they evaluate all other items.
    """

    matches: tuple[Schema, ...] = ()
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    items: int = 0
    rest: bool = False
    rest_items: bool = False

    def __add__(self, other: _Way) -> _Way:
        return _Way(
            self.matches + other.matches,
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.items, other.items),
            self.rest or other.rest,
            self.rest_items or other.rest_items,
        )


def closed(schema: dict[str, Any], reader: Reader) -> Schema:
    """What `unevaluatedProperties` and `unevaluatedItems` of a schema ask for, beside its other keywords.

    A text that matches more branches than a way takes has evaluated more, and may have what the way allows.

    Args:
      schema: with one of the two, or both; its references are numbers.
      reader: of its references.

    Raises:
      UserError: it has too many branches, or references itself.
    """
    alternatives = []
    bare = {key: value for key, value in schema.items() if not key.startswith("unevaluated")}
    for way in _ways(bare, reader, _DEPTH):
        end: dict[str, Any] = {}
        if "unevaluatedProperties" in schema and not way.rest:
            end["properties"] = {name: True for name in sorted(way.names)}
            end["patternProperties"] = {pattern: True for pattern in sorted(way.patterns)}
            end["additionalProperties"] = schema["unevaluatedProperties"]
        if "unevaluatedItems" in schema and not way.rest_items:
            end["prefixItems"], end["items"] = [True] * way.items, schema["unevaluatedItems"]
        alternatives.append(all_of([*way.matches, {key: value for key, value in end.items() if value not in ({}, [])}]))
    return any_of(alternatives)


def _ways(schema: Schema, reader: Reader, depth: int) -> list[_Way]:
    if isinstance(schema, bool):
        return [_Way()]
    if not depth or not reader.may_go_on(_WAY_STEPS):
        raise UserError("a JSON Schema has an unevaluated keyword over references in each other: leave it out")
    if "contains" in schema and "prefixItems" not in schema and "items" not in schema:
        raise UserError("a JSON Schema has contains beside an unevaluated keyword: leave one of them out")
    base = _Way(
        (),
        frozenset(schema.get("properties", ())),
        frozenset(schema.get("patternProperties", ())),
        len(schema.get("prefixItems", ())),
        "additionalProperties" in schema or "unevaluatedProperties" in schema,
        "items" in schema or "unevaluatedItems" in schema,
    )

    def taken(branch: Schema) -> list[_Way]:
        return [way + _Way((branch,)) for way in _ways(branch, reader, depth - 1)]

    sides = [_ways(item, reader, depth - 1) for item in schema.get("allOf", ())]
    if "$ref" in schema:
        sides.append(_ways(reader.target(schema["$ref"]), reader, depth - 1))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            sides.append(_subsets([taken(item) for item in schema[key]], 1 if key == "oneOf" else len(schema[key])))
    if "if" in schema:
        condition, then = taken(schema["if"]), taken(schema.get("then", True))
        other = [way + _Way((no(schema["if"]),)) for way in taken(schema.get("else", True))]
        sides.append([*(first + second for first in condition for second in then), *other])
    for name, item in schema.get("dependentSchemas", {}).items():
        present = _Way(({"required": [name]},))
        sides.append([_Way(({"properties": {name: False}},)), *(way + present for way in taken(item))])
    result = [base]
    for side in sides:
        result = [first + second for first in result for second in side]
        if len(result) > _MOST:
            raise UserError(
                f"a JSON Schema has an unevaluated keyword over more than {_MOST} ways to match: shorten it"
            )
    return result


def _subsets(branches: list[list[_Way]], most: int) -> list[_Way]:
    """The ways of each set of branches."""
    result = []
    for count in range(1, min(most, len(branches)) + 1):
        for chosen in itertools.combinations(branches, count):
            result += [sum(ways[1:], ways[0]) for ways in itertools.product(*chosen)]
            if len(result) > _MOST:
                raise UserError(
                    f"a JSON Schema has an unevaluated keyword over more than {_MOST} ways to match: shorten it"
                )
    return result
