"""What the grammars of several forms have in common, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from capibara.inference.calls.forms.form import Marks
from capibara.inference.calls.parsing.tools import Tools
from capibara.inference.grammars import schemas

# As templates write JSON; white space that a model may choose can go on for ever.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

SPECIAL = "<["  # with which a special token begins in a grammar
_COMPOSED = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}


def rules_of_calls(
    tools: Tools, call: Callable[[str, str], str], parallel: bool, *, begin: str = "", between: str = "", end: str = ""
) -> Iterator[str]:
    """Rules of calls whose arguments are JSON.

    Args:
      tools: that may be called.
      call: the rule of a call, of a tool's name and the name of the rule of its arguments.
      parallel: whether several calls are allowed.
      begin: what comes before all calls.
      between: what comes between two.
      end: what comes after all.
    """
    yield from rules_of_any(tools, parallel, begin=begin, between=between, end=end)
    for number, (name, schema) in enumerate(tools.parameters.items()):
        yield f"call_{number}: {call(name, f'arguments_{number}')}"
        yield f"arguments_{number}: {json_of(object_schema(schema))}"


def rules_of_any(tools: Tools, parallel: bool, *, begin: str = "", between: str = "", end: str = "") -> Iterator[str]:
    """Rules of one or several `call_0`, `call_1`, ...: one for each tool."""
    more = f"({between} call)*" if parallel else ""
    yield f"calls: {begin} call {more} {end}"
    yield "call: " + " | ".join(f"call_{number}" for number in range(len(tools.parameters)))


def object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of arguments, which are an object, and no others than it names, unless it says so."""
    closed = {} if _COMPOSED & set(schema) else {"additionalProperties": False}
    return {**closed, **schema, "type": "object"}


def json_of(schema: Any) -> str:
    """JSON that a schema allows.

    Raises:
      UserError: the schema is malformed.
    """
    prepared = schemas.prepared(json.dumps(schema))
    return "%json " + json.dumps({**(prepared if isinstance(prepared, dict) else {}), "x-guidance": _LAYOUT})


class Texts:
    """Rules of texts with their ends.

    Args:
      excluded: what no text has in it.
      marks: of the form.

    Attributes:
      marks: the same.
      rules: of all texts that were asked for.
    """

    def __init__(self, excluded: str, marks: Marks):
        self.marks, self._pattern, self._names = marks, _text_without(excluded), dict[str, str]()
        self.rules = [f"TEXT: {self._pattern}"]

    def before(self, end: str) -> str:
        """An expression of any text and its end, which begins with `excluded`."""
        written = self.marks(end)
        if written.startswith(SPECIAL):
            return f"TEXT {written}"
        # A lexeme takes all it can: TEXT would go on over an end that is made of characters, up to the last of them.
        if (name := self._names.get(end)) is None:
            name = self._names[end] = f"text_{len(self._names)}"
            self.rules.append(f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]: {self._pattern}")
        return name


def _text_without(excluded: str) -> str:
    return f"/(?s:.*)/ & ~/(?s:.*){_pattern(excluded)}(?s:.*)/"


def _pattern(text: str) -> str:
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)
