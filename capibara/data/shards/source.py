"""The source for large corpora: files in shards, local or in a bucket, streamed block by block."""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.data.packing.shuffle import mix
from capibara.data.shards import index as indexes
from capibara.data.shards.array_record import ArrayRecords
from capibara.data.shards.formats import ShardFormat
from capibara.data.shards.index import Index
from capibara.data.shards.lines import JsonLines, TextLines
from capibara.data.shards.parquet import ParquetRows
from capibara.data.shards.records import Fields, RecordFormat
from capibara.data.shards.tfrecord import TfRecords
from capibara.data.sources.sources import Blocks, Example, Source
from capibara.data.text import counts, disk, folders, plain, splits
from capibara.data.text.counts import Counts
from capibara.data.text.splits import Use
from capibara.storage import copies, packed, stores

_LEAST_BLOCKS = 1024  # blocks of a corpus, if it is large enough: each row of a batch needs its own
_SMALLEST, _LARGEST = 4 << 10, 1 << 20  # bytes of a block; requests to a bucket should not be smaller than the largest
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")


class Format(enum.StrEnum):
    """The file format of shards."""

    JSONL = "jsonl"
    TEXT = "text"
    PARQUET = "parquet"
    ARRAY_RECORD = "array_record"
    TFRECORD = "tfrecord"


