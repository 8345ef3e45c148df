"""Searches runs by a regular expression, within a limit of time: an expression can take for ever."""

from __future__ import annotations

import time
from typing import Any

from capibara.core import extras
from capibara.core.types import UserError

_MOST_CHARACTERS = 200
_MOST_TEXT = 200_000  # characters of one text
_MOST_REPEATS = 1000
_TOTAL_S, _ONE_S = 0.25, 0.05


class Search:
    """A compiled expression, which ignores case.

    Args:
      expression: of the package `regex`.

    Raises:
      UserError: it is too long, or invalid.
    """

    def __init__(self, expression: str):
        regex = extras.require("regex", extra="dashboard", why="searching runs")
        if len(expression) > _MOST_CHARACTERS:
            raise UserError(f"the search has {len(expression)} characters, must have at most {_MOST_CHARACTERS}")
        counts = regex.findall(r"\d+", " ".join(regex.findall(r"\{[^{}]*\}", expression)))
        if any(len(count) > 4 or int(count) > _MOST_REPEATS for count in counts):
            raise UserError(f"the search repeats something more than {_MOST_REPEATS} times: use fewer")
        try:
            self._compiled: Any = regex.compile(expression, regex.IGNORECASE | regex.VERSION0)
        except (regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise UserError(
                f"the search is no regular expression ({str(error)[:100]}): put \\ before signs such as ["
            ) from None
        self._left_s = _TOTAL_S

    def matches(self, text: str) -> bool:
        """Whether the expression is found in a text.

        Raises:
          UserError: the search takes too long.
        """
        begin_s = time.monotonic()
        try:
            if self._left_s <= 0:
                raise TimeoutError
            return self._compiled.search(text[:_MOST_TEXT], timeout=min(_ONE_S, self._left_s)) is not None
        except TimeoutError:
            raise UserError("the search takes too long: make it simpler") from None
        finally:
            self._left_s -= time.monotonic() - begin_s
