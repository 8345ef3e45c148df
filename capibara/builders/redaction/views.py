r"""Readings of a text in which a secret is whole again: escapes decoded, string literals joined, lines unwrapped.

A secret may be written as `"ghp_\u0061..."` in JSON within JSON, as `"ghp_abc" "def"` in a program, or broken by a terminal
after 80 characters. Each view maps the spans that are found in it back to the text.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable, Iterator

_ESCAPE = re.compile(r"(?<!\\)\\++(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([nrtbf\"'/]))|%([0-9A-Fa-f]{2})|&#(\d{2,5});")
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_IN_TOKEN = r"[\w+/=.\-]"
# `"abc" "def"`, `"abc" + "def"`, over lines, in parentheses.
_LITERALS = re.compile(
    rf"([\"'])(?<={_IN_TOKEN}[\"'])[ \t]*+\\?[+.&]?[ \t]*+\\?(?:\r?\n[ \t]*+)?[+.&]?[ \t]*+[rbfu]{{0,2}}\1(?={_IN_TOKEN})"
)
# A line break within a token: the next line has nothing but the rest of it, with a digit.
_WRAP = re.compile(
    rf"(?:\n(?<={_IN_TOKEN}\n)|\r\n(?<={_IN_TOKEN}\r\n)|\\\n(?<={_IN_TOKEN}\\\n))[ \t>|]*"
    rf"(?=(?=[^\s\"']*\d){_IN_TOKEN}{{2,}}[\"']?[,;)]*[ \t]*(?:\r?\n|$))"
)


@dataclasses.dataclass(frozen=True)
class View:
    """A text that stands for another one.

    Attributes:
      text: what it reads.
      is_joined: whether pieces were joined: only tokens of a known form count in it.
    """

    text: str
    is_joined: bool
    _starts: tuple[int, ...]  # in `text`, where a piece begins
    _origins: tuple[int, ...]  # of these pieces, in the original
    _lengths: tuple[int, ...]  # of these pieces in the original; -1: as in `text`, character by character

    def origin(self, start: int, end: int) -> tuple[int, int]:
        """The span of the original that a span of the view stands for."""
        return self._at(start)[0], self._at(end - 1)[1]

    def has_joint(self, start: int, end: int) -> bool:
        """Whether a span of the view consists of several pieces."""
        return bisect.bisect_right(self._starts, start) != bisect.bisect_right(self._starts, end - 1)

    def _at(self, position: int) -> tuple[int, int]:
        piece = bisect.bisect_right(self._starts, position) - 1
        begin = self._origins[piece]
        if self._lengths[piece] < 0:
            begin += position - self._starts[piece]
            return begin, begin + 1
        return begin, begin + self._lengths[piece]


def views_of(text: str) -> Iterator[View]:
    """The text as it is, and its other readings where they differ."""
    yield View(text, False, (0,), (0,), (-1,))
    if "\\" in text or "%" in text or "&#" in text:
        decoded = _replaced(text, _ESCAPE, _decoded, is_joined=False)
        if decoded is not None:
            yield decoded
    if "\n" in text or '"' in text or "'" in text:
        for pattern in (_LITERALS, _WRAP):
            joined = _replaced(text, pattern, lambda _: "", is_joined=True)
            if joined is not None:
                yield joined


def _decoded(match: re.Match[str]) -> str:
    if match[3]:
        return _PLAIN.get(match[3], match[3])
    code = int(match[5]) if match[5] else int(match[1] or match[2] or match[4], 16)
    return chr(code) if 0x20 <= code < 0xD800 or code in (9, 10, 13) else match[0][:1]


def _replaced(
    text: str, pattern: re.Pattern[str], new: Callable[[re.Match[str]], str], *, is_joined: bool
) -> View | None:
    parts, starts, origins, lengths = [], [], [], []
    at = size = 0

    def add(part: str, origin: int, length: int) -> None:
        nonlocal size
        if part:
            parts.append(part)
            starts.append(size)
            origins.append(origin)
            lengths.append(length)
            size += len(part)

    for result in pattern.finditer(text):
        add(text[at : result.start()], at, -1)
        add(new(result), result.start(), result.end() - result.start())
        at = result.end()
    if not at:
        return None
    add(text[at:], at, -1)
    return View("".join(parts), is_joined, tuple(starts), tuple(origins), tuple(lengths))