_ENDINGS = {
    ".jsonl": Format.JSONL, ".json": Format.JSONL, ".ndjson": Format.JSONL, ".txt": Format.TEXT, ".md": Format.TEXT,
    ".parquet": Format.PARQUET, ".array_record": Format.ARRAY_RECORD, ".arrayrecord": Format.ARRAY_RECORD,
    ".tfrecord": Format.TFRECORD, ".tfrecords": Format.TFRECORD,
}  # fmt: skip


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedSource(Source):
    """Files in shards, local, in gs://, s3:// or another store of fsspec, streamed block by block.

    A block is about 1 MiB of consecutive documents (in Parquet: a row group). Blocks are shuffled, each row of the global
    batch reads its own blocks, and the documents of a few blocks are shuffled together. So a host reads only what its rows
    need, a resumed run reads only the current blocks, and the number of hosts may change.

    Attributes:
      files: paths, folders, addresses or globs of the training files; of a folder on this machine all shards are read, in the
        folders in it, too.
      format: file format; None: by the files' endings.
      record: format of a record in a TFRecord or ArrayRecord file.
      field: the field, feature or column with the text (or with the targets, of pairs).
      inputs_field: the field with the inputs; None: there are none.
      domain_field: the field with the document's domain, which a record may lack; None: there is none.
      validation_files: as `files`, for validation; empty: a fraction of the blocks is held out.
      validation_fraction: the fraction that is held out if there are no validation files.
      domain: the domain of documents without one.
      block_bytes: bytes of a block, if the format allows a choice; None: 1/1024 of the corpus, from 4 KiB to 1 MiB.
      mix_blocks: number of blocks whose documents are shuffled together.
      document_bytes: text files are split at line ends into documents of at least so many bytes.
      encoding: of texts and JSON lines, as Python names it, such as "utf-16". Files in another encoding than UTF-8, and
        compressed ones (.gz, .zst), are converted once, to copies on this machine.
    """

    files: tuple[FilePath, ...]
    format: Format | None = None
    record: RecordFormat = RecordFormat.AUTO
    field: str = "text"
    inputs_field: str | None = None
    domain_field: str | None = "domain"
    validation_files: tuple[FilePath, ...] = ()
    validation_fraction: float = 0.03
    domain: str | None = None
    block_bytes: int | None = None
    mix_blocks: int = 4
    document_bytes: int = 1 << 16
    encoding: str = plain.UTF_8

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction, type(self).__name__)
        for name, value in (("block_bytes", self.block_bytes), ("mix_blocks", self.mix_blocks)):
            if value is not None and value < 1:
                raise UserError(f"ShardedSource.{name} ({getattr(self, name)}) must be at least 1: leave it out")
        if self.document_bytes < 1:
            raise UserError(f"ShardedSource.document_bytes ({self.document_bytes}) must be at least 1: try 65536")

    def open(self, split: str) -> Blocks:
        disk.check_split(split)
        name = "validation_files" if self.validation_files and split == "validation" else "files"
        parameter = f"ShardedSource.{name}"
        held_out = [] if self.validation_files else self._held_out(parameter)
        explicit = bool(self.validation_files or held_out)
        if name == "validation_files":
            paths, left_out = self._paths(parameter, self.validation_files, Use.VALIDATION)
            disk.tell_overlap("ShardedSource", self.files, self.validation_files, self._is_shard, self._has_splits)
        else:
            patterns = held_out if held_out and split == "validation" else self.files
            paths, left_out = self._paths(parameter, patterns, Use.TRAINING)
        stored = indexes.listed(parameter, paths)
        shards = self._plain(parameter, stored)
        index = indexes.index_of(shards, self._format(parameter, shards))
        if not len(index.blocks):
            raise UserError(f"{parameter} ({disk.shown([shard.url for shard in shards])}) are empty")
        total = len(index.blocks)
        if not explicit:
            keys = disk.name_hashes(index.names())[index.blocks[:, 0]] + index.blocks[:, 1].astype(np.uint64)
            chosen = disk.split_by_hash(mix(keys), split, self.validation_fraction, parameter, "block")
            index = dataclasses.replace(index, blocks=index.blocks[chosen])
        blocks = ShardBlocks(self, index, self._format(parameter, shards))
        empty = sum(not shard.size for shard in shards)
        blocks.counts = Counts(
            files=len(shards) - empty,
            bytes=sum(shard.size for shard in stored),
            **counts.of_split(split, len(blocks), total, noun="blocks"),
            files_left_out=left_out + empty,
        )
        blocks.examples(0)  # raises here if a field is missing
        return blocks

    def _paths(self, parameter: str, patterns: Sequence[str], use: Use) -> tuple[list[str], int]:
        """What is named, with its shards in place of a folder, and how much folders have besides."""
        paths: list[str] = []
        left_out = 0
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            inner, besides = [pattern], 0
            if os.path.isdir(pattern):
                of_folder = use if self._has_splits(pattern) else Use.ALL
                members, besides = folders.inside(parameter, pattern, self._is_shard, "shards", of_folder)
                inner = [member.path for member in members]
            paths, left_out = paths + inner, left_out + besides
        return paths, left_out

    def _held_out(self, parameter: str) -> list[str]:
        """The shards of the validation splits of folders on this machine."""
        patterns = (self.files,) if isinstance(self.files, str) else self.files
        local = [pattern for pattern in patterns if os.path.isdir(pattern) and self._has_splits(pattern)]
        return [member.path for member in folders.held_out(parameter, local, self._is_shard)]

    def _has_splits(self, folder: str) -> bool:
        """Whether a folder is a data set: one of texts, such as programs with their tests, is not."""
        members = folders.of_use("ShardedSource.files", folder, self._is_shard, Use.ALL)
        return any(self._format_of(member.name) is not Format.TEXT for member in members)

    def _is_shard(self, name: str) -> bool:
        if name in splits.METADATA or name == splits.CARD and self.format is not Format.TEXT:
            return False
        return self._format_of(name) is not None

    def _format_of(self, name: str) -> Format | None:
        """The format of a folder's file; None: it is no shard."""
        result = _format_of(packed.plain_name(name))
        return result if self.format in (None, result) else None

    def _plain(self, parameter: str, shards: list[indexes.Entry]) -> list[indexes.Entry]:
        """The files, with plain copies in place of those that are compressed or not in UTF-8."""
        lines = (Format.JSONL, Format.TEXT)
        is_utf8 = plain.checked_encoding(parameter, self.encoding) == plain.UTF_8
        chosen = [
            shard
            for shard in shards
            if (not is_utf8 or packed.is_packed(shard.url))
            and (self.format or _format_of(packed.plain_name(shard.url))) in lines
        ]
        if not chosen:
            return shards
        local = [shard for shard in chosen if stores.of(shard.url).has_local_paths]
        remote = [shard for shard in chosen if not stores.of(shard.url).has_local_paths]
        paths = {shard.url: shard.url for shard in local}
        paths |= dict(zip((shard.url for shard in remote), copies.local_files(remote), strict=True))
        new = dict(zip(paths, plain.copies_of(parameter, list(paths.values()), self.encoding), strict=True))
        result = indexes.listed(parameter, list(new.values()))
        by_copy = {entry.url: entry for entry in result}
        return [by_copy[new[shard.url]] if shard.url in new else shard for shard in shards]

    def _format(self, parameter: str, shards: list[indexes.Entry]) -> ShardFormat:
        chosen = self.format or self._format_by_name(parameter, shards)
        size = self.block_bytes
        if size is None:
            share = sum(shard.size for shard in shards) // _LEAST_BLOCKS
            size = min(max(1 << max(share, 1).bit_length() - 1, _SMALLEST), _LARGEST)
        match chosen:
            case Format.JSONL:
                return JsonLines(block_bytes=size)
            case Format.TEXT:
                return TextLines(block_bytes=size, document_bytes=self.document_bytes)
            case Format.PARQUET:
                columns = (self.field, self.inputs_field, self.domain_field)
                return ParquetRows(block_bytes=size, columns=tuple(column for column in columns if column is not None))
            case Format.ARRAY_RECORD:
                return ArrayRecords(block_bytes=size)
            case Format.TFRECORD:
                return TfRecords(block_bytes=size)

    @staticmethod
    def _format_by_name(parameter: str, shards: list[indexes.Entry]) -> Format:
        result = set()
        for shard in shards:
            name = os.path.basename(shard.url).lower()
            if name.endswith(_COMPRESSED):
                raise UserError(
                    f"{parameter}: {shard.url} is compressed, so its blocks cannot be read separately: unpack it"
                )
            if (file_format := _format_of(name)) is None:
                known = ", ".join(map(str, Format))
                raise UserError(
                    f"{parameter}: {shard.url} has no known ending: set ShardedSource.format to one of {known}"
                )
            result.add(file_format)
        if len(result) > 1:
            raise UserError(
                f"{parameter} have several formats ({', '.join(sorted(result))}): set ShardedSource.format to one of them, or use "
                "one source for each"
            )
        return result.pop()


