"""Tokens to text, one at a time: the pieces of a stream join to the text of all its tokens.

A library decodes whole lists of tokens, and the text of some tokens depends on their neighbours: whether a token is the
first or the last one, on the token before it, or on all bytes of a character. `WindowStream` therefore has the library
decode a window of the last tokens, and returns only what no later token can change.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

_PARTIAL = "\ufffd"  # what an incomplete character is decoded to
_LONGEST, _SHORTEST = 32, 8  # tokens in a window before and after it is shortened
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
_OF_BYTE_PIECES = frozenset("<0x>123456789abcdefABCDEF")


class TokenStream(Protocol):
    """Decodes tokens one by one; its results join to the decoded text of all of them."""

    def feed(self, token: int) -> str:
        """The text that is certain with this token."""

    def close(self) -> str:
        """The rest of the text, as if no token followed; further tokens continue the text after it."""


class ByteStream:
    """The stream of a vocabulary whose text is its tokens' bytes in UTF-8.

    Args:
      bytes_of: the bytes of tokens.
    """

    def __init__(self, bytes_of: Callable[[Iterable[int]], bytes]):
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of([token]))

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class Lookahead(NamedTuple):
    """What the text of tokens depends on besides the tokens before them.

    Attributes:
      runs: ids whose text is certain at the end of a run of such ids: the bytes of characters.
      partial: whether a last U+FFFD may be an incomplete character.
      whole: whether any later token may change the text.
    """

    runs: Container[int]
    partial: bool = False
    whole: bool = False


class WindowStream:
    """The stream of a vocabulary whose library decodes lists of tokens.

    Args:
      decode: the text of tokens.
      is_decoded: whether `decode` does not leave a token out.
      lookahead: what the text depends on.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], is_decoded: Callable[[int], bool], lookahead: Lookahead):
        self._decode, self._is_decoded, self._lookahead = decode, is_decoded, lookahead
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text

    def feed(self, token: int) -> str:
        if not self._is_decoded(token):
            return ""
        self._window.append(token)
        if self._lookahead.whole or token in self._lookahead.runs:
            return ""
        text = self._decode(self._window)
        is_partial = self._lookahead.partial and text.endswith(_PARTIAL)
        new = self._new(text, len(text) - is_partial)
        if len(self._window) > _LONGEST and not is_partial:
            self._shorten()
        return new

    def close(self) -> str:
        text = self._decode(self._window) if self._window else ""
        return self._new(text, len(text))

    def _new(self, text: str, end: int) -> str:
        new, self._returned = text[self._returned : end], max(end, self._returned)
        return new

    def _shorten(self) -> None:
        """Drops old tokens, unless the rest would be decoded as the beginning of a text."""
        window = self._window[-_SHORTEST:]
        if text := self._decode(window):
            self._window, self._returned = window, len(text)


def steps_of(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a tokenizer.json's decoder, in order, without sequences."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from steps_of(step)
    else:
        yield decoder


def is_byte_level(decoder: Mapping[str, object] | None) -> bool:
    """Whether the text of a tokenizer.json's tokens is their bytes in UTF-8, and nothing else."""
    return [step["type"] for step in steps_of(decoder)] == ["ByteLevel"]


def lookahead_of(decoder: Mapping[str, object] | None, vocab: Mapping[str, int]) -> Lookahead:
    """What the text of a tokenizer.json's tokens depends on.

    Args:
      decoder: of the tokenizer.json.
      vocab: token -> id.
    """
    runs: Container[int] = ()
    is_joined = is_partial = False  # whether the steps so far have made one text of the tokens
    before: list[Mapping[str, Any]] = []
    for step in steps_of(decoder):
        kind = step["type"]
        if is_joined and not _is_local(step):
            return Lookahead((), whole=True)
        if kind == "ByteFallback":
            if any(_makes_byte_pieces(item) for item in before):
                return Lookahead((), whole=True)
            runs = frozenset(i for token, i in vocab.items() if _BYTE_PIECE.fullmatch(token))
        is_partial |= kind == "ByteLevel"
        is_joined |= kind in ("ByteLevel", "Fuse")
        before.append(step)
    return Lookahead(runs, is_partial)


def _is_local(step: Mapping[str, Any]) -> bool:
    """Whether a step changes a joined text only at its beginning, at its end, or character by character."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] in ("Fuse", "Strip")


def _makes_byte_pieces(step: Mapping[str, Any]) -> bool:
    """Whether a step may change which tokens are bytes."""
    if step["type"] == "Replace":
        return not _OF_BYTE_PIECES.isdisjoint(step["pattern"].get("String", "<") + step["content"])
    if step["type"] == "Strip":
        return step["content"] in _OF_BYTE_PIECES
    return step["type"] not in ("Fuse", "Metaspace", "ByteFallback")


def token_bytes(token: str, decoder: Mapping[str, object] | None, *, byte_level: bool) -> bytes:
    """The bytes of one token inside a text.

    Args:
      token: of the vocabulary, as tokenizer.json spells it.
      decoder: of the tokenizer.json.
      byte_level: whether the vocabulary consists of bytes in GPT-2's alphabet.
    """
    if byte_level:
        known = [_BYTE_OF_CHARACTER.get(character) for character in token]
        return bytes(byte for byte in known if byte is not None) if None not in known else token.encode()
    for step in steps_of(decoder):
        match step["type"]:
            case "ByteFallback" if _BYTE_PIECE.fullmatch(token):
                return bytes([int(token[3:5], 16)])
            case "Metaspace":
                token = token.replace(step["replacement"], " ")
            case "Replace" if "String" in step["pattern"]:
                token = token.replace(step["pattern"]["String"], step["content"])
            case "WordPiece":
                token = token.removeprefix(step["prefix"])
            case "BPEDecoder":
                token = token.replace(step["suffix"], " ")
            case "CTC":
                token = token.replace(step["pad_token"], "").replace(step["word_delimiter_token"], " ")
    return token.encode()


def byte_piece(piece: str) -> int | None:
    """The byte that a piece such as <0x0A> stands for; None: it is another piece."""
    return int(piece[3:5], 16) if _BYTE_PIECE.fullmatch(piece) else None


def _byte_of_character() -> dict[str, int]:
    # GPT-2's byte-level alphabet: printable Latin-1 is itself, the other bytes are U+0100 and up, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
