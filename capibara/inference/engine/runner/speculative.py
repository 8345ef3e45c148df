"""Guesses of a text's next tokens by prompt look-up: what followed its last tokens where they stood before in it."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (4, 3, 2)  # of the runs of tokens that are looked up, the longest first
_LONGEST_REST = 16  # steps


class Drafter:
    """Guesses for one text, which only grows.

    Args:
      tokens: of the text; others append to them.
    """

    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens
        self._known = 0  # tokens of which it is known where runs end
        self._after: dict[tuple[int, ...], int] = {}  # run -> the position after its last occurrence
        self._failed = self._rests = 0  # guesses in a row of which nothing was right; steps without a guess after them

    def guess(self, most: int) -> list[int]:
        """So many tokens, or none: the last run of tokens has not been there before, or guesses were wrong of late."""
        tokens = self._tokens
        for end in range(self._known + 1, len(tokens)):  # the last run has nothing after it yet
            for size in _SIZES:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._known = max(self._known, len(tokens) - 1)
        if self._rests:
            self._rests -= 1
            return []
        for size in _SIZES:
            position = self._after.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if position is not None:
                text = list(tokens[position : position + most])
                period = len(tokens) - position  # a text that repeats itself goes on so
                while len(text) < most:
                    text.append(text[len(text) - period])
                return text
        return []

    def record(self, right: int) -> None:
        """How many tokens of the last guess were right: after none there is none for a while, twice as long every time.

        To verify a guess costs more than a plain step where the devices multiply no faster than they read.
        """
        self._failed = 0 if right else self._failed + 1
        self._rests = 0 if right else min(2**self._failed, _LONGEST_REST)
