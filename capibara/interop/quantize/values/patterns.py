"""Patterns of a quantization_config: it may come from anyone, and each is compared with every module."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable

from capibara.core import limits
from capibara.core.types import UserError

_MOST = 256
_MOST_GLOBS, _GLOB_CHARACTERS = 1024, 256  # fnmatch takes quadratic time in brackets that do not end
_WILDCARD = re.compile(r"[*?\[]")


def compiled(patterns: Collection[str], where: str = "quantization_config") -> dict[str, re.Pattern[str]]:
    """The patterns, by their text.

    Args:
      patterns: regular expressions.
      where: what has them, for errors.

    Raises:
      UserError: one is no regular expression, or may take too long, or they are too many.
    """
    if len(patterns) > _MOST:
        raise UserError(f"{where} has {len(patterns):,} patterns, must have at most {_MOST}")
    result = {}
    for pattern in patterns:
        try:
            limits.check_pattern(pattern)
            result[pattern] = re.compile(pattern)
        except (limits.Refused, re.error, RecursionError, OverflowError) as error:
            shown = limits.shortened(pattern)
            raise UserError(f"{where} has the pattern {shown}, which cannot be used: {error}") from None
    return result


class Globs:
    """Names of modules, and patterns of them in the style of a shell.

    Args:
      texts: names and patterns.
      where: what has them, for errors.

    Raises:
      UserError: patterns are too many or too long.
    """

    def __init__(self, texts: Iterable[str], where: str):
        self._order = {text: at for at, text in enumerate(texts)}
        wild = [text for text in self._order if _WILDCARD.search(text)]
        if len(wild) > _MOST_GLOBS:
            raise UserError(f"{where} has {len(wild):,} patterns, must have at most {_MOST_GLOBS:,}")
        if long := next((text for text in wild if len(text) > _GLOB_CHARACTERS), None):
            shown = limits.shortened(long)
            raise UserError(f"{where} has the pattern {shown}, must have at most {_GLOB_CHARACTERS} characters")
        self._patterns = {text: re.compile(fnmatch.translate(text)) for text in wild}

    def first(self, module: str) -> str | None:
        """The first text that is a module's name or matches it; None: there is none."""
        matching = next((text for text, pattern in self._patterns.items() if pattern.match(module)), None)
        texts = (text for text in (matching, module) if text in self._order)
        return min(texts, key=self._order.__getitem__, default=None)
