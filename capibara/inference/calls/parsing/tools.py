"""The tools of a request, and the types that their schemas give to arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from capibara.inference.calls.parsing import literals
from capibara.inference.calls.parsing.text import Malformed

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_MOST_REFERENCES = 16  # of one schema to another


class Tools:
    """The tools that a model may call.

    Args:
      tools: as in OpenAI's API: each {"type": "function", "function": {"name", "parameters", ...}}.

    Attributes:
      parameters: the JSON Schema of each tool's arguments, by name.
    """

    def __init__(self, tools: Sequence[Any] = ()):
        functions = [tool.get("function") or tool for tool in tools if isinstance(tool, dict)]
        self.parameters: dict[str, dict[str, Any]] = {
            str(function.get("name")): _object(function.get("parameters"))
            for function in functions
            if isinstance(function, dict)
        }

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def arguments(self, name: str) -> list[tuple[str, Any, bool]]:
        """Each argument of a tool with its schema and whether it is required; those that are required come first."""
        return self.properties(self.parameters[name])

    def properties(self, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """Each property of an object's schema, as in `arguments`."""
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        properties = _object(schema.get("properties"))
        each = [(key, value, key in (required or ())) for key, value in properties.items()]
        return sorted(each, key=lambda argument: not argument[2])

    def standalone(self, name: str, schema: Mapping[str, object]) -> dict[str, Any]:
        """A schema within that of a tool's arguments, with the definitions that its references lead to."""
        root, has_references = self.parameters[name], '"$ref"' in json.dumps(schema)
        return {**schema, **{word: root[word] for word in ("$defs", "definitions") if has_references and word in root}}

    def types(self, name: str, key: str) -> set[str]:
        """The types that the schema allows for an argument; empty: any."""
        return self.types_of(name, _object(self.parameters[name].get("properties")).get(key))

    def types_of(self, name: str, schema: object) -> set[str]:
        """The types that a schema within that of a tool's arguments allows; empty: any."""
        return _types(schema, self.parameters[name], _MOST_REFERENCES)

    def texts(self, name: str, schema: object) -> list[str] | None:
        """The strings that a schema within that of a tool's arguments allows; None: any."""
        return _texts(schema, self.parameters[name], _MOST_REFERENCES, {})

    def resolved(self, name: str, schema: object) -> dict[str, Any]:
        """A schema within that of a tool's arguments, without a reference in its place; empty: anything."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                break
            schema = _referenced(reference, self.parameters[name])
        return _object(schema)

    def typed(self, name: str, key: str, text: str) -> str:
        """An argument that was written without a type, as JSON.

        Where the schema allows several types, it is the first that fits and is no string, else a string.
        """
        return self.typed_as(name, _object(self.parameters[name].get("properties")).get(key), text)

    def typed_as(self, name: str, schema: object, text: str) -> str:
        """A value of a schema within that of a tool's arguments; as `typed`, but a string that the schema has stays one."""
        return (
            dumped(text)
            if text in (self.texts(name, schema) or ())
            else self.typed_by(self.types_of(name, schema), text)
        )

    def typed_by(self, types: Set[str], text: str) -> str:
        """A value that was written without a type, as JSON; as `typed`."""
        if types == {"string"}:
            return dumped(text)
        try:
            value = _value(text.strip())
        except Malformed:
            return dumped(text)
        if isinstance(value, str) or ("string" in types and not _is_one_of(value, types - {"string"})):
            return dumped(text)
        return dumped(value)

    def coerced(self, name: str, key: str, value: object) -> str:
        """An argument as JSON: a string becomes a value of another type if the schema allows no strings."""
        types = self.types(name, key)
        if isinstance(value, str) and types and "string" not in types:
            return self.typed(name, key, value)
        return dumped(value)


def dumped(value: object) -> str:
    """A value as JSON, without lone surrogates, which no response can have.

    Raises:
      ValueError: a number is not finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "ignore").decode()


def _value(text: str) -> Any:
    """What a text means as JSON, or as Python, which some templates write.

    Raises:
      Malformed: it is neither.
    """
    return text.lower() == "true" if text.lower() in ("true", "false") else literals.parse(text)


def _is_one_of(value: object, types: Set[str]) -> bool:
    names = {name for name in types if isinstance(value, _JSON_TYPES.get(name, ()))}
    return bool(names - {"integer", "number"} if isinstance(value, bool) else names)


def _types(
    schema: object, root: Mapping[str, object], references: int, known: dict[int, set[str]] | None = None
) -> set[str]:
    """As `Tools.types_of`; `known` has the types of schemas by their ids, which keeps alternatives from being read 2^16 times."""
    known = {} if known is None else known
    if not isinstance(schema, dict) or not references:
        return set()
    if id(schema) not in known:
        known[id(schema)] = set()  # of one that refers to itself
        known[id(schema)] = _types_of(schema, root, references - 1, known)
    return known[id(schema)]


def _types_of(
    schema: Mapping[str, Any], root: Mapping[str, Any], references: int, known: dict[int, set[str]]
) -> set[str]:
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referenced(reference, root), root, references, known)
    if (kind := schema.get("type")) is not None:
        return {str(name) for name in (kind if isinstance(kind, list) else [kind])}
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return {name for value in values for name in _JSON_TYPES if _is_one_of(value, {name})}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            choices = [_types(choice, root, references, known) for choice in schema[name]]
            return set().union(*choices) if all(choices) else set()
    if parts := [types for part in _list(schema.get("allOf")) if (types := _types(part, root, references, known))]:
        return set.intersection(*parts)
    return set()


def _texts(
    schema: object, root: Mapping[str, object], references: int, known: dict[int, list[str] | None]
) -> list[str] | None:
    """As `Tools.texts`; `known` as of `_types`."""
    if not isinstance(schema, dict) or not references:
        return None
    if id(schema) not in known:
        known[id(schema)] = None  # of one that refers to itself
        known[id(schema)] = _texts_of(schema, root, references - 1, known)
    return known[id(schema)]


def _texts_of(
    schema: Mapping[str, object], root: Mapping[str, object], references: int, known: dict[int, list[str] | None]
) -> list[str] | None:
    """The strings that all keywords of a schema allow."""
    if (kind := schema.get("type")) is not None and "string" not in (kind if isinstance(kind, list) else [kind]):
        return []
    each = [_texts(part, root, references, known) for part in _list(schema.get("allOf"))]
    if isinstance(reference := schema.get("$ref"), str):
        each.append(_texts(_referenced(reference, root), root, references, known))
    if isinstance(values := schema.get("enum"), list):
        each.append([value for value in values if isinstance(value, str)])
    if "const" in schema:
        each.append([value for value in (schema["const"],) if isinstance(value, str)])
    for name in ("anyOf", "oneOf"):
        choices = [_texts(choice, root, references, known) for choice in _list(schema.get(name))]
        if choices and None not in choices:
            each.append([text for choice in choices for text in choice or ()])
    allowed = [dict.fromkeys(texts) for texts in each if texts is not None]
    return [text for text in allowed[0] if all(text in texts for texts in allowed)] if allowed else None


def _referenced(reference: str, root: Mapping[str, object]) -> Any:
    value: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
