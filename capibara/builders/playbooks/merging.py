"""Merges equal and similar bullets of a domain; their votes add up.

Two bullets are similar if they share most words and pairs of words, and say the same of everything that is no plain word:
negations, numbers, names of code, operators. "Use 3 retries" and "Use 5 retries" are two pieces of advice, and so are "Use X"
and "Do not use X".

A bullet is compared with better ones, and is merged into the most similar of them, which keeps its text. MinHash (see
capibara.builders.preparation.near) finds the candidates, so that the time does not grow with the square of the bullets.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from capibara.builders.playbooks.bullets import unnumbered
from capibara.builders.preparation import near, shingles
from capibara.config import configurable
from capibara.core.types import UserError

# Keys of words: of texts that share 0.8 of them, 1 pair in 30,000 has no common key; of those that share 0.6, 1 in 16.
_KEYS = near.NearDuplicates(words=1, bands=20, rows=4, similarity=0.0)
_AT_ONCE = 10_000  # texts whose signatures are in memory
_ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
_NEGATIONS = frozenset(
    "not no never none nor neither cannot without avoid don't doesn't didn't isn't aren't wasn't weren't can't couldn't won't "
    "wouldn't shouldn't mustn't needn't unless except instead only".split()
)
_AROUND = ".,;:!?\"'()*_`“”‘’…"  # of a word in prose
_PLAIN = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BulletMerging:
    """What counts as similar.

    Attributes:
      similarity: the smallest part of their words and pairs of words that two bullets share (Jaccard), from 0.6 to 1; 1: only
        equal ones are merged.
    """

    similarity: float = 0.8

    def __post_init__(self) -> None:
        if not 0.6 <= self.similarity <= 1:
            raise UserError(f"BulletMerging.similarity ({self.similarity}) must be from 0.6 to 1: try 0.8")


def leaders(contents: Sequence[str], settings: BulletMerging) -> np.ndarray:
    """The bullet that each bullet is merged into, [n] int64: an earlier one, or itself.

    Args:
      contents: the texts, the best first.
      settings: what counts as similar.

    Raises:
      UserError: rensa is not installed.
    """
    texts = [_ARTICLES.sub(" ", unnumbered(content)) for content in contents]
    result = np.arange(len(texts))
    keys, is_shared = _keys(texts)
    by_key: dict[int, list[int]] = collections.defaultdict(list)  # leaders
    sets: dict[int, frozenset[int]] = {}  # of leaders
    candidates = np.flatnonzero(is_shared.any(axis=0)).tolist()
    for start in range(0, len(candidates), _AT_ONCE):
        batch = candidates[start : start + _AT_ONCE]
        for i, features in zip(batch, _sets([texts[i] for i in batch])):
            buckets = [by_key[key] for key in keys[is_shared[:, i], i].tolist()]
            scores = {leader: _jaccard(features, sets[leader]) for bucket in buckets for leader in bucket}
            leader = min(scores, key=lambda item: (-scores[item], item), default=i)
            if scores.get(leader, 0.0) >= settings.similarity:
                result[i] = leader
            else:
                sets[i] = features
                for bucket in buckets:
                    bucket.append(i)
    return result


def _keys(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The key of each band of each text, [bands, n] uint64, and whether another text has it, [bands, n] bool.

    Texts whose guards differ have no key in common.
    """
    numbers: dict[str, int] = {}
    guards = np.array([numbers.setdefault(_guard(text), len(numbers)) for text in texts], np.uint64)
    parts = [
        near.keys(near.signatures(texts[start : start + _AT_ONCE], _KEYS), _KEYS)
        for start in range(0, len(texts), _AT_ONCE)
    ]
    keys = np.concatenate(parts or [np.zeros((_KEYS.bands, 0), np.uint64)], axis=1)
    keys = shingles.mixed(keys ^ shingles.mixed(guards + np.uint64(1)))
    is_shared = np.zeros(keys.shape, bool)
    for band, band_keys in enumerate(keys):
        _, inverse, counts = np.unique(band_keys, return_inverse=True, return_counts=True)
        is_shared[band] = counts[inverse] > 1
    return keys, is_shared


def _sets(texts: Sequence[str]) -> list[frozenset[int]]:
    """The hashes of the words and of the pairs of words of each text."""
    (words, ends), (pairs, pair_ends) = shingles.hashes(texts, 1), shingles.hashes(texts, 2)
    return [
        frozenset((*words[ends[i] : ends[i + 1]].tolist(), *pairs[pair_ends[i] : pair_ends[i + 1]].tolist()))
        for i in range(len(texts))
    ]


def _jaccard(first: frozenset[int], other: frozenset[int]) -> float:
    if not first and not other:  # no words: a key in common means equal texts
        return 1.0
    shared = len(first & other)
    return shared / (len(first) + len(other) - shared)


def _guard(text: str) -> str:
    """What must be equal: negations, numbers, names of code, operators."""
    retained = set()
    for word in text.replace("’", "'").split():
        bare = word.strip(_AROUND)
        if bare.lower() in _NEGATIONS:
            retained.add(bare.lower())
        elif bare and not _PLAIN.fullmatch(bare):
            retained.add(bare)
    return " ".join(sorted(retained))
