"""Finds the interactive sessions of Python in a text: `>>>` lines, their results, and the errors that they show."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from typing import NamedTuple

_PARSER = doctest.DocTestParser()
_PROMPT = re.compile(r"^[ \t]*>>> ", re.MULTILINE)
_MESSAGE = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<value>.*))?$", re.MULTILINE | re.DOTALL)
_ELLIPSIS = re.compile(r"#\s*doctest:")


class StatedError(NamedTuple):
    """An error that a text shows."""

    name: str
    value: str
    traceback: str


class Example(NamedTuple):
    """A statement of a session.

    Attributes:
      line: of the text, from 1.
      session: the number of the session in the text, from 1; prose ends a session.
      code: the statement, without prompts.
      output: what the text says that it prints.
      error: the error that the text shows; None: there is none.
    """

    line: int
    session: int
    code: str
    output: str
    error: StatedError | None


def examples(text: str) -> Iterator[Example]:
    """The examples of a text, in their order; a session of which doctest refuses a line is read up to that line."""
    session = 0
    for start, block in _blocks(text):
        session += 1
        for line, code, want, message in _parsed(block):
            error = _error(want, message) if message is not None else None
            yield Example(start + line, session, code, "" if error else want, error)


def without_prompts(code: str) -> str:
    """Code that was copied with its `>>>` prompts and results, without them; other code as it is."""
    if _PROMPT.match(code) is None:
        return code
    return "\n".join(one.code for one in examples(code)) or code


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs that have a prompt, with the number of their first line; those without text between them join."""
    lines = text.split("\n")
    begin: int | None = None
    gap = False
    for number, line in enumerate([*lines, "", "end"]):
        is_prompt = _PROMPT.match(line) is not None
        if begin is None:
            begin = number if is_prompt else None
            gap = False
        elif not line.strip():
            gap = True
        elif gap and not is_prompt:  # prose, or the output after an empty line, which doctest does not know
            yield begin + 1, "\n".join(lines[begin:number])
            begin, gap = None, False
        else:
            gap = False


def _parsed(block: str) -> Iterator[tuple[int, str, str, str | None]]:
    while True:
        try:
            found = _PARSER.get_examples(block)
            break
        except ValueError as error:  # "line 3 of the docstring for ...": what stands before it is right
            at = re.search(r"line (\d+) of", str(error))
            lines = block.split("\n")[: int(at[1]) - 1] if at else []
            if not lines or len(lines) >= len(block.split("\n")):
                return
            block = "\n".join(lines)
    for one in found:
        if not one.source.strip() or _ELLIPSIS.search(one.source):
            continue  # its options say that the result is not as it stands there
        yield one.lineno, one.source.rstrip("\n"), one.want, one.exc_msg


def _error(want: str, message: str) -> StatedError | None:
    found = _MESSAGE.match(message.rstrip("\n"))
    if found is None:
        return None
    return StatedError(found["name"].rpartition(".")[2], found["value"] or "", want.rstrip("\n"))
