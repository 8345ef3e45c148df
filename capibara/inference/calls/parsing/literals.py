"""Reads values as Python and JSON write them, or with quotes that are tokens of their own, while they arrive."""

from __future__ import annotations

import json
import re
from typing import Any

from capibara.inference.calls.parsing.json_text import is_number
from capibara.inference.calls.parsing.text import Malformed, Steps, Text

_DEEPEST = 100
_ATOM = re.compile(r"[-+.0-9A-Za-z_]*")
_PLAIN = re.compile(r"[^\\'\"]*")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {**dict(zip("nrtbf0", "\n\r\t\b\f\0", strict=True)), **{c: c for c in "\\'\"/"}, "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}


def parse(literal: str) -> Any:
    """The value of a whole text.

    Raises:
      Malformed: it is no value.
    """
    text = Text()
    text.add(literal)
    text.ended = True
    steps = read_value(text)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        if text.at != len(literal):
            raise Malformed from None
        return end.value


def read_value(text: Text, quote: str = "", deepest: int = _DEEPEST) -> Steps[Any]:
    """Reads one value.

    Args:
      text: that is read.
      quote: what stands around strings, which have no escapes then; keys have no quotes. Empty: as in Python and JSON.
      deepest: levels of lists and objects.

    Raises:
      Malformed: it is no value, or nested too deeply.
    """
    yield from text.spaces()
    if quote and (yield from text.take(quote)):
        return (yield from _raw(text, quote))
    match (yield from text.peek()):
        case ("'" | '"') as mark:
            return (yield from _string(text, mark))
        case "{":
            return (yield from _object(text, quote, deepest))
        case "[":
            return (yield from _list(text, quote, deepest))
    return _scalar((yield from text.run(_ATOM)))


def _scalar(word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    if not is_number(word):
        raise Malformed
    return json.loads(word)


def _raw(text: Text, quote: str) -> Steps[str]:
    value = yield from text.head(quote, most=None)
    text.at += len(quote)
    return value


def _string(text: Text, mark: str) -> Steps[str]:
    text.at += 1
    parts = []
    while True:
        parts.append((yield from text.run(_PLAIN)))
        character = yield from text.peek()
        text.at += 1
        if character == mark:
            return _joined(parts)
        parts.append((yield from _escape(text)) if character == "\\" else character)
        if not character:
            raise Malformed


def _joined(parts: list[str]) -> str:
    """JSON writes characters beyond U+FFFF as two surrogates."""
    return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(text: Text) -> Steps[str]:
    letter = yield from text.peek()
    text.at += 1
    if (size := _CODES.get(letter)) is None:
        return _ESCAPES.get(letter, "\\" + letter)  # as in Python
    if not (yield from text.peek(size - 1)):
        raise Malformed
    digits = text.part(text.at, text.at + size)
    text.at += size
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise Malformed from None


def _list(text: Text, quote: str, deepest: int) -> Steps[list[Any]]:
    values: list[Any] = []
    yield from _open(text, deepest)
    if (yield from text.take("]")):
        return values
    while True:
        values.append((yield from read_value(text, quote, deepest - 1)))
        yield from text.spaces()
        if (yield from text.expect(",", "]")) == "]":
            return values


def _object(text: Text, quote: str, deepest: int) -> Steps[dict[str, Any]]:
    values: dict[str, Any] = {}
    yield from _open(text, deepest)
    if (yield from text.take("}")):
        return values
    while True:
        yield from text.spaces()
        key = (yield from read_key(text, quote)) if quote else (yield from read_value(text))
        if not isinstance(key, str):
            raise Malformed
        yield from text.spaces()
        yield from text.expect(":")
        values[key] = yield from read_value(text, quote, deepest - 1)
        yield from text.spaces()
        if (yield from text.expect(",", "}")) == "}":
            return values


def read_key(text: Text, quote: str, equals: str = ":") -> Steps[str]:
    """Reads a key, which may have these quotes, up to what follows it."""
    if quote and (yield from text.take(quote)):
        return (yield from _raw(text, quote))
    return (yield from text.head(equals)).strip()


def _open(text: Text, deepest: int) -> Steps[None]:
    if not deepest:
        raise Malformed
    text.at += 1
    yield from text.spaces()
