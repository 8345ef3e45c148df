"""Reads JSON while it arrives (RFC 8259)."""

from __future__ import annotations

import json
import math
import re

from capibara.inference.calls.parsing.text import Malformed, Steps, Text

_DEEPEST = 100  # lists and objects within each other, as in a message that a template is given
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ATOM = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def skip_value(text: Text, deepest: int = _DEEPEST) -> Steps[None]:
    """Reads one value.

    Raises:
      Malformed: it is no JSON, or nested too deeply.
    """
    yield from text.spaces()
    match (yield from text.peek()):
        case '"':
            yield from skip_string(text)
        case "{":
            yield from _skip_items(text, "}", deepest)
        case "[":
            yield from _skip_items(text, "]", deepest)
        case _:
            word = yield from text.run(_ATOM)
            if word not in ("true", "false", "null") and not is_number(word):
                raise Malformed


def is_number(word: str) -> bool:
    """Whether it is a number of JSON that a float64 holds: Python reads 1e400 as infinity, and Go refuses it."""
    return bool(_NUMBER.fullmatch(word)) and math.isfinite(float(word))


def skip_string(text: Text) -> Steps[None]:
    """Reads a string."""
    yield from text.expect('"')
    while True:
        yield from text.run(_PLAIN)
        if (yield from text.take('"')):
            return
        size = 6 if (yield from text.peek(1)) == "u" else 2
        if not (yield from text.peek(size - 1)) or not _ESCAPE.fullmatch(text.part(text.at, text.at + size)):
            raise Malformed
        text.at += size


def read_string(text: Text) -> Steps[str]:
    """Reads a string; returns what it means."""
    start = text.at
    yield from skip_string(text)
    return json.loads(text.part(start))


def _skip_items(text: Text, close: str, deepest: int) -> Steps[None]:
    if not deepest:
        raise Malformed
    text.at += 1
    yield from text.spaces()
    if (yield from text.take(close)):
        return
    while True:
        if close == "}":
            yield from text.spaces()
            yield from skip_string(text)
            yield from text.spaces()
            yield from text.expect(":")
        yield from skip_value(text, deepest - 1)
        yield from text.spaces()
        if (yield from text.expect(",", close)) == close:
            return
