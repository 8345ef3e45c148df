"""The text form of a playbook: `## SECTION` headers, and bullets `[id] helpful=N harmful=M :: text` of one or more lines.

A bullet ends at the next line that begins like a bullet, or at the next header. Within a fence of code (```) that is closed
before the next bullet, `##` is no header. A line that begins like a bullet but has another form is malformed: it and the
lines below it belong to no bullet. Text outside bullets, such as a description of the playbook, is counted.

A line of a text that would read as a header or a bullet is written with a backslash before it, which reading removes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from capibara.builders.files.problems import Kind, Problems
from capibara.builders.files.reading import Line
from capibara.builders.playbooks.bullets import (
    GENERAL,
    MOST_CHARACTERS,
    MOST_VOTES,
    Bullet,
    identifier,
    normalised,
    one_line,
    section_name,
)

_MARK = r"\s*(?:(?:[-*+•]|\d{1,4}[.)])\s+)?[*_`]{0,3}"  # of a list, and bold
# What begins like a bullet: `[id] helpful=`, `[str-00001] ::`, `helpful=1 ... ::` without an id, `[id helpful=`.
_LIKE = re.compile(
    rf"{_MARK}(?:\[[^\[\]]*\][*_`]{{0,3}}\s*\(?(?:helpful|harmful)\s*=|\[[\w.]+-[\w.-]+\][*_`]{{0,3}}\s*::"
    r"|(?:helpful|harmful)\s*=.*::|\[[^\[\]]*?\b(?:helpful|harmful)\s*=)",
    re.IGNORECASE,
)
_HEAD = re.compile(rf"{_MARK}\[([^\[\]]*)\][*_`]{{0,3}}(.*)")
_PAIR = re.compile(r"[\s,;]*(\w+)\s*=\s*([^\s,;=]+)")
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_HEADER = re.compile(r" {0,3}#{2,6}(?!#)(.*)")
_TITLE = re.compile(r" {0,3}#\s")  # of a document; it ends no bullet, since code has such comments
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_ESCAPED = re.compile(r"(\s*)(\\*)(.*)", re.DOTALL)
_MOST_RAW = 4 * MOST_CHARACTERS  # of the lines of a bullet, with their indentation
_INDENT = "  "  # of the lines of a bullet after its first


class Parser:
    """Parses the lines of one playbook, one after the other.

    Args:
      problems: counts malformed bullets, with file and line.

    Attributes:
      outside: how many lines that are not blank belonged to no bullet.
    """

    def __init__(self, problems: Problems):
        self.outside = 0
        self._problems = problems
        self._section = ""
        self._head: Line | None = None  # the first line of the bullet that is read
        self._lines: list[str] = []
        self._characters = 0
        self._fence = ""  # of the block of code that is read
        self._fenced_from = 0  # its place in _lines
        self._last = 0

    def parse(self, lines: Iterable[Line]) -> Iterator[Bullet]:
        """The bullets, in their order."""
        for line in lines:
            if line.number > self._last + 1:  # a line was skipped: what follows may belong to another bullet
                yield from self._end()
            self._last = line.number
            if _LIKE.match(line.text):
                yield from self._end()
                self._begin(line)
            elif self._head is None:
                self._outside(line.text)
            elif not self._fence and _HEADER.match(line.text):
                yield from self._end()
                self._outside(line.text)
            else:
                self._add(line.text)
                if self._characters > _MOST_RAW:
                    yield from self._end()
        yield from self._end()

    def _begin(self, line: Line) -> None:
        self._head, self._lines, self._characters, self._fence = line, [], 0, ""
        start = line.text.find("::", line.text.find("]") + 1)
        self._add(line.text[start + 2 :] if start >= 0 else "")

    def _add(self, text: str) -> None:
        self._lines.append(text)
        self._characters += len(text) + 1
        if (result := _FENCE.match(text)) is None:
            return
        mark = result[1]
        if not self._fence:
            self._fence, self._fenced_from = mark, len(self._lines)
        elif mark.startswith(self._fence) and not text[result.end() :].strip():
            self._fence = ""

    def _end(self) -> Iterator[Bullet]:
        if self._head is None:
            return
        head, retained, self._head = self._head, self._lines, None
        if self._fence:  # never closed: it protects no header
            inside = range(self._fenced_from, len(self._lines))
            header = next((i for i in inside if _HEADER.match(self._lines[i])), len(self._lines))
            retained = self._lines[:header]
        result = self._bullet(head, retained)
        for text in self._lines[len(retained) :]:
            self._outside(text)
        if result is not None:
            yield result

    def _bullet(self, head: Line, lines: list[str]) -> Bullet | None:
        try:
            name, votes = _votes_of(head.text)
            content = _content(lines)
            if len(content) > MOST_CHARACTERS or sum(len(line) + 1 for line in lines) > _MOST_RAW:
                message = f"a bullet of more than {MOST_CHARACTERS:,} characters"
                self._problems.add(head.path, head.number, Kind.TOO_LONG, message)
                return None
            if not content:
                raise ValueError("a bullet without text")
        except ValueError as error:
            self._problems.add(head.path, head.number, Kind.MALFORMED, str(error))
            return None
        helpful, harmful = votes
        return Bullet(
            id=name,
            section=self._section or GENERAL,
            content=content,
            helpful=helpful,
            harmful=harmful,
            line=head.number,
        )

    def _outside(self, text: str) -> None:
        if (result := _HEADER.match(text)) is not None:
            self._section = one_line(result[1])
        elif text.strip():
            self.outside += 1


def _votes_of(text: str) -> tuple[str, tuple[int, int]]:
    """The identifier and the votes of the first line of a bullet.

    Raises:
      ValueError: it has another form. The message has no text of the line, which may be a secret.
    """
    result = _HEAD.match(text)
    if result is None or not identifier(result[1]):
        raise ValueError("a bullet without an [id]")
    votes, separator, _ = result[2].partition("::")
    if not separator:
        raise ValueError("a bullet without :: before its text")
    votes, values, at = votes.strip().removeprefix("(").removesuffix(")"), dict[str, str](), 0
    while (pair := _PAIR.match(votes, at)) is not None:
        values[pair[1].lower()], at = pair[2], pair.end()
    if votes[at:].strip(" \t,;"):
        raise ValueError("a bullet whose votes are not name=number, such as helpful=3 harmful=0")
    if not {"helpful", "harmful"} & values.keys():
        return identifier(result[1]), (0, 0)
    return identifier(result[1]), (_vote(values, "helpful"), _vote(values, "harmful"))


def _vote(values: dict[str, str], name: str) -> int:
    if name not in values:
        raise ValueError(f"a bullet without {name}=")
    if not _COUNT.fullmatch(values[name]):
        raise ValueError(f"a bullet whose {name} is no whole number from 0 to {MOST_VOTES:,}")
    return int(values[name])


def _content(lines: list[str]) -> str:
    """The text of a bullet's lines, without a title of the next playbook below it."""
    first, *rest = normalised("\n".join(lines)).split("\n")
    while len(rest) > 1 and _TITLE.match(rest[-1]) and not rest[-2]:
        rest.pop()
        while len(rest) > 1 and not rest[-1]:
            rest.pop()
    return normalised("\n".join([first, *map(_unescaped, rest)]))


