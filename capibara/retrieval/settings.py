"""The settings of an index."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.builders.preparation.documents import Fields
from capibara.config import configurable
from capibara.core.types import UserError
from capibara.data.text import plain
from capibara.inference.engine.reading import Pooling
from capibara.retrieval.chunking import Chunking
from capibara.retrieval.tuning import Goal

_LEAST_QUERIES = 20


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexPreparation:
    """How documents become an index.

    Attributes:
      field: the field of a JSON line, or the column of a Parquet file, with the text.
      encoding: of JSON lines and texts, as Python names it, such as "utf-16" or "cp1252".
      document_bytes: a longer text file is cut into documents of at least so many bytes.
      chunk_tokens: tokens of a chunk, by the model's tokenizer.
      overlap: tokens that a chunk shares with the one before it in the document.
      pooling: which hidden states of a text are its embedding: the mean of all, those of the first token or of the last.
      center: whether the mean of all chunks' embeddings is subtracted from each: those of language models share a large part, which
        tells nothing apart (Mu and Viswanath 2018, https://arxiv.org/abs/1702.01417).
      recall: share of the `k` nearest chunks of an exact search that the index must find.
      k: for which the recall is measured.
      ms: most milliseconds that a query may take in the index, on one core.
      queries: spans of chunks that are searched to measure the recall; half of them choose the settings.
      train_vectors: from which codes are learned.
      seed: of what is drawn.
    """

    field: str = "text"
    encoding: str = plain.UTF_8
    document_bytes: int = 1 << 20
    chunk_tokens: int = 128
    overlap: int = 16
    pooling: Pooling = Pooling.MEAN
    center: bool = True
    recall: float = 0.95
    k: int = 10
    ms: float = 20.0
    queries: int = 1000
    train_vectors: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        least_values = {"document_bytes": 1, "k": 1, "queries": _LEAST_QUERIES, "train_vectors": 1, "seed": 0}
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise UserError(f"IndexPreparation.{name} is {getattr(self, name)}, must be at least {least}")
        if not 0 < self.recall <= 1:
            raise UserError(f"IndexPreparation.recall is {self.recall}, must be above 0 and at most 1: try 0.95")
        if not self.ms > 0:
            raise UserError(f"IndexPreparation.ms is {self.ms}, must be above 0: try 20")
        plain.checked_encoding("IndexPreparation.encoding", self.encoding)
        self.chunking  # noqa: B018 - checks

    @property
    def chunking(self) -> Chunking:
        """How documents are cut."""
        return Chunking(tokens=self.chunk_tokens, overlap=self.overlap)

    @property
    def fields(self) -> Fields:
        """Where the documents are."""
        return Fields(text=self.field, domain=None, document_bytes=self.document_bytes, encoding=self.encoding)

    @property
    def goal(self) -> Goal:
        """What the index must reach."""
        return Goal(recall=self.recall, k=self.k, ms=self.ms, train_vectors=self.train_vectors, seed=self.seed)

    def as_json(self) -> dict[str, Any]:
        """All that decides what is written, as JSON."""
        return dataclasses.asdict(self) | {"pooling": str(self.pooling)}
