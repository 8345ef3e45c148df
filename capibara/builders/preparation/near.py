"""Near deduplication: MinHash signatures of word n-grams by rensa, and bands of them as keys (locality-sensitive hashing).

A document is compared, by the whole signatures, with the first document that has the same key of a band; similar ones are
joined, also through others, and the first document of each group is kept. The result depends neither on the order in which
pairs are found nor on the number of workers.

MinHash: Broder, "On the resemblance and containment of documents" (1997). The signatures: Dahlgaard, Knudsen and Thorup, "Fast
Similarity Sketching" (https://arxiv.org/abs/1704.04370).
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from capibara.builders.preparation import shingles
from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError

_MOST_PERMUTATIONS = 4096
_CHARACTERS = 1 << 19  # of the texts that are sketched at a time, so that their arrays fit the cache


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    """What counts as a near duplicate.

    Two documents with the Jaccard similarity s of their n-grams share a key with the probability 1 - (1 - s**rows)**bands:
    with the defaults 0.92 for s = 0.8, and 0.05 for s = 0.5.

    Attributes:
      words: words in an n-gram.
      bands: keys of a document.
      rows: permutations of a band.
      similarity: the smallest similarity, as the signatures estimate it, of a document and the earlier one with the same
        key; 0: a shared key is enough.
      seed: of the permutations.
    """

    words: int = 5
    bands: int = 14
    rows: int = 8
    similarity: float = 0.7
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("words", "bands", "rows"):
            if getattr(self, name) < 1:
                raise UserError(f"NearDuplicates.{name} ({getattr(self, name)}) must be at least 1: remove it")
        if self.permutations > _MOST_PERMUTATIONS:
            raise UserError(
                f"NearDuplicates.bands ({self.bands}) times rows ({self.rows}) must be at most {_MOST_PERMUTATIONS}: try 14 and 8"
            )
        if not 0 <= self.similarity <= 1:
            raise UserError(f"NearDuplicates.similarity ({self.similarity}) must be from 0 to 1: try 0.7")
        if not 0 <= self.seed < 1 << 64:
            raise UserError(f"NearDuplicates.seed ({self.seed}) must be from 0 to 2**64 - 1: try 1")

    @property
    def permutations(self) -> int:
        """Permutations of a signature."""
        return self.bands * self.rows


def signatures(texts: Sequence[str], settings: NearDuplicates) -> np.ndarray:
    """The MinHash signatures of texts, [n, permutations] uint32; of a text without words, one that no other has.

    Raises:
      UserError: rensa is not installed.
    """
    order = sorted(range(len(texts)), key=lambda i: not texts[i].isascii())  # those of ASCII are hashed faster
    result, batch, characters = [np.zeros((0, settings.permutations), np.uint32)], [], 0
    for i in order:
        batch.append(texts[i])
        characters += len(texts[i])
        if characters >= _CHARACTERS:
            result.append(_signatures(batch, settings))
            batch, characters = [], 0
    every = np.concatenate([*result, _signatures(batch, settings)] if batch else result)
    in_order = np.empty_like(every)
    in_order[order] = every
    return in_order


def _signatures(texts: Sequence[str], settings: NearDuplicates) -> np.ndarray:
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # the workers are the parallelism
    rensa = extras.require("rensa", extra="builders", why="near deduplication")
    result, offsets = shingles.hashes(texts, settings.words)
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        hashes = [xxhash.xxh3_64_intdigest(texts[i].encode("utf-8", "surrogatepass")) for i in empty.tolist()]
        result = np.insert(result, offsets[empty], np.array(hashes, np.uint64))
        offsets = offsets + np.concatenate([[0], np.cumsum(np.diff(offsets) == 0)])
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        result, offsets.astype(np.uint64), settings.permutations, settings.seed
    )
    packed = struct.Struct(f"={settings.permutations}I")  # faster than arrays of lists
    rows = b"".join([packed.pack(*row) for row in matrix.to_rows()])
    return np.frombuffer(rows, np.uint32).reshape(len(texts), settings.permutations)


def keys(signatures: np.ndarray, settings: NearDuplicates) -> np.ndarray:
    """The key of each band of signatures [n, permutations], [bands, n] uint64."""
    bands = signatures.reshape(len(signatures), settings.bands, settings.rows).astype(np.uint64)
    key = np.broadcast_to(np.arange(settings.bands, dtype=np.uint64), bands.shape[:2])
    for row in range(settings.rows):
        key = shingles.mixed(key ^ bands[:, :, row])
    return np.ascontiguousarray(key.T)


def are_similar(first: np.ndarray, other: np.ndarray, settings: NearDuplicates) -> np.ndarray:
    """Whether the signatures [n, permutations] in the same rows are of near duplicates, [n] bool."""
    return (first == other).sum(axis=1) >= settings.similarity * settings.permutations


class Groups:
    """Documents that are joined, also through others; the first of each group stands for it.

    Attributes:
      parents: [n] integers, in memory or on disk: an earlier document of the same group, or the document itself.
    """

    def __init__(self, parents: np.ndarray):
        self.parents = parents
        parents[:] = np.arange(len(parents), dtype=parents.dtype)

    def join(self, first: np.ndarray, other: np.ndarray) -> None:
        """Joins the documents in the same places of two arrays."""
        while len(first):
            first, other = self.first(first), self.first(other)
            differ = first != other
            later, earlier = np.maximum(first, other)[differ], np.minimum(first, other)[differ]
            np.minimum.at(self.parents, later, earlier)
            first, other = later, earlier

    def first(self, documents: np.ndarray) -> np.ndarray:
        """The first document of each document's group."""
        result = documents
        while not np.array_equal(above := self.parents[result], result):
            result = above
        self.parents[documents] = result
        return result
