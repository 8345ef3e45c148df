"""Hashes of the word n-grams of many texts at once, by arrays: the sets that MinHash compares.

A word is a run of letters, digits, marks and underscores, in lower case. In scripts without spaces (Chinese, Japanese, Thai,
Lao, Burmese, Khmer, Tibetan) each character is a word. Everything else separates words.
"""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

_SEPARATOR, _LETTER, _ALONE = 0, 1, 2  # classes of characters; _ALONE: a word of its own
_WITHOUT_SPACES = (
    (0x0E00, 0x0F00), (0x0F00, 0x10A0), (0x1780, 0x1800), (0x2E80, 0xA000), (0xF900, 0xFB00), (0x20000, 0x40000),
)  # fmt: skip
_CHARACTERS = 1 << 17  # hashed at a time, so that the arrays fit the cache
_OF_CHARACTER, _OF_WORD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd, so they have an inverse modulo 2 ** 64


def hashes(texts: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The n-grams of texts; a text with fewer words has one, of all its words.

    Args:
      texts: the texts.
      size: words in an n-gram.

    Returns:
      [m] uint64, a hash of each n-gram, text after text, in their order and with repetitions; and [n + 1] int64, where
      those of each text begin. A text without words has none.
    """
    words, counts = _words(texts)
    starts = np.cumsum(counts) - counts
    kept = np.where(counts > 0, np.maximum(counts - size + 1, 1), 0)
    offsets = np.concatenate([[0], np.cumsum(kept)])
    factors = [np.uint64(pow(_OF_WORD, at + 1, 1 << 64)) for at in range(size)]
    windows = max(0, len(words) - size + 1)  # of all texts together, those between two texts included
    every = np.zeros(windows, np.uint64)
    for at, factor in enumerate(factors):
        every += words[at : at + windows] * factor
    found = np.empty(offsets[-1], np.uint64)
    # The windows of a text are consecutive: a text's first one, then one a word.
    is_whole = counts >= size
    within = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], kept)
    of_whole = np.repeat(is_whole, kept)
    found[of_whole] = every[within[of_whole]]
    short = np.flatnonzero((counts > 0) & ~is_whole)
    for at, factor in enumerate(factors):
        longer = short[counts[short] > at]
        previous = found[offsets[longer]] if at else np.uint64(0)
        found[offsets[longer]] = previous + words[starts[longer] + at] * factor
    return mixed(found), offsets


def mixed(values: np.ndarray) -> np.ndarray:
    """A permutation of uint64 that spreads every bit over all bits (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """[w] uint64, a hash of each word, and [n] int64, the number of words of each text."""
    lower = [text if text.isascii() else text.lower() for text in texts]  # those of ASCII by their values
    of_texts: list[np.ndarray] = [np.zeros(0, np.uint64)] * len(texts)
    # Those of ASCII are hashed faster, so they are apart.
    for is_ascii in (True, False):
        for batch in _batches([i for i, text in enumerate(lower) if text.isascii() is is_ascii], lower):
            words, counts = _words_of([lower[i] for i in batch])
            for i, found in zip(batch, np.split(words, np.cumsum(counts)[:-1]), strict=True):
                of_texts[i] = found
    counts = np.array([len(found) for found in of_texts], np.int64)
    return np.concatenate([*of_texts, np.zeros(0, np.uint64)]), counts


def _batches(numbers: Sequence[int], texts: Sequence[str]) -> Iterator[list[int]]:
    """The numbers of texts that are hashed together; a long one is alone, so that it is cut the same with any others."""
    batch: list[int] = []
    size = 0
    for number in numbers:
        if batch and size + len(texts[number]) > _CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += len(texts[number]) + 1
    if batch:
        yield batch


def _words_of(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    classes, values = _codes("\n".join(texts))
    stops = np.cumsum([len(text) + 1 for text in texts])
    words, begins, at = [], [], 0
    while at < len(classes):
        stop = _cut(classes, at)
        found, starts = _hashed(classes[at:stop], values[at:stop])
        words.append(found)
        begins.append(starts + at)
        at = stop
    if not words:
        return np.zeros(0, np.uint64), np.zeros(len(texts), np.int64)
    counts = np.diff(np.searchsorted(np.concatenate(begins), stops), prepend=0)
    return np.concatenate(words), counts


def _codes(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The classes of a text's characters, and their values: uint64, 0 for those that separate words."""
    if text.isascii():
        content = text.encode("ascii")
        classes, values = _ascii()
        return np.frombuffer(content.translate(classes), np.uint8), values[np.frombuffer(content, np.uint8)]
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    classes_of_all = _all_classes()[codes]
    return classes_of_all, (codes.astype(np.uint64) + np.uint64(1)) * (classes_of_all != _SEPARATOR)


def _cut(classes: np.ndarray, at: int) -> int:
    """Where the characters that are hashed together end: between words, unless one is as long as all of them."""
    stop = at + _CHARACTERS
    if stop >= len(classes):
        return len(classes)
    apart = np.flatnonzero(classes[at:stop] != _LETTER)
    return at + int(apart[-1]) + 1 if len(apart) else stop


def _hashed(classes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A hash of each word, and where it begins."""
    begins = classes != _SEPARATOR
    if (classes == _ALONE).any():
        is_alone = classes == _ALONE
        begins[1:] &= (classes[:-1] == _SEPARATOR) | is_alone[1:] | is_alone[:-1]
    else:
        begins[1:] &= classes[:-1] == _SEPARATOR
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.zeros(0, np.uint64), starts
    powers, inverses = _powers()
    # A polynomial of the word's characters; separators add nothing to the word before them.
    sums = np.cumsum(values * powers[: len(values)])
    return mixed(np.diff(sums[np.append(starts[1:], len(sums)) - 1], prepend=np.uint64(0)) * inverses[starts]), starts


@functools.cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """[_CHARACTERS] uint64: the powers of _OF_CHARACTER and of its inverse, modulo 2 ** 64."""
    bases = (_OF_CHARACTER, pow(_OF_CHARACTER, -1, 1 << 64))
    found = []
    for base in bases:
        steps = np.full(_CHARACTERS, base, np.uint64)
        steps[0] = 1
        found.append(np.multiply.accumulate(steps))
    return found[0], found[1]


@functools.cache
def _ascii() -> tuple[bytes, np.ndarray]:
    """The class of each byte, for bytes.translate, and the value of its letter in lower case."""
    classes = bytes(_LETTER if i < 128 and (chr(i).isalnum() or chr(i) == "_") else _SEPARATOR for i in range(256))
    values = np.array([ord(chr(i).lower()) + 1 if classes[i] else 0 for i in range(256)], np.uint64)
    return classes, values


@functools.cache
def _all_classes() -> np.ndarray:
    """[0x110000] uint8: the class of every code point."""
    kinds = map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))
    letters = [kind[0] in "LNM" for kind in kinds]
    found = np.array(letters, np.uint8)
    for first, last in _WITHOUT_SPACES:
        found[first:last] *= np.uint8(_ALONE)
    found[ord("_")] = _LETTER
    return found
