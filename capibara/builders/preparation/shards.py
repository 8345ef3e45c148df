"""Tokens of the kept documents, packed into rows and written as ArrayRecord shards."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from capibara.builders.preparation import filters
from capibara.builders.preparation.documents import CorpusPart, Document
from capibara.builders.preparation.settings import CorpusPreparation
from capibara.builders.preparation.stages import kept_documents
from capibara.core import extras
from capibara.data.packing import packing
from capibara.data.packing.rows import PackedRow

_WINDOW_TOKENS = 4 << 20  # that are packed together, and at least as many as _WINDOW_ROWS rows have
_WINDOW_ROWS = 64
_TOGETHER, _TOGETHER_CHARACTERS = 64, 1 << 20  # documents, and their characters, that are tokenized at a time
_OPTIONS = "group_size:16,uncompressed"  # rows of a chunk: what a reader reads at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPart:
    """A part whose documents go to a shard.

    Attributes:
      part: what to read.
      retained: [n] bool, its documents that are retained.
      first: the number in the corpus of its first document.
    """

    part: CorpusPart
    retained: np.ndarray
    first: int


def name_of(shard: int, shards: int) -> str:
    """The name of a shard's file."""
    return f"corpus-{shard:05}-of-{shards:05}.array_record"


def write(path: str, parts: Sequence[ShardPart], settings: CorpusPreparation) -> collections.Counter[str]:
    """Writes a shard; returns its counts: documents, tokens, rows.

    Raises:
      UserError: the tokenizer cannot be read.
    """
    writers = extras.require("array_record.python.array_record_module", why="ArrayRecord files")
    counts: collections.Counter[str] = collections.Counter()
    writer = writers.ArrayRecordWriter(path, _OPTIONS)
    try:
        for rows, documents in _windows(parts, settings):
            counts["kept"] += documents
            for row in rows:
                writer.write(row.encode())
                counts["rows"] += 1
                counts["tokens"] += len(row.ids)
    finally:
        writer.close()
    return counts


def _windows(parts: Sequence[ShardPart], settings: CorpusPreparation) -> Iterator[tuple[list[PackedRow], int]]:
    """The packed rows of a window of documents, and how many documents it has."""
    least = max(_WINDOW_TOKENS, _WINDOW_ROWS * settings.length)
    documents: list[packing.Document] = []
    domains: dict[int, str] = {}
    tokens = 0
    for number, document, ids in _tokenized(parts, settings):
        text = packing.Document.after(ids, None, settings.vocabulary.begin_ids)
        documents.append(text._replace(position=(number,)))
        tokens += len(ids)
        if document.domain:
            domains[number] = document.domain
        if tokens >= least:
            yield _packed(documents, domains, settings), len(documents)
            documents, domains, tokens = [], {}, 0
    if documents:
        yield _packed(documents, domains, settings), len(documents)


def _tokenized(parts: Sequence[ShardPart], settings: CorpusPreparation) -> Iterator[tuple[int, Document, np.ndarray]]:
    """The number in the corpus, the document and the token ids of all documents of a shard."""
    batch: list[tuple[int, Document]] = []
    characters = 0
    for part in parts:
        for number, document in kept_documents(part.part, settings, part.retained):
            batch.append((part.first + number, document))
            characters += len(document.text)
            if len(batch) >= _TOGETHER or characters >= _TOGETHER_CHARACTERS:
                yield from _encoded(batch, settings)
                batch, characters = [], 0
    yield from _encoded(batch, settings)


def _encoded(
    batch: Sequence[tuple[int, Document]], settings: CorpusPreparation
) -> Iterator[tuple[int, Document, np.ndarray]]:
    texts = [document.text for _, document in batch]
    if any(item.rewrites for item in settings.filters):
        texts = [filters.judge(text, settings.filters, collections.Counter()) or "" for text in texts]
    vocabulary = settings.vocabulary
    for (number, document), ids in zip(batch, vocabulary.encode_batch(texts), strict=True):
        yield number, document, np.append(ids, np.int32(vocabulary.eos_id)) if settings.append_eos else ids


def _packed(
    documents: Sequence[packing.Document], domains: dict[int, str], settings: CorpusPreparation
) -> list[PackedRow]:
    """Packs documents into rows."""
    length, pad_id = settings.length, settings.vocabulary.pad_id
    window = packing.Window(documents, length=length, packing=settings.packing, pad_id=pad_id)
    fingerprint, batch = settings.vocabulary.fingerprint(), packing.empty_batch(1, length, pad_id)
    rows = []
    for i in range(len(window)):
        batch["segment_ids"].fill(0)
        window.fill(batch, 0, i)
        rows.append(_row(batch, [at for (at,) in window.positions(i)], domains, length, fingerprint))
    return rows


def _row(
    batch: dict[str, np.ndarray], numbers: list[int], domains: dict[int, str], length: int, fingerprint: str
) -> PackedRow:
    segments = batch["segment_ids"][0]
    count = int(np.count_nonzero(segments))
    starts = np.append(0, np.flatnonzero(segments[1:count] != segments[: count - 1]) + 1).astype(np.int32)
    return PackedRow(
        ids=batch["targets"][0, :count].copy(),
        starts=starts,
        previous=batch["tokens"][0, starts],
        documents=np.array(numbers, np.uint64),
        domains=[domains.get(number, "") for number in numbers] if any(n in domains for n in numbers) else (),
        length=length,
        vocabulary=fingerprint,
    )
