"""Decodes a stream of tokens to text: whole characters only, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from capibara.data.tokenizers.vocabulary import Vocabulary


class TextStream:
    """Incremental decoding: the pieces concatenate to what `Vocabulary.decode` returns for all tokens.

    A character may take several tokens (an emoji in a byte-level vocabulary takes four): it is emitted with the last
    one. Text that may be the beginning of a stop string is held back until that is decided.

    Args:
      vocabulary: of the tokens.
      stop: strings that end the text.
      names: spellings of tokens that have no text but are shown.

    Attributes:
      stopped: whether a stop string occurred; the text ends before it.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = (), names: Mapping[int, bytes] | None = None):
        self._vocabulary, self._stop, self._names = vocabulary, tuple(stop), names or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        spelled = self._names.get(token)
        return self._take(self._decoder.decode(self._vocabulary.bytes_of([token]) if spelled is None else spelled))

    def close(self) -> str:
        """The rest of the text after the last token; an incomplete character becomes U+FFFD."""
        text = self._take(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _take(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [start for start in (text.find(stop) for stop in self._stop) if start >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_stop_prefix_length(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _stop_prefix_length(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a prefix of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