def _format_of(url: str) -> Format | None:
    """The format of a file by its name; None: it has no known ending."""
    name = os.path.basename(url).lower()
    # A number may follow the ending, as in part.tfrecord-00000-of-00010.
    return next((value for ending, value in _ENDINGS.items() if name.endswith(ending) or f"{ending}-" in name), None)


_COUNTING = threading.Lock()  # of all blocks, which workers get by pickle, and a lock cannot be pickled


class ShardBlocks(Blocks):
    """The blocks of one split of a ShardedSource."""

    def __init__(self, source: ShardedSource, index: Index, shard_format: ShardFormat):
        self._index, self._format, self.mix_blocks = index, shard_format, source.mix_blocks
        self._skipped = 0
        fixed = {Format.JSONL: RecordFormat.JSON, Format.TEXT: RecordFormat.TEXT}
        self._fields = Fields(
            record_format=fixed.get(Format(shard_format.name), source.record),
            text=source.field,
            inputs=source.inputs_field,
            domain=source.domain_field,
            default_domain=source.domain,
        )

    def __len__(self) -> int:
        return len(self._index.blocks)

    def examples(self, i: int) -> list[Example]:
        shard, start, stop = map(int, self._index.blocks[i])
        entry = self._index.shards[shard]
        records = self._format.records(entry, start, stop)
        if self._format.name == Format.TEXT:
            setting = "ShardedSource.encoding"
            return [
                Example(plain.decoded(record, entry.url, at, setting), domain=self._fields.default_domain)
                for at, record in records
                if isinstance(record, bytes)
            ]
        unit = "row" if self._format.name == Format.PARQUET else "byte"
        url = plain.origin(entry.url)
        result = [self._fields.example(record, f"{url} at {unit} {at:,}") for at, record in records]
        examples = [example for example in result if example is not None]
        self._count_skipped(len(result) - len(examples), url)
        return examples

    def _count_skipped(self, count: int, url: str) -> None:
        """Logs the number of skipped records, ever more seldom."""
        with _COUNTING:
            before, self._skipped = self._skipped, self._skipped + count
        if count and (not before or len(str(before)) < len(str(self._skipped))):
            line = "%d records have a null for a text so far, the last in %s: skipped"
            logging.getLogger(__name__).warning(line, self._skipped, url)

    def name(self, i: int) -> dict[str, Any]:
        shard, start, _ = map(int, self._index.blocks[i])
        return {"file": self._index.names()[shard], "block": start}

    def fingerprint(self) -> dict[str, Any]:
        return {
            "files": len(self._index.shards),
            "bytes": self._index.size,
            "blocks": len(self),
            "mix_blocks": self.mix_blocks,
            "digest": self._index.digest(),
        }
