"""Prompt lookup: guesses a text's next tokens by what followed an earlier occurrence of its last tokens."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (4, 3, 2)  # lengths of the token runs to look up, the longest first
_LONGEST_REST = 16  # steps


class Drafter:
    """Guesses for one text, which only grows.

    Args:
      tokens: of the text; the caller appends to them.
    """

    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens
        self._known = 0  # tokens whose runs are indexed
        self._after: dict[tuple[int, ...], int] = {}  # run -> the position after its last occurrence
        self._failed = self._rests = 0  # consecutive guesses without a correct token; steps left without a guess

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens; none if the last run is new, or recent guesses were wrong."""
        tokens = self._tokens
        for end in range(self._known + 1, len(tokens)):  # nothing follows the last run yet
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
                period = len(tokens) - position  # assumes that a repeating text continues to repeat
                while len(text) < most:
                    text.append(text[len(text) - period])
                return text
        return []

    def record(self, right: int) -> None:
        """Records how many tokens of the last guess were correct; pauses after failures, twice as long every time.

        Verifying a guess costs more than a plain step if the devices multiply no faster than they read.
        """
        self._failed = 0 if right else self._failed + 1
        self._rests = 0 if right else min(2**self._failed, _LONGEST_REST)
