"""Rows that were packed before training: each is a tf.train.Example in an ArrayRecord file.

Its features: `packed_ids`, in as many bytes an id as `id_bytes` says; `starts` and `previous` (uint32), `documents` (uint64),
`length`, `vocabulary` (text) and, where a document has a domain, `domains` (a text for each). Arrays are little-endian.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core.types import HostBatch
from capibara.data.packing.packing import Rows
from capibara.data.text.protobuf import Malformed

MARK = "packed_ids"  # the feature that only packed rows have
_BYTES_LIST, _INT64_LIST = 1, 3  # fields of a tf.train.Feature


class PackedRow(NamedTuple):
    """A row of packed documents.

    Attributes:
      ids: [n] int32, the targets, n <= length.
      starts: [k] int32, where each document, or the rest of one, begins in `ids`.
      previous: [k] int32, the input at each start: the beginning token, or the token before a rest.
      documents: [k] uint64, the number of each document in the corpus.
      domains: the domain of each document, "" without one; empty: none has one.
      length: positions of the row.
      vocabulary: fingerprint of the vocabulary.
    """

    ids: np.ndarray
    starts: np.ndarray
    previous: np.ndarray
    documents: np.ndarray
    domains: Sequence[str]
    length: int
    vocabulary: str

    def encode(self) -> bytes:
        """The record."""
        id_bytes = 2 if int(self.ids.max(initial=0)) < 1 << 16 else 4
        entries = {
            **_same(self.length, id_bytes, self.vocabulary),
            MARK: _entry(MARK, _bytes_list(self.ids.astype(f"<u{id_bytes}").tobytes())),
            "documents": _entry("documents", _bytes_list(self.documents.astype("<u8").tobytes())),
            "previous": _entry("previous", _bytes_list(self.previous.astype("<u4").tobytes())),
            "starts": _entry("starts", _bytes_list(self.starts.astype("<u4").tobytes())),
        }
        if self.domains:
            entries["domains"] = _entry("domains", _bytes_list(*(domain.encode() for domain in self.domains)))
        return _field(1, b"".join(entries[name] for name in sorted(entries)))


class PackedDocuments(NamedTuple):
    """The documents of a packed row.

    Attributes:
      row: the row.
      domains: [k] int32, the number of each document's domain; None: unknown.
      position: of the row in the data.
    """

    row: PackedRow
    domains: np.ndarray | None
    position: tuple[int, ...]


class PackedWindow(Rows):
    """Rows that were packed before; `fill(batch, b, i)` copies row `i` into row `b` of a batch."""

    def __init__(self, rows: Sequence[PackedDocuments], *, pad_id: int):
        """`pad_id`: the padding id of `tokens` and `targets`."""
        self._rows, self._pad_id = list(rows), pad_id
        self._checksum = 0
        for row in rows:
            self._checksum = zlib.crc32(row.row.ids.data, self._checksum)

    @property
    def checksum(self) -> int:
        """CRC-32 of the window's tokens, with which a restored stream checks that the data has not changed."""
        return self._checksum

    def positions(self, i: int) -> list[tuple[int, ...]]:
        """The position in the data of row `i`."""
        return [self._rows[i].position]

    def fill(self, batch: HostBatch, b: int, i: int) -> None:
        """Copies row `i` into row `b` of an empty batch."""
        row, domains, _ = self._rows[i]
        size, counts = len(row.ids), np.diff(np.append(row.starts, len(row.ids)))
        batch["targets"][b, :size] = row.ids
        batch["tokens"][b, 1:size] = row.ids[:-1]
        batch["tokens"][b, row.starts] = row.previous
        batch["weights"][b, :size] = 1.0
        batch["segment_ids"][b, :size] = np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32), counts)
        batch["positions"][b, :size] = np.arange(size, dtype=np.int32) - np.repeat(row.starts, counts)
        if domains is not None and "domains" in batch:
            batch["domains"][b, :size] = np.repeat(domains, counts)
        batch["tokens"][b, size:] = batch["targets"][b, size:] = self._pad_id


def decode(features: Mapping[str, Sequence[Any]]) -> PackedRow:
    """The row of a record, from its features as `protobuf.example` reads them.

    Raises:
      Malformed: a feature is missing, or they do not fit each other.
    """
    try:
        (length,), (id_bytes,), (vocabulary,) = (features[name] for name in ("length", "id_bytes", "vocabulary"))
        row = PackedRow(
            ids=_array(features, MARK, {2: "<u2", 4: "<u4"}[id_bytes]).astype(np.int32),
            starts=_array(features, "starts", "<u4").astype(np.int32),
            previous=_array(features, "previous", "<u4").astype(np.int32),
            documents=_array(features, "documents", "<u8"),
            domains=[domain.decode() for domain in features.get("domains", ())],
            length=int(length),
            vocabulary=vocabulary.decode(),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Malformed(f"no packed row: {type(error).__name__} {error}") from None
    counts = {len(row.starts), len(row.previous), len(row.documents), len(row.domains or row.starts)}
    edges = np.append(row.starts, len(row.ids))
    if len(counts) > 1 or not 0 < len(row.ids) <= row.length or edges[0] or (np.diff(edges) <= 0).any():
        raise Malformed("no packed row: its documents do not fit it")
    return row


def _array(features: Mapping[str, Sequence[Any]], name: str, dtype: str) -> np.ndarray:
    (content,) = features[name]
    return np.frombuffer(content, dtype)


@functools.cache
def _same(length: int, id_bytes: int, vocabulary: str) -> dict[str, bytes]:
    """The features that most rows share."""
    integers = {"length": length, "id_bytes": id_bytes}
    result = {name: _entry(name, _field(_INT64_LIST, _field(1, _varint(value)))) for name, value in integers.items()}
    return result | {"vocabulary": _entry("vocabulary", _bytes_list(vocabulary.encode()))}


def _entry(name: str, feature: bytes) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, feature))


def _bytes_list(*values: bytes) -> bytes:
    return _field(_BYTES_LIST, b"".join(_field(1, value) for value in values))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


@functools.lru_cache(4096)  # lengths and names recur
def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
