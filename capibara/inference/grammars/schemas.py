"""Prepares a JSON Schema for llguidance, which refuses what it does not know, also where that changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError

# Formats that llguidance 1.9.1 enforces. All others are annotations, as JSON Schema says of every format.
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
# Keywords whose values are schemas, lists of schemas, or objects of schemas.
_ONE = ("additionalProperties", "items", "not", "contains", "propertyNames", "if", "then", "else", "unevaluatedItems")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

_ANY_OBJECT = {"type": "object"}


def prepared(schema: str | bool) -> dict[str, Any] | bool:
    """A schema of the same documents that llguidance can read.

    Raises:
      UserError: it is no JSON, or no schema.
    """
    if schema is True:
        return _ANY_OBJECT
    assert isinstance(schema, str), "False is refused before"
    try:
        value = limits.parse_json(schema)
    except (limits.Refused, ValueError) as error:
        raise UserError(f"Grammar.json_schema is no JSON: {error}") from None
    if not isinstance(value, (dict, bool)):
        raise UserError(f"Grammar.json_schema is {json.dumps(value)[:60]}, must be an object")
    return _of(value)


def _of(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    if result.get("format") not in _FORMATS:
        result.pop("format", None)
    for name in _COUNTS:
        if isinstance(value := result.get(name), float) and value.is_integer():
            result[name] = int(value)  # 2.0 is the integer 2 in JSON Schema
    for name in _ONE:
        if isinstance(result.get(name), Mapping):
            result[name] = _of(result[name])
    for name in _LISTS:
        if isinstance(result.get(name), list):
            result[name] = [_of(one) for one in result[name]]
    for name in _OBJECTS:
        if isinstance(result.get(name), Mapping):
            result[name] = {key: _of(one) for key, one in result[name].items()}
    return result
