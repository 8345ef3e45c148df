"""Rewrites a JSON Schema into the keywords that llguidance has, where a schema of the same texts exists."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.inference.grammars.disjoint import Reader, is_disjoint
from capibara.inference.grammars.negation import FIRST_ITEMS, all_of, any_of, negated, no
from capibara.inference.grammars.references import References, Schema, parts
from capibara.inference.grammars.unevaluated import closed

_MOST = 4096  # schemas that are written
_MOST_BRANCHES = (
    128  # of oneOf, each two of which are compared; llguidance may know of more that they exclude each other
)
_MOST_WAYS = 64  # to place the items of `contains`, or to order those of `uniqueItems`
_COUNTED_ITEMS = 8  # items that `maxContains` counts are among the first
_KINDS = ("type", "enum", "const")
_KEPT = frozenset(
    """type const enum minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern format minItems
    maxItems required minProperties maxProperties""".split()
)
_REWRITTEN = frozenset(
    """not if then else oneOf contains minContains maxContains uniqueItems propertyNames dependentRequired dependentSchemas
    dependencies unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef $dynamicAnchor $recursiveAnchor""".split()
)


def is_needed(root: dict[str, Any]) -> bool:
    """Whether a schema has a keyword that llguidance lacks."""
    left = [root]
    while left:
        schema = left.pop()
        if not _REWRITTEN.isdisjoint(schema):
            return True
        left += parts(schema)
    return False


def rewritten(root: dict[str, Any]) -> Schema:
    """A schema of the same texts in the keywords that llguidance has.

    `oneOf` may stay where neither its branches are known to exclude each other nor their complement can be written.

    Raises:
      UserError: a keyword cannot be written; the error names it.
    """
    work = _Rewriting(References(root))
    while True:  # each turn knows more of what is referred to, or is the last
        with contextlib.suppress(_Again):
            return work.result()


class _Again(Exception):
    """Something that others refer to matches all texts, none, or cannot be written."""


class _Rewriting:
    def __init__(self, references: References):
        self._references = references
        self._names: dict[tuple[int, bool], str] = {}
        self._waiting: list[tuple[int, bool]] = []
        self._known: dict[tuple[int, bool], bool | UserError] = {}
        self._reader = Reader(references.target)
        self._count = 0

    def result(self) -> Schema:
        """The root with what it refers to."""
        self._names, self._waiting = {}, []
        root, definitions = self.of(self._references.root), dict[str, Schema]()
        while self._waiting:
            number, positive = key = self._waiting.pop()
            schema = self._references.target(number)
            try:
                definitions[self._names[key]] = self.of(schema if positive else no(schema))
            except UserError as error:
                if positive or self._count > _MOST:
                    raise
                self._known[key] = error
                raise _Again from None
            if isinstance(value := definitions[self._names[key]], bool):
                self._known[key] = value
                raise _Again
        if isinstance(root, bool) or not definitions:
            return root
        return {**root, "$defs": definitions}

    def of(self, schema: Schema) -> Schema:
        """Rewrites a schema."""
        if isinstance(schema, bool):
            return schema
        self._count += 1
        if self._count > _MOST:
            raise UserError(f"a JSON Schema has alternatives that make more than {_MOST} schemas: shorten it")
        base: dict[str, Any] = {}
        conjuncts: list[Schema] = []
        for key, value in schema.items():
            if key in _KEPT:
                base[key] = value
            elif key in ("properties", "patternProperties"):
                base[key] = {name: self.of(item) for name, item in value.items()}
            elif key in ("additionalProperties", "items"):
                base[key] = self.of(value)
            elif key == "prefixItems":
                base[key] = [self.of(item) for item in value]
            elif key == "$ref":
                conjuncts.append(self._reference(value, True))
            elif key == "allOf":
                conjuncts += [self.of(item) for item in value]
            elif key == "anyOf":
                conjuncts.append(any_of([self.of(item) for item in value]))
            elif key == "oneOf":
                conjuncts.append(self._one_of(value, {kind: schema[kind] for kind in _KINDS if kind in schema}))
            elif key == "not":
                conjuncts.append(self._not(value))
            elif key in _SUGAR:
                conjuncts.append(self.of(_SUGAR[key](schema)))
        if any(key.startswith("unevaluated") for key in schema):
            conjuncts.append(self.of(closed(schema, self._reader)))
        return all_of([base, *conjuncts]) if not base else _with(base, all_of(conjuncts))

    def _reference(self, number: int, positive: bool) -> Schema:
        if isinstance(target := self._references.target(number), bool):
            return target is positive
        key = (number, positive)
        if isinstance(known := self._known.get(key), bool):
            return known
        if known is not None:
            raise known
        if key not in self._names:
            self._names[key] = f"{'r' if positive else 'n'}{number}"
            self._waiting.append(key)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _not(self, schema: Schema) -> Schema:
        if isinstance(schema, dict) and "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return any_of([self._reference(schema["$ref"], False), self.of(negated(rest)) if rest else False])
        return self.of(negated(schema))

    def _one_of(self, branches: list[Schema], kind: dict[str, Any]) -> Schema:
        """Each branch without the others, where they are not known to exclude each other among texts of this kind."""
        if len(branches) > _MOST_BRANCHES:
            return {"oneOf": [self.of(branch) for branch in branches]}
        try:
            alternatives = []
            for at, branch in enumerate(branches):
                rest = [
                    item
                    for other, item in enumerate(branches)
                    if other != at and not is_disjoint(all_of([branch, kind]), item, self._reader)
                ]
                excluded = [self.of(negated(self._resolved(item), self._closed_names(branch))) for item in rest]
                alternatives.append(all_of([self.of(branch), *excluded]))
            return any_of(alternatives)
        except UserError:
            return {"oneOf": [self.of(branch) for branch in branches]}

    def _resolved(self, schema: Schema) -> Schema:
        """A schema without a reference of its own."""
        for _ in range(_MOST_WAYS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            target = self._references.target(schema["$ref"])
            if rest:
                return {"allOf": [target, rest]}
            schema = target
        raise UserError("a JSON Schema has references to themselves: leave them out")

    def _closed_names(self, schema: Schema) -> list[str] | None:
        schema = self._resolved(schema)
        if (
            isinstance(schema, dict)
            and schema.get("additionalProperties") is False
            and not schema.get("patternProperties")
        ):
            return [*schema.get("properties", ())]
        return None


def _with(base: dict[str, Any], rest: Schema) -> Schema:
    if isinstance(rest, bool):
        return base if rest else False
    return {**base, "allOf": rest["allOf"] if [*rest] == ["allOf"] else [rest]}


def _condition(schema: Mapping[str, Any]) -> Schema:
    condition = schema["if"]
    if "then" not in schema and "else" not in schema:
        return True
    if "else" not in schema:
        return any_of([no(condition), schema["then"]])
    first = all_of([condition, schema["then"]]) if "then" in schema else condition
    return any_of([first, all_of([no(condition), schema["else"]]) if "then" in schema else schema["else"]])


def _dependent_names(schema: Mapping[str, Any]) -> Schema:
    pairs = schema["dependentRequired"].items()
    return all_of([any_of([{"properties": {name: False}}, {"required": [name, *names]}]) for name, names in pairs])


def _dependent_schemas(schema: Mapping[str, Any]) -> Schema:
    pairs = schema["dependentSchemas"].items()
    return all_of(
        [any_of([{"properties": {name: False}}, all_of([{"required": [name]}, item])]) for name, item in pairs]
    )


def _property_names(schema: Mapping[str, Any]) -> Schema:
    value = schema["propertyNames"]
    if isinstance(value, bool):
        return True if value else {"maxProperties": 0}
    kinds = value.get("type", "string")
    if kinds != "string" and "string" not in kinds:
        return {"maxProperties": 0}
    rules = {key: item for key, item in value.items() if key in _NAMED}
    if refused := sorted(
        key
        for key in value
        if key in _KEPT | _REWRITTEN | {"$ref", "allOf", "anyOf"} and key not in _NAMED | {"type", "format"}
    ):
        raise UserError(
            f"a JSON Schema has propertyNames with {refused[0]}, must have pattern, enum, const or a length"
        )
    if "const" in rules or "enum" in rules:
        names = [name for name in rules.pop("enum", [rules.get("const")]) if isinstance(name, str)]
        if "const" in rules:
            const = rules.pop("const")
            names = [name for name in names if name == const]
        names = [name for name in names if _is_name(name, rules)]
        return {"properties": {name: True for name in names}, "additionalProperties": False}
    if not rules:
        return True
    lengths = rules.get("minLength", 0), rules.get("maxLength", "")
    if "maxLength" in rules and lengths[0] > lengths[1]:
        return {"maxProperties": 0}
    if "pattern" in rules and len(rules) > 1:
        raise UserError("a JSON Schema has propertyNames with a pattern and a length: leave one of them out")
    pattern = rules.get("pattern", f"^(?s:.{{{lengths[0]},{lengths[1]}}})$")
    properties = {name: _is_name(name, rules) for name in schema.get("properties", ())}
    return {"properties": properties, "patternProperties": {pattern: True}, "additionalProperties": False}


_NAMED = frozenset({"pattern", "enum", "const", "minLength", "maxLength"})


def _is_name(name: str, rules: Mapping[str, Any]) -> bool:
    """Whether a name is one that `propertyNames` allows."""
    if not rules.get("minLength", 0) <= len(name) <= rules.get("maxLength", len(name)):
        return False
    if "pattern" not in rules:
        return True
    try:  # printable ASCII means the same to Python and to Rust
        if name.isascii() and name.isprintable():
            return re.search(rules["pattern"], name, re.ASCII) is not None
    except re.error:
        pass
    raise UserError(f"a JSON Schema has propertyNames with a pattern beside the property {name[:40]!r}: leave it out")


def _contains(schema: Mapping[str, Any]) -> Schema:
    value, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
    if most is None and not least:
        return True
    if most is None and least == 1:
        length = min(FIRST_ITEMS, schema.get("maxItems", FIRST_ITEMS))
        return _arrays([[True] * at + [value] for at in range(length)], True)
    if most is None and least <= _COUNTED_ITEMS:
        length = min(_COUNTED_ITEMS, schema.get("maxItems", _COUNTED_ITEMS))
        return _arrays(_placed(value, True, least, length), True)
    if most is None or most > _COUNTED_ITEMS or least > most:
        if most is not None and least > most:
            return {"type": [name for name in ("null", "boolean", "number", "string", "object")]}
        raise UserError(f"a JSON Schema has contains of more than {_COUNTED_ITEMS} items: ask for fewer")
    length = min(_COUNTED_ITEMS, schema.get("maxItems", _COUNTED_ITEMS))
    ways = [way for count in range(least, most + 1) for way in _placed(value, no(value), count, length)]
    return _arrays(ways, no(value))


def _placed(value: Schema, other: Schema, count: int, length: int) -> list[list[Schema]]:
    """Lists that end with the last of so many items, and have the others before."""
    if not count:
        return [[]]
    chosen = itertools.islice(itertools.combinations(range(length), count), _MOST_WAYS + 1)
    ways = [[value if at in places else other for at in range(places[-1] + 1)] for places in map(tuple, chosen)]
    if len(ways) > _MOST_WAYS:
        raise UserError(f"a JSON Schema has contains of {count} items, must have fewer")
    return ways


def _arrays(ways: list[list[Schema]], rest: Schema) -> Schema:
    """Lists that begin in one of these ways; what is no list matches, too."""
    lists: list[Schema] = [
        {"type": "array", "minItems": len(way), "prefixItems": way, "items": rest}
        if way
        else {"type": "array", "items": rest}
        for way in ways
    ]
    return any_of([{"type": ["null", "boolean", "number", "string", "object"]}, *lists])


def _unique(schema: Mapping[str, Any]) -> Schema:
    if schema["uniqueItems"] is not True or schema.get("maxItems", 2) < 2:
        return True
    items, prefix = schema.get("items", True), schema.get("prefixItems", [])
    values = _listed(items)
    if not prefix and values is not None and schema.get("minItems", 0) <= len(values):
        ways = itertools.chain.from_iterable(itertools.permutations(values, count) for count in range(len(values) + 1))
        first = [*itertools.islice(ways, _MOST_WAYS + 2)]
        if len(first) <= _MOST_WAYS + 1:
            return _arrays_of(first)
    raise UserError(
        "a JSON Schema has uniqueItems, must be of at most four values that enum lists, or of one item: leave it out"
    )


def _listed(schema: Schema) -> list[Any] | None:
    """The values of a schema that lists them."""
    if isinstance(schema, bool) or not {*schema} <= {"enum", "const", "type", "title", "description"}:
        return None
    if "const" in schema or "enum" in schema:
        return [schema["const"]] if "const" in schema else schema["enum"]
    values: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
    return values.get(str(schema.get("type")))


def _arrays_of(ways: list[tuple[Any, ...]]) -> Schema:
    lists: list[Schema] = [
        {
            "type": "array",
            "minItems": len(way),
            "maxItems": len(way),
            "prefixItems": [{"const": value} for value in way],
        }
        for way in ways
    ]
    return any_of([{"type": ["null", "boolean", "number", "string", "object"]}, *lists])


_SUGAR: dict[str, Callable[[Mapping[str, Any]], Schema]] = {
    "if": _condition,
    "dependentRequired": _dependent_names,
    "dependentSchemas": _dependent_schemas,
    "propertyNames": _property_names,
    "contains": _contains,
    "uniqueItems": _unique,
}
