"""Prepares a JSON Schema for llguidance, which refuses what it does not know, also where that changes nothing."""

from __future__ import annotations

import contextlib
import decimal
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.inference.grammars import references, rewriting

# Formats that llguidance 1.9.1 enforces. All others are annotations, as JSON Schema says of every format.
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_COUNTS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANNOTATIONS = ("default", "examples")
# Compiling the largest takes a second: the time of properties grows with the square of their number, and each remainder of a
# multipleOf is a state of a lexer; llguidance 1.9.1 bounds neither. Two that a number must match have those of their lcm.
_MOST_OBJECTS, _MOST_KEYS, _MOST_REMAINDERS = 8192, 1024, 1 << 15
# Each two patterns of an object are compared: 128 take up to 2 s, 300 5 s, and 1000 more than 6 minutes. Joined objects
# are compared anew for each reference and alternative: 64 patterns with 40 references take 4 s.
_MOST_COMPARISONS = 1 << 13
_JOINING = ("allOf", "anyOf", "oneOf")

_ANY_OBJECT = {"type": "object"}

# Without a bound, white space between JSON's tokens is what many models write until their last token.
WHITE_SPACE = {"whitespace_pattern": r"[ \t\r\n]{0,32}"}
# An escape such as \u0061 would be another spelling of a property's name, and llguidance 1.9.1 takes it for another name.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # what needs such an escape


def prepared(schema: str | bool) -> dict[str, Any]:
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
    _check([value])
    value = _of(value)
    if isinstance(value, dict) and rewriting.is_needed(value):
        try:
            value = rewriting.rewritten(value)
        except (AttributeError, LookupError, TypeError) as error:  # of a value of another type than its keyword's
            raise UserError(f"a JSON Schema has a keyword with a value of another type: {error}") from None
        except RecursionError:
            raise UserError("a JSON Schema is nested too deeply: shorten it") from None
        _check([value])
    if value is False:
        raise UserError("a JSON Schema matches no text: ask for one")
    return {} if value is True else value


def embedded(schema: dict[str, Any], layout: Mapping[str, object] = WHITE_SPACE) -> str:
    """The JSON of a prepared schema, as a part of a grammar in Lark's notation; `layout`: llguidance's options."""
    return "%json " + json.dumps({**schema, "x-guidance": options(schema, layout)})


def options(schema: dict[str, Any], layout: Mapping[str, object] = WHITE_SPACE) -> dict[str, object]:
    """The options of llguidance for a prepared schema.

    Raises:
      UserError: it has other properties than those that it names, and a text that cannot be written beside these.
    """
    texts, is_open, left = list[str](), False, list[Any]([schema])
    while left:
        value = left.pop()
        left += value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
        if isinstance(value, dict):
            named = any(name in value for name in ("properties", "patternProperties", "required"))
            is_open |= named and value.get("additionalProperties") is not False
            for name in ("const", "enum", "required", "properties"):
                each = value.get(name, ())
                texts += (
                    [each]
                    if isinstance(each, str)
                    else [text for text in each if isinstance(text, str)]
                    if isinstance(each, (list, dict))
                    else []
                )
    if not is_open:
        return {**layout}
    if text := next(filter(_UNWRITTEN.search, texts), None):
        raise UserError(
            f"a JSON Schema has the text {short(text)} with a control character, must have no additionalProperties beside it: "
            "set them to false"
        )
    return {**layout, **_ESCAPES}


def check_embedded(lark: str) -> None:
    """Checks the schemas in a grammar in Lark's notation.

    Raises:
      UserError: they are too large, or have a number that llguidance would change.
    """
    schemas = []
    for match in re.finditer(r"%json\s*", lark):
        with contextlib.suppress(ValueError, RecursionError):  # llguidance says what is malformed
            schemas.append(json.JSONDecoder().raw_decode(lark, match.end())[0])
    _check(schemas)


