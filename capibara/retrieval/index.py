"""Searches an index."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from capibara.builders.files import fingerprints
from capibara.builders.files.manifest import Manifest, read_manifest
from capibara.core import limits
from capibara.core.types import UserError
from capibara.inference.engine.reading import Pooling
from capibara.retrieval import build, faiss_file, quantizers
from capibara.retrieval.chunking import Chunk
from capibara.retrieval.embedding import TextEmbedder

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
      model: the path of the model that has embedded the chunks.
      pooling: which hidden states are an embedding.
      identity: what decides the embeddings (`TextEmbedder.identity`).
      chunks: how many there are.
      dims: of a vector.
      effort: how much of the index a search reads (`Quantizer.searched`).
      fingerprint: of its files.
    """

    path: str
    model: str
    pooling: Pooling
    identity: Mapping[str, str]
    chunks: int
    dims: int
    effort: int
    fingerprint: str

    @classmethod
    def open(cls, path: str) -> IndexFolder:
        """Opens a folder.

        Raises:
          UserError: it is none, or a file of it is missing, has changed or leads out of it.
        """
        if not os.path.isdir(path):
            raise UserError(f"the index {path} is no folder: name one that `capibara prepare index` wrote")
        manifest = read_manifest(path)
        if manifest.kind != build.KIND:
            raise UserError(
                f"{path} holds {limits.shortened(manifest.kind)}, no index: name one of `capibara prepare index`"
            )
        _check_files(path, manifest)
        name = os.path.join(path, build.RECORD)
        record = limits.read_json(name)
        try:
            model, chosen = record["model"], record["chosen"]
            result = cls(
                path=path,
                model=model["path"],
                pooling=Pooling(model["pooling"]),
                identity={key: model[key] for key in ("weights", "tokenizer", "pooling")},
                chunks=record["chunks"],
                dims=record["dims"],
                effort=chosen["effort"],
                fingerprint=manifest.fingerprint,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{name} does not describe an index ({limits.cause(error)}): build the index again"
            ) from None
        numbers = (result.chunks, result.dims, result.effort)
        if not isinstance(result.model, str) or any(type(number) is not int or number < 1 for number in numbers):
            raise UserError(
                f"{name} has {limits.shortened(numbers)} as chunks, dims and effort of {limits.shortened(result.model)}, must be "
                "numbers of at least 1 and a path: build the index again"
            )
        return result


def _check_files(path: str, manifest: Manifest) -> None:
    """Raises UserError unless all files that a manifest lists are whole, and those that are read are listed."""
    for file in manifest.files:
        name = limits.inside(path, file.name, "the manifest", links=False)
        try:
            is_whole = limits.check_file(name) == file.bytes and fingerprints.hash_file(name).sha256 == file.sha256
        except FileNotFoundError:
            raise UserError(f"{name} is missing: build the index again") from None
        if not is_whole:
            raise UserError(f"{name} has changed since it was built: build the index again")
    listed = {file.name for file in manifest.files}
    if unlisted := {build.INDEX, build.CHUNKS, build.CENTER, build.RECORD} - listed:
        raise UserError(f"the manifest of {path} does not list {', '.join(sorted(unlisted))}: build the index again")


class Index:
    """An index that is ready to be searched; thread-safe.

    Args:
      folder: of the index.
      embedder: of the model that has embedded its chunks.

    Raises:
      UserError: the model is another one, a file is no part of an index, or faiss is missing.
    """

    def __init__(self, folder: IndexFolder, embedder: TextEmbedder):
        library = quantizers.library()
        self.folder, self._embedder, self._lock = folder, embedder, threading.Lock()
        for name, value in embedder.identity.items():
            if (built := folder.identity[name]) != value:
                raise UserError(
                    f"{embedder.path} is another model than {folder.path} was built with, {folder.model}: its {name} differ "
                    f"({limits.shortened(value, 40)}, not {limits.shortened(built, 40)}); name that model, or build the index again"
                )
        self._center_D = _center(folder)
        self._lines = limits.read(os.path.join(folder.path, build.CHUNKS), most=1 << 40).splitlines()
        if len(self._lines) != folder.chunks:
            raise UserError(
                f"{folder.path} has {len(self._lines):,} chunks, must have {folder.chunks:,}: build the index again"
            )
        name = os.path.join(folder.path, build.INDEX)
        try:
            self._quantizer = faiss_file.quantizer_of(np.memmap(name, np.uint8, "r"), folder.chunks, folder.dims)
            self._index: faiss.Index = library.read_index(name)
        except (limits.Refused, RuntimeError, ValueError) as error:  # memmap raises ValueError for an empty file
            raise UserError(f"{name} is no index ({limits.cause(error)}): build the index again") from None
        if folder.effort not in self._quantizer.efforts:
            raise UserError(
                f"{folder.path} searches with effort {folder.effort:,}, must be one of {self._quantizer.efforts}: build the index "
                "again"
            )
        self._quantizer.searched(self._index, folder.effort)

    def __len__(self) -> int:
        return len(self._lines)

    def search(self, query: str, k: int = 4) -> list[Hit]:
        """The chunks whose embeddings are nearest to a query's, the nearest first; fewer than `k` if there are no more."""
        return self.search_many([query], k)[0]

    def search_many(self, queries: Sequence[str], k: int = 4) -> list[list[Hit]]:
        """`search` of several queries at once.

        Raises:
          UserError: k is below 1, a query is no text or empty, or has more tokens than the model reads.
        """
        if isinstance(queries, str) or not all(isinstance(query, str) for query in queries):
            raise UserError(
                f"the queries are {limits.shortened(queries)}, must be texts: search several by a list of them"
            )
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
        """A chunk by its number.

        Raises:
          UserError: its line is no chunk.
        """
        try:
            return Hit(chunk=number, score=score, **dataclasses.asdict(Chunk.of_json(self._lines[number])))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{os.path.join(self.folder.path, build.CHUNKS)}:{number + 1} is no chunk ({limits.cause(error)}): build the index again"
            ) from None


def _center(folder: IndexFolder) -> np.ndarray:
    """The mean that was subtracted from the embeddings: float32 [D]."""
    name = os.path.join(folder.path, build.CENTER)
    content = limits.read(name)
    if len(content) != 4 * folder.dims:
        raise UserError(f"{name} has {len(content):,} bytes, must have {4 * folder.dims:,}: build the index again")
    center_D = np.frombuffer(content, "<f4")
    if not np.isfinite(center_D).all():
        raise UserError(f"{name} has values that are not finite: build the index again")
    return center_D
