"""Finds the interactive sessions of Python in a text: `>>>` lines, their results, and the errors that they show."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PARSER = doctest.DocTestParser()
_PROMPT = re.compile(r"^[ \t]*>>> ", re.MULTILINE)
_MESSAGE = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<value>.*))?$", re.MULTILINE | re.DOTALL)
LONGEST = 1 << 20  # characters of a session; a longer one becomes several
_ELLIPSIS = re.compile(r"#\s*doctest:")


class StatedError(NamedTuple):
    """An error that a text shows."""

    name: str
    value: str
    traceback: str


class Example(NamedTuple):
    """A statement of a session.

    Attributes:
      line: its number.
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
    """The examples of a text; see `of_lines`."""
    return of_lines(enumerate(text.split("\n"), 1))


def of_lines(lines: Iterable[tuple[int, str]]) -> Iterator[Example]:
    """The examples of a text, in their order; a session of which doctest refuses a line is read up to that line.

    Args:
      lines: number and text of each line; where a number is missing, a session ends.
    """
    session = 0
    for start, block in _blocks(lines):
        session += 1
        for line, code, want, message in _parsed(block):
            error = _error(want, message) if message is not None else None
            yield Example(start + line, session, code, "" if error else want, error)


def without_prompts(code: str) -> str:
    """Code that was copied with its `>>>` prompts and results, without them; other code as it is."""
    if _PROMPT.match(code) is None:
        return code
    return "\n".join(item.code for item in examples(code)) or code


def _blocks(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The paragraphs that have a prompt, with the number of their first line; those without text between them join."""
    begin, size = 0, 0
    block: list[str] = []
    for number, line in lines:
        is_prompt = _PROMPT.match(line) is not None
        # Prose, or the output after an empty line, which doctest does not know.
        is_prose = line.strip() != "" and bool(block) and not block[-1].strip() and not is_prompt
        if block and (is_prose or number != begin + len(block) or (is_prompt and size > LONGEST)):
            yield begin, "\n".join(block)
            block = []
        if is_prompt and not block:
            begin, size = number, 0
        if is_prompt or block:
            block.append(line)
            size += len(line) + 1
    if block:
        yield begin, "\n".join(block)


def _parsed(block: str) -> Iterator[tuple[int, str, str, str | None]]:
    while True:
        try:
            result = _PARSER.get_examples(block)
            break
        except ValueError as error:  # "line 3 of the docstring for ...": what stands before it is right
            at = re.search(r"line (\d+) of", str(error))
            lines = block.split("\n")[: int(at[1]) - 1] if at else []
            if not lines or len(lines) >= len(block.split("\n")):
                return
            block = "\n".join(lines)
    for item in result:
        if not item.source.strip() or _ELLIPSIS.search(item.source):
            continue  # its options say that the result is not as it stands there
        yield item.lineno, item.source.rstrip("\n"), item.want, item.exc_msg


def _error(want: str, message: str) -> StatedError | None:
    result = _MESSAGE.match(message.rstrip("\n"))
    if result is None:
        return None
    return StatedError(result["name"].rpartition(".")[2], result["value"] or "", want.rstrip("\n"))
