"""Searches an index."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.builders.files import fingerprints
from capibara.builders.files.manifest import read_manifest
from capibara.core import limits
from capibara.core.types import UserError
from capibara.inference.engine.reading import Pooling
from capibara.retrieval import build, quantizers
from capibara.retrieval.embedding import TextEmbedder
from capibara.retrieval.quantizers import Codes, Quantizer

if TYPE_CHECKING:
    import faiss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """A chunk that a search has returned.

    Attributes:
      chunk: its number in the index.
      score: the inner product of its vector, as the index stores it, and the query's.
      path: the file of its document.
      document: the number of the document in the file, from 1.
      start, end: where the chunk is in the document, in characters.
      text: the chunk.
    """

    chunk: int
    score: float
    path: str
    document: int
    start: int
    end: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexFolder:
    """A folder of `capibara prepare index`, with files that are whole.

    Attributes:
      path: the folder.
      record: its index.json.
      fingerprint: of its files.
    """

    path: str
    record: Mapping[str, Any]
    fingerprint: str

    @classmethod
    def open(cls, path: str) -> IndexFolder:
        """Opens a folder.

        Raises:
          UserError: it is none, or a file of it is missing or has changed.
        """
        if not os.path.isdir(path):
            raise UserError(f"the index {path} is no folder: name one that `capibara prepare index` wrote")
        manifest = read_manifest(path)
        if manifest.kind != build.KIND:
            raise UserError(
                f"{path} holds {limits.shortened(manifest.kind)}, no index: name one of `capibara prepare index`"
            )
        for file in manifest.files:
            name = limits.inside(path, file.name, "the manifest")
            if not os.path.exists(name):
                raise UserError(f"{name} is missing: build the index again")
            if os.path.getsize(name) != file.bytes or fingerprints.hash_file(name).sha256 != file.sha256:
                raise UserError(f"{name} has changed since it was built: build the index again")
        try:
            record = limits.read_json(os.path.join(path, build.RECORD))
        except FileNotFoundError:
            raise UserError(f"{path} has no {build.RECORD}: build the index again") from None
        return cls(path=path, record=record, fingerprint=manifest.fingerprint)

    @property
    def model(self) -> str:
        """The path of the model that has embedded the chunks."""
        return str(self.record["model"]["path"])

    @property
    def pooling(self) -> Pooling:
        """Which hidden states are an embedding."""
        return Pooling(self.record["model"]["pooling"])


class Index:
    """An index that is ready to be searched; thread-safe.

    Args:
      folder: of the index.
      embedder: of the model that has embedded its chunks.

    Raises:
      UserError: the model is another one, or faiss is missing.
    """

    def __init__(self, folder: IndexFolder, embedder: TextEmbedder):
        library = quantizers.library()
        self.folder, self._embedder, self._lock = folder, embedder, threading.Lock()
        for name, value in embedder.identity.items():
            if (built := folder.record["model"][name]) != value:
                raise UserError(
                    f"{embedder.path} is another model than {folder.path} was built with, {folder.model}: its {name} differ "
                    f"({limits.shortened(value, 40)}, not {limits.shortened(built, 40)}); name that model, or build the index again"
                )
        self._index: faiss.Index = library.read_index(os.path.join(folder.path, build.INDEX))
        center = limits.read(os.path.join(folder.path, build.CENTER))
        self._center_D = np.frombuffer(center, "<f4")
        self._lines = limits.read(os.path.join(folder.path, build.CHUNKS), most=1 << 40).splitlines()
        dims, count = folder.record["dims"], folder.record["chunks"]
        if (self._index.d, self._index.ntotal, len(self._lines), len(self._center_D)) != (dims, count, count, dims):
            raise UserError(
                f"{folder.path} has {self._index.ntotal} vectors of {self._index.d} and {len(self._lines)} chunks, must have "
                f"{count} of {dims}: build the index again"
            )
        chosen = folder.record["chosen"]
        refined = chosen["refined"]
        self._quantizer = Quantizer(
            codes=Codes(chosen["codes"]),
            pq_bytes=chosen["pq_bytes"],
            opq=chosen["opq"],
            reduced=chosen["reduced"],
            lists=chosen["lists"],
            refined=None if refined is None else Codes(refined),
        )
        self._quantizer.searched(self._index, chosen["effort"])

    def __len__(self) -> int:
        return len(self._lines)

    def search(self, query: str, k: int = 4) -> list[Hit]:
        """The chunks whose embeddings are nearest to a query's, the nearest first; fewer than `k` if there are no more."""
        return self.search_many([query], k)[0]

    def search_many(self, queries: Sequence[str], k: int = 4) -> list[list[Hit]]:
        """`search` of several queries at once.

        Raises:
          UserError: k is below 1, a query is empty, or has more tokens than the model reads.
        """
        if type(k) is not int or k < 1:
            raise UserError(f"k is {k!r}, must be a number of at least 1: try 4")
        if not queries:
            return []
        if any(not query.strip() for query in queries):
            raise UserError("a query is empty: give a text to search for")
        vectors_QD = build.centered(self._embedder(queries), self._center_D)
        with self._lock:
            scores_QK, indices_QK = self._quantizer.nearest(self._index, vectors_QD, min(k, len(self)))
        return [
            [self.chunk(index, score) for index, score in zip(indices, scores) if index >= 0]
            for indices, scores in zip(indices_QK.tolist(), scores_QK.tolist())
        ]

    def chunk(self, number: int, score: float = 1.0) -> Hit:
        """A chunk by its number."""
        return Hit(chunk=number, score=score, **json.loads(self._lines[number]))
