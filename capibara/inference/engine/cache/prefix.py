"""Beginnings that were read before: a prompt that shares one is not read again from its first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core import tree


class Prefix(NamedTuple):
    """Tokens [n], the cache of a row that has read them, and the number of the adapter with which it has."""

    tokens: np.ndarray
    row: Any
    adapter: int = 0


class PrefixCache:
    """The beginnings used last, up to a number of bytes.

    Args:
      max_bytes: of the rows' caches together; 0: nothing is kept.
      window: the shortest window of the model's layers; None: all see the whole row. A layer with a window has only its
        last positions, which are of no use to a text that differs earlier.
      shortest: fewer tokens in common are not worth it.
    """

    def __init__(self, max_bytes: int, window: int | None, shortest: int = 16):
        self._max_bytes, self._window, self._shortest = max_bytes, window, shortest
        self._entries: list[Prefix] = []  # the one used last at the end

    def find(self, tokens: Sequence[int], adapter: int = 0) -> tuple[Prefix, int] | None:
        """What was read of these tokens with an adapter, and how many of them: at least one is left to read."""
        wanted = np.asarray(tokens)
        best, most = None, self._shortest - 1
        for entry in self._entries:
            common = min(common_beginning(entry.tokens, wanted), len(wanted) - 1)
            # A row that an end token ended has read that too: with as many tokens as the window its first is gone.
            whole = self._window is None or len(entry.tokens) < self._window or common == len(entry.tokens)
            if whole and common > most and entry.adapter == adapter:
                best, most = entry, common
        if best is None:
            return None
        self._entries.sort(key=lambda entry: entry is best)
        return best, most

    def keep(self, tokens: Sequence[int], row: Any, adapter: int = 0) -> None:
        """Remembers a row that has read these tokens with an adapter; what else begins them is no longer needed."""
        if tree.byte_count(row) > self._max_bytes:
            return
        new = np.asarray(tokens)

        def replaced(entry: Prefix) -> bool:
            if entry.adapter != adapter:
                return False
            old = entry.tokens
            shorter = len(old) < len(new) and self._window is None
            return (shorter or len(old) == len(new)) and bool((new[: len(old)] == old).all())

        self._entries = [entry for entry in self._entries if not replaced(entry)]
        self._entries.append(Prefix(new, row, adapter))
        while sum(tree.byte_count(entry.row) for entry in self._entries) > self._max_bytes:
            del self._entries[0]

    def clear(self) -> None:
        """Forgets everything: what was read was read with other parameters."""
        self._entries = []


def common_beginning(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """How many first tokens two texts share."""
    size = min(len(one), len(other))
    equal = np.asarray(one[:size]) == np.asarray(other[:size])
    return size if equal.all() else int(np.argmin(equal))
