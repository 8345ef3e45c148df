"""Decodes a stream of tokens to text: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capibara.data.tokenizers.vocabulary import Vocabulary


class TextStream:
    """Incremental decoding: the pieces concatenate to what `Vocabulary.decode` returns for all tokens.

    A character may take several tokens (an emoji in a byte-level vocabulary takes four): it is emitted with the last
    one. Text that may be the beginning of a stop string is held back until that is decided. Stop strings also match
    special tokens as the tokenizer spells them ("<|im_end|>"), which are no part of the text.

    Args:
      vocabulary: of the tokens.
      stop: strings that end the text.
      include_stop: whether the text contains the one that ended it.
      names: spellings of tokens that have no text but are shown.

    Attributes:
      stopped: whether a stop string occurred; the text ends there.
      stop: that string; None: none occurred.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        names: Mapping[int, str] | None = None,
        include_stop: bool = False,
    ):
        self._vocabulary, self._stop, self._names = vocabulary, tuple(stop), names or {}
        self._include_stop = include_stop
        self._stream = vocabulary.stream()
        self._held = ""
        self._hidden: set[int] = set()  # indices in what is held of the characters of special tokens
        self.stopped = False
        self.stop: str | None = None

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        if (name := self._names.get(token)) is not None:
            return self._take(self._stream.close() + name)
        if self._stop and (special := self._vocabulary.spelling(token)):
            return self._take(self._stream.close(), special)
        return self._take(self._stream.feed(token))

    def close(self) -> str:
        """The rest of the text after the last token; an incomplete character becomes U+FFFD."""
        text = self._take(self._stream.close())
        return text if self.stopped else text + self._release(len(self._held))

    def _take(self, new: str, special: str = "") -> str:
        """Adds text, and the spelling of a special token after it; returns what no stop string can begin in."""
        if self.stopped:
            return ""
        start = len(self._held) + len(new)
        self._held += new + special
        self._hidden.update(range(start, start + len(special)))
        result = [(start, stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if result:
            self.stopped, (start, self.stop) = True, min(result)
            text, self._held = self._release(start + len(self.stop) * self._include_stop), ""
            return text
        keep = max((_stop_prefix_length(self._held, stop) for stop in self._stop), default=0)
        return self._release(len(self._held) - keep)

    def _release(self, count: int) -> str:
        """Takes the first characters of what is held; returns those of the text."""
        text = self._held[:count]
        if self._hidden:
            text = "".join(character for index, character in enumerate(text) if index not in self._hidden)
            self._hidden = {index - count for index in self._hidden if index >= count}
        self._held = self._held[count:]
        return text


def _stop_prefix_length(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a prefix of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
