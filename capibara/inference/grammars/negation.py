"""The complement of a JSON Schema, one level deep: the schemas in it become `{"not": ...}`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.inference.grammars.references import Schema

TYPES = ("null", "boolean", "number", "string", "array", "object")
_MOST_VALUES = 64  # of an enum that is excluded: each number adds a range, each text a branch of a regular expression
_MOST_CHARACTERS = 80  # of a text that is excluded: each is three of the 250 levels that Rust's regex parser allows
_MOST_NAMES = 4  # of an object that is closed: each set of its properties is an alternative
FIRST_ITEMS = 16  # an item that must be there is one of the first: llguidance has no lists with one anywhere


def all_of(schemas: Collection[Schema]) -> Schema:
    """What matches all of these schemas."""
    rest = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in rest):
        return False
    return True if not rest else rest[0] if len(rest) == 1 else {"allOf": rest}


def any_of(schemas: Collection[Schema]) -> Schema:
    """What matches one of these schemas, or several."""
    rest = [schema for schema in schemas if schema is not False]
    if any(schema is True or schema == {} for schema in rest):
        return True
    return False if not rest else rest[0] if len(rest) == 1 else {"anyOf": rest}


def no(schema: Schema) -> Schema:
    """`{"not": schema}`, or what that is."""
    if isinstance(schema, bool) or not schema:
        return schema is False
    return schema["not"] if [*schema] == ["not"] else {"not": schema}


def negated(schema: Schema, names: Collection[str] | None = None) -> Schema:
    """What does not match a schema; all other schemas have their meaning.

    Args:
      schema: without `$ref`.
      names: the properties that a text has at most, if others are excluded elsewhere.

    Raises:
      UserError: no schema says that; the error names the keyword.
    """
    if isinstance(schema, bool):
        return not schema
    alternatives: list[Schema] = []
    for key, value in schema.items():
        if key in _EACH:
            alternatives += _EACH[key](value, schema)
        elif key == "additionalProperties":
            alternatives += _without_others(schema, names)
        elif key in _REFUSED:
            raise UserError(f"a JSON Schema has {key} in a schema that must not match: {_ADVICE}")
    return any_of(alternatives)


_ADVICE = "write what must match"
_REFUSED = frozenset(
    "pattern format multipleOf uniqueItems propertyNames unevaluatedItems unevaluatedProperties $ref $dynamicRef".split()
)


def others(words: Collection[str]) -> str:
    """A regular expression of all texts but these."""
    children: dict[str, list[str]] = {}
    for word in words:
        if word:
            children.setdefault(word[0], []).append(word[1:])
    first = "".join(map(_escaped, children))
    branches = [f"[^{first}].*" if first else ".+"]
    branches += [_escaped(letter) + others(rest) for letter, rest in children.items()]
    return "(?:" + "|".join([*([] if "" in words else [""]), *branches]) + ")"


def _escaped(letter: str) -> str:
    return f"\\x{{{ord(letter):x}}}"


def type_of(value: object) -> str:
    """The type of a value, in JSON Schema's word."""
    kinds = ((bool, "boolean"), ((int, float), "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _types(value: Any, _: Mapping[str, Any]) -> Iterator[Schema]:
    left = [*TYPES]
    for name in [value] if isinstance(value, str) else value:
        if name == "integer" and "number" not in value:
            raise UserError(f"a JSON Schema has the type integer in a schema that must not match: {_ADVICE}")
        if name in left:
            left.remove(name)
    yield {"type": left} if left else False


def _values(values: list[Any], _: Mapping[str, Any]) -> Iterator[Schema]:
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    if len(values) > _MOST_VALUES or longest > _MOST_CHARACTERS:
        raise UserError(
            f"a JSON Schema has {len(values)} values of up to {longest} characters that must not match, must have at most "
            f"{_MOST_VALUES} of {_MOST_CHARACTERS}: {_ADVICE}"
        )
    of = {name: [value for value in values if type_of(value) == name] for name in TYPES}
    if any(of["array"]) or any(of["object"]):
        raise UserError(f"a JSON Schema has a list or an object that must not match: {_ADVICE}")
    free = [name for name in TYPES if not of[name] and name != "boolean"]
    yield {"type": free} if free else False
    yield from ({"const": value} for value in (True, False) if value not in of["boolean"])
    if of["number"]:
        points = sorted({*of["number"]})
        for low, high in zip([None, *points], [*points, None], strict=True):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            yield {"type": "number"} | {key: bound for key, bound in bounds.items() if bound is not None}
    if of["string"]:
        yield {"type": "string", "pattern": f"^(?s:{others({*of['string']})})$"}
    if of["array"]:
        yield {"type": "array", "minItems": 1}
    if of["object"]:
        yield {"type": "object", "minProperties": 1}


def _bound(kind: str, key: str, step: int = 0) -> Callable[[Any, Mapping[str, Any]], list[Schema]]:
    def bound(value: Any, _: Mapping[str, Any]) -> list[Schema]:
        if isinstance(value, bool):
            raise UserError(f"a JSON Schema has a bound that is {value}, must be a number")
        return [{"type": kind, key: value + step}] if kind == "number" or value + step >= 0 else []

    return bound


def _required(names: list[str], _: Mapping[str, Any]) -> Iterator[Schema]:
    yield from ({"type": "object", "properties": {name: False}} for name in names)


def _properties(schemas: Mapping[str, Schema], _: Mapping[str, Any]) -> Iterator[Schema]:
    for name, schema in schemas.items():
        if (other := no(schema)) is not False:
            yield {"type": "object", "required": [name], "properties": {name: other}}


def _patterns(schemas: Mapping[str, Schema], _: Mapping[str, Any]) -> list[Schema]:
    if any(schema is not True and schema != {} for schema in schemas.values()):
        raise UserError(f"a JSON Schema has patternProperties in a schema that must not match: {_ADVICE}")
    return []


def _without_others(schema: Mapping[str, Any], names: Collection[str] | None) -> Iterator[Schema]:
    """Objects with a property that `additionalProperties` does not allow."""
    value, named = schema["additionalProperties"], [*schema.get("properties", ())]
    if value is True or value == {}:
        return
    if schema.get("patternProperties"):
        raise UserError(f"a JSON Schema has patternProperties in a schema that must not match: {_ADVICE}")
    if names is not None:
        yield from _properties({name: value for name in names if name not in named}, {})
        return
    if value is not False or len(named) > _MOST_NAMES:
        raise UserError(f"a JSON Schema has additionalProperties in a schema that must not match: {_ADVICE}")
    for chosen in range(1 << len(named)):
        present = [name for at, name in enumerate(named) if chosen >> at & 1]
        properties = {name: name in present for name in named}
        yield {"type": "object", "required": present, "properties": properties, "minProperties": len(present) + 1}


def _items(value: Schema, schema: Mapping[str, Any]) -> Iterator[Schema]:
    first = len(schema.get("prefixItems", ()))
    if value is False:
        yield {"type": "array", "minItems": first + 1}
    elif (other := no(value)) is not False:
        for at in range(first, first + FIRST_ITEMS):
            yield _item(at, other)


def _item(at: int, schema: Schema) -> Schema:
    return {"type": "array", "minItems": at + 1, "prefixItems": [*[True] * at, schema]}


def _prefix(schemas: list[Schema], _: Mapping[str, Any]) -> Iterator[Schema]:
    yield from (_item(at, other) for at, schema in enumerate(schemas) if (other := no(schema)) is not False)


def _contains(value: Schema, schema: Mapping[str, Any]) -> Iterator[Schema]:
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if least:
        fewer = {"type": "array", "contains": value, "minContains": 0, "maxContains": least - 1}
        yield fewer if least > 1 else {"type": "array", "items": no(value)}
    if most is not None:
        yield {"type": "array", "contains": value, "minContains": most + 1}


def _exclusive(schemas: list[Schema], _: Mapping[str, Any]) -> Iterator[Schema]:
    yield all_of([no(schema) for schema in schemas])
    for at, schema in enumerate(schemas):
        yield from (all_of([schema, other]) for other in schemas[:at])


def _condition(value: Schema, schema: Mapping[str, Any]) -> Iterator[Schema]:
    yield all_of([value, no(schema.get("then", True))])
    yield all_of([no(value), no(schema.get("else", True))])


def _dependent_names(value: Mapping[str, list[str]], _: Mapping[str, Any]) -> Iterator[Schema]:
    for name, names in value.items():
        for other in names:
            yield {"type": "object", "required": [name], "properties": {other: False}}


def _dependent_schemas(value: Mapping[str, Schema], _: Mapping[str, Any]) -> Iterator[Schema]:
    for name, schema in value.items():
        yield all_of([{"type": "object", "required": [name]}, no(schema)])


_EACH: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "type": _types,
    "enum": _values,
    "const": lambda value, schema: _values([value], schema),
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
    "minProperties": _bound("object", "maxProperties", -1),
    "maxProperties": _bound("object", "minProperties", 1),
    "required": _required,
    "properties": _properties,
    "patternProperties": _patterns,
    "items": _items,
    "prefixItems": _prefix,
    "contains": _contains,
    "allOf": lambda value, _: [no(schema) for schema in value],
    "anyOf": lambda value, _: [all_of([no(schema) for schema in value])],
    "oneOf": _exclusive,
    "not": lambda value, _: [value],
    "if": _condition,
    "dependentRequired": _dependent_names,
    "dependentSchemas": _dependent_schemas,
}
