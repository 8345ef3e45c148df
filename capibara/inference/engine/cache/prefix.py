"""The prefix cache: a prompt that shares the beginning of an earlier row does not read it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core import tree
from capibara.core.types import PyTree


class Sharing(NamedTuple):
    """Requests share rows only where all of these are equal: the adapter, by its version, and the request's salt."""

    adapter: int = 0
    salt: str = ""


class Prefix(NamedTuple):
    """Tokens [n], the cache of a row that has read them, its bytes, and which requests share it."""

    tokens: np.ndarray
    row: Any
    size: int
    sharing: Sharing = Sharing()


class PrefixCache:
    """The most recently used rows, up to a number of bytes.

    Args:
      max_bytes: of all rows' caches; 0: no cache.
      window: the shortest window of the model's layers; None: all layers see whole rows. A layer with a window has only
        the last positions, which are useless for a text that differs earlier.
      whole: whether a row can only be read on from its end: recurrent layers have a state after its last token alone.
      shortest: least number of common tokens worth reusing.
    """

    def __init__(self, max_bytes: int, window: int | None, whole: bool = False, shortest: int = 16):
        self._max_bytes, self._window, self.whole, self._shortest = max_bytes, window, whole, shortest
        self._entries: list[Prefix] = []  # the most recently used one at the end

    def find(self, tokens: Sequence[int], sharing: Sharing = Sharing()) -> tuple[Prefix, int] | None:
        """The row with the longest common prefix for these requests, and the prefix's length; one token is always left."""
        prompt = np.asarray(tokens)
        best, most = None, self._shortest - 1
        for entry in self._entries:
            common = min(common_beginning(entry.tokens, prompt), len(prompt) - 1)
            # A row that ended with an end token has read it too: if the common tokens fill the window, the first is
            # gone.
            shorter = not self.whole and (self._window is None or len(entry.tokens) < self._window)
            if (shorter or common == len(entry.tokens)) and common > most and entry.sharing == sharing:
                best, most = entry, common
        if best is None:
            return None
        self._entries.sort(key=lambda entry: entry is best)
        return best, most

    def keep(self, tokens: Sequence[int], row: PyTree, sharing: Sharing = Sharing()) -> None:
        """Stores a row that has read these tokens for these requests; removes entries that are its prefixes."""
        size = tree.byte_count(row)
        if size > self._max_bytes:
            return
        new = np.asarray(tokens)

        def replaced(entry: Prefix) -> bool:
            if entry.sharing != sharing:
                return False
            old = entry.tokens
            shorter = len(old) < len(new) and self._window is None and not self.whole
            return (shorter or len(old) == len(new)) and bool((new[: len(old)] == old).all())

        self._entries = [entry for entry in self._entries if not replaced(entry)]
        self._entries.append(Prefix(new, row, size, sharing))
        while sum(entry.size for entry in self._entries) > self._max_bytes:
            del self._entries[0]

    def clear(self) -> None:
        """Removes everything, since it was read with other parameters."""
        self._entries = []


def common_beginning(first: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """Length of the common prefix of two texts."""
    size = min(len(first), len(other))
    equal = np.asarray(first[:size]) == np.asarray(other[:size])
    return size if equal.all() else int(np.argmin(equal))
