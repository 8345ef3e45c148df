"""The references of a JSON Schema: each becomes the number of the schema that it names."""

from __future__ import annotations

import copy
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from capibara.core.types import UserError

Schema = dict[str, Any] | bool

# Keywords whose values are schemas, lists of schemas, or objects of schemas.
ONE = (
    "additionalProperties",
    "additionalItems",
    "items",
    "not",
    "contains",
    "propertyNames",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_DRAFT = re.compile(r"json-schema\.org/(?:draft/(\d{4})-|draft-0(\d)/)")
_NEWEST = 2020
# The draft that brought a keyword; an earlier one ignores it.
_SINCE = {
    6: ("const", "contains", "propertyNames"),
    7: ("if", "then", "else"),
    2019: (
        "dependentRequired",
        "dependentSchemas",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "unevaluatedProperties",
    ),
    2020: ("prefixItems", "$dynamicRef", "$dynamicAnchor"),
}


def parts(schema: object) -> Iterator[dict[str, Any]]:
    """The schemas in one, without those in these."""
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        each: list[object] = []
        if isinstance(value, list) and name in LISTS:
            each = value
        elif isinstance(value, dict) and name in OBJECTS:
            each = [*value.values()]
        elif name in ONE:
            each = [value]
        yield from (item for item in each if isinstance(item, dict))


class References:
    """A copy of a schema in draft 2020-12 whose `$ref` are numbers.

    Args:
      root: a JSON Schema of any draft from 4 on.

    Attributes:
      root: the copy.

    Raises:
      UserError: it names a schema that is not in it, or a draft that is not known.
    """

    def __init__(self, root: dict[str, Any]):
        self.root: dict[str, Any] = copy.deepcopy(root)
        self._draft = _draft(self.root.get("$schema"))
        self._resources: dict[str, dict[str, Any]] = {"": self.root}
        self._anchors: dict[tuple[str, str], dict[str, Any]] = {}
        self._dynamic: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self._targets: list[Schema] = []
        self._numbers: dict[int, int] = {}
        left: list[tuple[dict[str, Any], str]] = [(self.root, "")]
        placed: list[tuple[dict[str, Any], str]] = []
        while left:
            schema, base = left.pop()
            base = self._index(schema, base)
            placed.append((schema, base))
            left += [(part, base) for part in parts(schema)]
        seen = {id(schema) for schema, _ in placed}
        for schema, base in placed:  # it grows by what only a reference reaches
            targets = [self._targets[number] for number in self._refer(schema, base)]
            for item in (*targets, *parts(schema)):
                if isinstance(item, dict) and id(item) not in seen:
                    seen.add(id(item))
                    placed.append((item, base))
        for schema, _ in placed:
            self._modernize(schema)

    def target(self, number: int) -> Schema:
        """The schema that a `$ref` names."""
        return self._targets[number]

    def _index(self, schema: dict[str, Any], base: str) -> str:
        """Notes the names of a schema; the base of the references in it."""
        name = schema.get("$id", schema.get("id") if self._draft == 4 else None)
        if isinstance(name, str) and not ("$ref" in schema and self._draft < 2019):
            path, _, anchor = name.partition("#")
            base = urllib.parse.urljoin(base, path)
            if path:
                self._resources[base] = schema
            if anchor:
                self._anchors[base, anchor] = schema
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(label := schema.get(key), str):
                self._anchors[base, label] = schema
        if isinstance(label := schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(label, []).append((base, schema))
        return base

    def _refer(self, schema: dict[str, Any], base: str) -> list[int]:
        """Numbers the references of a schema."""
        numbers = []
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(name := schema.get(key), str):
                target = self._resolved(name, base)
                if key != "$ref":
                    target = self._dynamic_target(key, name, target)
                schema[key] = self._numbers.setdefault(id(target), len(self._targets))
                if schema[key] == len(self._targets):
                    self._targets.append(target)
                numbers.append(schema[key])
        return numbers

    def _dynamic_target(self, key: str, name: str, target: Schema) -> Schema:
        """Where a dynamic reference leads, if that is the same wherever it is read."""
        if not isinstance(target, dict) or (key == "$recursiveRef" and not target.get("$recursiveAnchor")):
            return target
        anchor = target.get("$dynamicAnchor")
        if key == "$dynamicRef" and (anchor is None or not name.endswith(f"#{anchor}")):
            return target
        others = self._dynamic.get(str(anchor), [])
        # The outermost resource is the root's, whatever refers to what.
        outermost = [schema for base, schema in others if self._resources[base] is self.root]
        if key == "$dynamicRef" and (outermost or len(others) == 1):
            return outermost[0] if outermost else target
        raise UserError(f"a JSON Schema has {key}, whose target depends on what refers to it")

    def _resolved(self, name: str, base: str) -> Schema:
        path, _, fragment = name.partition("#")
        uri = urllib.parse.urljoin(base, path)
        target: Any = self._resources.get(uri, self.root if not path and not base else None)
        fragment = urllib.parse.unquote(fragment)
        if target is not None and fragment.startswith("/"):
            for step in fragment[1:].split("/"):
                target = _child(target, step.replace("~1", "/").replace("~0", "~"))
        elif fragment:
            target = self._anchors.get((uri, fragment))
        if not isinstance(target, (dict, bool)):
            raise UserError(f"a JSON Schema refers to {name[:100]!r}, which is not in it: put it into $defs")
        return target

    def _modernize(self, schema: dict[str, Any]) -> None:
        """Writes a schema of an earlier draft in the keywords of 2020-12."""
        if "$ref" in schema and self._draft < 2019:
            for key in [*schema]:
                if key not in ("$ref", "$defs", "definitions"):
                    del schema[key]
        for draft, keys in _SINCE.items():
            for key in keys:
                if draft > self._draft:
                    schema.pop(key, None)
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in schema:
                schema.setdefault("allOf", [])
                schema["allOf"] = [*schema["allOf"], {"$ref": schema.pop(key)}]
        rest = schema.pop("additionalItems", True)
        if isinstance(schema.get("items"), list) and self._draft < _NEWEST:
            schema["prefixItems"], schema["items"] = schema["items"], rest
        dependencies = schema.pop("dependencies", None)
        if isinstance(dependencies, dict) and self._draft < 2019:
            lists = {key: value for key, value in dependencies.items() if isinstance(value, list)}
            schema["dependentRequired"] = lists
            schema["dependentSchemas"] = {key: value for key, value in dependencies.items() if key not in lists}


def _child(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    return value[int(step)] if isinstance(value, list) and step.isdecimal() and int(step) < len(value) else None


def _draft(name: object) -> int:
    if name is None:
        return _NEWEST
    match = _DRAFT.search(name) if isinstance(name, str) else None
    if match is None:
        raise UserError(
            f"a JSON Schema has $schema {str(name)[:100]!r}, must be a draft of JSON Schema from 4 to 2020-12"
        )
    return int(match[1] or match[2])