def _check(values: list[Any]) -> None:
    """Raises UserError for schemas that take long to compile, or have numbers that llguidance would change."""
    objects, multiples, left, patterns = 0, list[int](), list(values), _Patterns()
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, int) and not _is_exact(value):
            raise UserError(f"a JSON Schema has {short(value)}, must have integers that a float64 can hold")
        elif isinstance(value, dict):
            objects += 1
            if len(value) > _MOST_KEYS:
                raise UserError(f"a JSON Schema has an object of {len(value)} keys, must have at most {_MOST_KEYS}")
            patterns.add(value)
            _check_keys(value)
            for name, item in value.items():
                if name in _BOUNDS and isinstance(item, float) and not abs(item) < 2**63:
                    raise UserError(f"a JSON Schema has {name} {short(item)}, must be below 2**63: leave it out")
                if name == "multipleOf" and isinstance(item, (int, float)):
                    multiples.append(_digits(item))
                if name not in _ANNOTATIONS or isinstance(item, dict):  # a property may have such a name
                    left.append(item)
    if objects > _MOST_OBJECTS:
        raise UserError(f"a JSON Schema has {objects} objects, must have at most {_MOST_OBJECTS}: shorten it")
    patterns.check()
    _check_multiples(multiples)


def _check_keys(schema: Mapping[str, Any]) -> None:
    """Raises UserError for a number of keys that nothing keeps apart."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if isinstance(least, int) and isinstance(required, list) and is_open and least - len({*map(str, required)}) > 1:
        raise UserError(
            f"a JSON Schema has minProperties {least} with {len(required)} required, must have at most one more than those, since "
            "others may repeat: name them in required"
        )


class _Patterns:
    """Counts how often patterns of patternProperties are compared with each other, at most."""

    def __init__(self) -> None:
        self._distinct, self._pairs, self._joined = set[str](), 0, 0

    def add(self, schema: Mapping[str, object]) -> None:
        """Counts those of one schema, without the schemas in it."""
        if isinstance(patterns := schema.get("patternProperties"), dict):
            self._distinct |= patterns.keys()
            self._pairs += len(patterns) ** 2
        self._joined += "$ref" in schema
        self._joined += sum(len(item) for name in _JOINING if isinstance(item := schema.get(name), list))

    def check(self) -> None:
        """Raises UserError if there are too many."""
        comparisons = self._pairs + len(self._distinct) ** 2 * self._joined
        if comparisons > _MOST_COMPARISONS:
            raise UserError(
                f"a JSON Schema has {len(self._distinct)} patternProperties that are compared {comparisons} times, must be at most "
                f"{_MOST_COMPARISONS}: leave some out"
            )


def _check_multiples(multiples: list[int]) -> None:
    remainders = sum(multiples)
    if remainders <= _MOST_REMAINDERS:
        together = 1
        for multiple in {*multiples} - {0}:
            together = math.lcm(together, multiple)
            if (remainders := max(remainders, together)) > _MOST_REMAINDERS:
                break
    if remainders > _MOST_REMAINDERS:
        raise UserError(
            f"a JSON Schema has multipleOf with {remainders} remainders, must have at most {_MOST_REMAINDERS}: leave it out"
        )


def _digits(number: int | float) -> int:
    """The digits of a number, without its point."""
    return int("".join(map(str, decimal.Decimal(repr(number)).as_tuple().digits)))


def _is_exact(value: int) -> bool:
    """Whether an integer stays the same where llguidance reads it, by way of a float64 that is bounded to an int64."""
    return -(2**63) <= value < 2**63 and min(int(float(value)), 2**63 - 1) == value


def _of(schema: object) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    if result.get("format") not in _FORMATS:
        result.pop("format", None)
    for name in _COUNTS:
        if isinstance(value := result.get(name), (int, float)):
            if isinstance(value, bool) or value < 0 or value != int(value):
                raise UserError(f"a JSON Schema has {name} {short(value)}, must be an integer of at least 0")
            result[name] = int(value)  # 2.0 is the integer 2 in JSON Schema
    for name in references.ONE:
        if isinstance(result.get(name), Mapping):
            result[name] = _of(result[name])
    for name in references.LISTS:
        if isinstance(result.get(name), list):
            result[name] = [_of(item) for item in result[name]]
    for name in references.OBJECTS:
        if isinstance(result.get(name), Mapping):
            result[name] = {key: _of(item) for key, item in result[name].items()}
    return result
