"""Hashes of the word n-grams of many texts at once, by arrays: the sets that MinHash compares.

A word is a run of letters, digits, marks and underscores, in lower case. In scripts without spaces (Chinese, Japanese, Thai,
Lao, Burmese, Khmer, Tibetan) each character is a word. Everything else separates words.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_SEPARATOR, _LETTER, _ALONE, _UNKNOWN = 0, 1, 2, 3  # classes of characters; _ALONE: a word of its own
_WITHOUT_SPACES = (
    (0x0E00, 0x0F00), (0x0F00, 0x10A0), (0x1780, 0x1800), (0x2E80, 0xA000), (0xF900, 0xFB00), (0x20000, 0x40000),
)  # fmt: skip
_CHARACTERS = 1 << 17  # hashed at a time, so that the arrays fit the cache
_OF_CHARACTER, _OF_WORD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd, so they have an inverse modulo 2 ** 64


def hashes(texts: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The n-grams of texts; a text with fewer words has one, of all its words.

    It is fastest where the texts of ASCII follow each other.

    Args:
      texts: the texts.
      size: words in an n-gram.

    Returns:
      [m] uint64, a hash of each n-gram, text after text, in their order and with repetitions; and [n + 1] int64, where
      those of each text begin. A text without words has none.
    """
    words, counts = _words(texts)
    stops = np.cumsum(counts)
    counts_of_shingles = np.maximum(counts - size + 1, 0)  # n-grams of `size` words
    factors = [np.uint64(pow(_OF_WORD, at + 1, 1 << 64)) for at in range(size)]
    windows = max(0, len(words) - size + 1)
    every, term = np.zeros(windows, np.uint64), np.empty(windows, np.uint64)
    for at, factor in enumerate(factors):
        every += np.multiply(words[at : at + windows], factor, out=term)
    is_inside = np.ones(len(words), bool)
    for after in range(1, size):  # windows that begin in the last words of a text end in the next one
        is_inside[stops[counts >= after] - after] = False
    result = every[is_inside[:windows]]
    if len(short := np.flatnonzero((counts > 0) & (counts < size))):
        of_short = np.zeros(len(short), np.uint64)
        for at, factor in enumerate(factors):
            longer = np.flatnonzero(counts[short] > at)
            of_short[longer] += words[(stops - counts)[short[longer]] + at] * factor
        result = np.insert(result, (np.cumsum(counts_of_shingles) - counts_of_shingles)[short], of_short)
    offsets = np.concatenate([[0], np.cumsum(np.where(counts > 0, np.maximum(counts_of_shingles, 1), 0))])
    return mixed(result), offsets


def mixed(values: np.ndarray) -> np.ndarray:
    """A permutation of uint64 that spreads every bit over all bits (the finaliser of SplitMix64)."""
    shifted = values >> np.uint64(30)
    result = values ^ shifted
    for factor, shift in ((0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
        result *= np.uint64(factor)
        result ^= np.right_shift(result, np.uint64(shift), out=shifted)
    return result


def _words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """[w] uint64, a hash of each word, and [n] int64, the number of words of each text."""
    words, counts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for is_ascii, alike in itertools.groupby(texts, str.isascii):
        for batch in _batches(alike if is_ascii else map(str.lower, alike)):  # ASCII is made lower in _codes
            of_batch, counts_of_batch = _words_of(batch)
            words.append(of_batch)
            counts.append(counts_of_batch)
    return np.concatenate(words), np.concatenate(counts)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts that are hashed together; a long one is alone, so that it is cut the same with any others."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text) + 1
    if batch:
        yield batch


def _words_of(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    values, is_alone = _codes("\n".join(texts))
    stops = np.cumsum([len(text) + 1 for text in texts])
    words, begins, at = [], [], 0
    while at < len(values):
        stop = _cut(values, is_alone, at)
        result, starts = _hashed(values[at:stop], None if is_alone is None else is_alone[at:stop])
        words.append(result)
        begins.append(starts + at)
        at = stop
    if not words:
        return np.zeros(0, np.uint64), np.zeros(len(texts), np.int64)
    counts = np.diff(np.searchsorted(np.concatenate(begins), stops), prepend=0)
    return np.concatenate(words), counts


def _codes(text: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The values of a text's characters, 0 for those that separate words, and which are words of their own (None: none)."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii").translate(_ascii()), np.uint8), None
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    classes = _classes(codes)
    is_alone = classes == _ALONE
    return (codes + np.uint32(1)) * (classes != _SEPARATOR), is_alone if is_alone.any() else None


def _cut(values: np.ndarray, is_alone: np.ndarray | None, at: int) -> int:
    """Where the characters that are hashed together end: between words, unless one is as long as all of them."""
    stop = at + _CHARACTERS
    if stop >= len(values):
        return len(values)
    is_apart = values[at:stop] == 0
    if is_alone is not None:
        is_apart |= is_alone[at:stop]
    separators = np.flatnonzero(is_apart)
    return at + int(separators[-1]) + 1 if len(separators) else stop


def _hashed(values: np.ndarray, is_alone: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """A hash of each word, and where it begins."""
    is_word = values != 0
    begins = is_word.copy()
    if is_alone is None:
        begins[1:] &= ~is_word[:-1]
    else:
        begins[1:] &= ~is_word[:-1] | is_alone[1:] | is_alone[:-1]
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.zeros(0, np.uint64), starts
    powers, inverses = _powers()
    # A polynomial of the word's characters; separators add nothing to the word before them.
    sums = np.multiply(values, powers[: len(values)])
    np.cumsum(sums, out=sums)
    result = np.diff(sums[np.append(starts[1:], len(sums)) - 1], prepend=np.uint64(0))
    result *= inverses[starts]
    return mixed(result), starts


@functools.cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """[_CHARACTERS] uint64: the powers of _OF_CHARACTER and of its inverse, modulo 2 ** 64."""
    bases = (_OF_CHARACTER, pow(_OF_CHARACTER, -1, 1 << 64))
    result = []
    for base in bases:
        steps = np.full(_CHARACTERS, base, np.uint64)
        steps[0] = 1
        result.append(np.multiply.accumulate(steps))
    return result[0], result[1]


@functools.cache
def _ascii() -> bytes:
    """The value of each byte, for bytes.translate: that of its letter in lower case, 0 for those that separate words."""
    return bytes(
        ord(chr(i).lower()) + 1 if i < 128 and (chr(i).isalnum() or chr(i) == "_") else _SEPARATOR for i in range(256)
    )


def _classes(codes: np.ndarray) -> np.ndarray:
    """[n] uint8: the class of each code point."""
    known = _known_classes()
    result = known[codes]
    if (result == _UNKNOWN).any():
        for code in np.unique(codes[result == _UNKNOWN]).tolist():
            known[code] = _class(code)
        result = known[codes]
    return result


@functools.cache
def _known_classes() -> np.ndarray:
    """[0x110000] uint8: the classes of the code points that were seen; all of them would take long to find."""
    return np.full(0x110000, _UNKNOWN, np.uint8)


def _class(code: int) -> int:
    if unicodedata.category(chr(code))[0] not in "LNM" and code != ord("_"):
        return _SEPARATOR
    return _ALONE if any(first <= code < last for first, last in _WITHOUT_SPACES) else _LETTER