# --- writing ---------------------------------------------------------------------------------------------------------


def written(bullets: Iterable[Bullet]) -> Iterator[str]:
    """The lines of a playbook, in the order of the bullets; `Parser` reads the same bullets.

    Args:
      bullets: in normal form, each with an identifier.
    """
    groups = itertools.groupby(bullets, key=lambda bullet: section_name(bullet.section))
    for number, (section, inside) in enumerate(groups):
        yield from [*([""] if number else []), f"## {section}"]
        for bullet in inside:
            assert bullet.id == identifier(bullet.id) != "", bullet.id
            first, *rest = bullet.content.split("\n")
            yield f"[{bullet.id}] helpful={bullet.helpful} harmful={bullet.harmful} :: {first}"
            for i, line in enumerate(rest):
                is_title = i + 1 == len(rest) > 1 and not rest[i - 1] and _TITLE.match(line) is not None
                yield _INDENT + _escaped(line, is_title) if line else ""


def _is_boundary(line: str) -> bool:
    return _HEADER.match(line) is not None or _LIKE.match(line) is not None


def _escaped(line: str, is_title: bool) -> str:
    result = _ESCAPED.match(line)
    assert result is not None
    indent, slashes, rest = result.groups()
    bare = indent + rest
    if is_title or _is_boundary(bare) or (slashes and _TITLE.match(bare)):
        return f"{indent}\\{slashes}{rest}"
    return line


def _unescaped(line: str) -> str:
    result = _ESCAPED.match(line)
    assert result is not None
    indent, slashes, rest = result.groups()
    bare = indent + rest
    return f"{indent}{slashes[1:]}{rest}" if slashes and (_is_boundary(bare) or _TITLE.match(bare)) else line
