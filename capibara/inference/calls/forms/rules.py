"""What the grammars of several forms have in common, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.inference.calls.forms.form import Marks
from capibara.inference.calls.parsing.tools import Tools
from capibara.inference.grammars import schemas
from capibara.inference.grammars.lark import quoted

# As templates write JSON; white space that a model may choose can go on for ever.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

SPECIAL = "<["  # with which a special token begins in a grammar
_LONGEST_NAME = 256  # characters; readers look for the end of a name in twice as many
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


def json_of(schema: object) -> str:
    """JSON that a schema allows.

    Raises:
      UserError: the schema is malformed.
    """
    return schemas.embedded(schemas.prepared(json.dumps(schema)), _LAYOUT)


def json_of_types(tools: Tools, name: str, schema: object, types: Set[str]) -> str:
    """JSON of these types that a schema within that of a tool's arguments allows."""
    return json_of(tools.standalone(name, {"allOf": [schema, {"type": sorted(types)}]}))


def strings(tools: Tools, name: str, schema: object) -> list[str] | None:
    """The strings that a schema within that of a tool's arguments allows; None: any.

    Raises:
      UserError: it allows none.
    """
    if (choices := tools.texts(name, schema)) == []:
        raise UserError(f"tool {short(name)} has the schema {short(schema)}, which no string matches: correct it")
    return choices


def check_name(tool: str, kind: str, name: str, *excluded: str) -> None:
    """Checks a name that calls have as it is.

    Args:
      tool: that has it.
      kind: of the name, in the message.
      name: that is checked.
      excluded: texts that end a name.

    Raises:
      UserError: a call with the name would be read otherwise.
    """
    ends = [text for text in ("\n", *excluded) if text and text in name]
    if ends or name != name.strip() or not 0 < len(name) <= _LONGEST_NAME:
        why = f"have {short(ends[0])}" if ends else "begin or end with white space"
        raise UserError(
            f"tool {short(tool)} has {kind} {short(name)}, which the model's calls cannot write: a name must have 1 to "
            f"{_LONGEST_NAME} characters and must not {why}"
        )


class Texts:
    """Rules of texts with their ends.

    Args:
      excluded: what no text has in it.
      marks: of the form.
      begin: with which no text begins; empty: any may.
      name: of the rules.

    Attributes:
      marks: the same.
      rules: of all texts that were asked for.
    """

    def __init__(self, excluded: str, marks: Marks, begin: str = "", name: str = "text"):
        self.marks, self._name, self._names = marks, name, dict[str, str]()
        self._pattern = f"/(?s:.*)/ & ~/(?s:.*){_pattern(excluded)}(?s:.*)/"
        if begin:
            self._pattern += f" & ~/{_pattern(begin)}(?s:.*)/"
        self.rules = [f"{name.upper()}: {self._pattern}"]

    def one_of(self, choices: Iterable[str], end: str) -> str:
        """An expression of one of some texts and its end."""
        written = self.marks(end)
        if written != quoted(end):
            return f"({' | '.join(map(quoted, choices))}) {written}"
        # The end is a part of each lexeme: the choice "a" could not end before "<" where "a<" is another.
        return f"({' | '.join(quoted(choice + end) for choice in choices)})"

    def before(self, end: str) -> str:
        """An expression of any text and its end, which begins with `excluded`."""
        written = self.marks(end)
        if written.startswith(SPECIAL):
            return f"{self._name.upper()} {written}"
        # A lexeme takes all it can: TEXT would go on over an end that is made of characters, up to the last of them.
        if (name := self._names.get(end)) is None:
            name = self._names[end] = f"{self._name}_{len(self._names)}"
            self.rules.append(f"{name}[suffix={quoted(end)}]: {self._pattern}")
        return name


def _pattern(text: str) -> str:
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)
