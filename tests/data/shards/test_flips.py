"""A flipped bit anywhere in a file is one line with its name, or proven harmless: the records are equal.

| format | what a checksum covers | what none covers |
|---|---|---|
| TFRecord | lengths and contents (masked CRC-32C) | nothing |
| ArrayRecord | chunks and their headers, the footer (HighwayHash) | page headers and padding, which no record depends on |
| Parquet | pages, where the writer has checksums (`write_page_checksum`) | page headers and the footer: caught by structure |
| gzip | the content (CRC-32) | name and time in its head, which are not read |
| zstd | the content, where the writer has a checksum | its head: caught by structure |
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping

import pytest

from capibara.core.types import UserError
from capibara.data.shards.array_record import ArrayRecords
from capibara.data.shards.index import listed
from capibara.data.shards.source import Format, ShardedSource
from capibara.data.shards.tfrecord import TfRecords
from capibara.storage.store import Entry

from .conftest import shard, texts_of, tfrecord

FLIPS = 40


def records_of(path, kind: str, block_bytes: int) -> list:
    """All records of a file, block by block."""
    source = ShardedSource(files=(str(path),), format=Format(kind), block_bytes=block_bytes)
    shards = source._plain("files", listed("files", [str(path)]))
    reader = source._format("files", shards)
    (entry,) = shards
    found = [record for start, stop in reader.blocks(entry).tolist() for record in reader.records(entry, start, stop)]
    # A source reads a column of bytes like one of texts.
    return [(at, _texts(record) if isinstance(record, Mapping) else record) for at, record in found]


def _texts(record: Mapping) -> dict:
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in record.items()}


def flipped(content: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)


def told(path, kind: str, content: bytes, places: list[int], block_bytes: int = 300) -> int:
    """How many flips at these bytes are one line that names the file; the others must do no harm."""
    path.write_bytes(content)
    whole, count = records_of(path, kind, block_bytes), 0
    assert whole
    for number, at in enumerate(places):
        # Another name for each: a reader may keep what it knows of a file that it has opened.
        other = path.with_name(f"{number}-{path.name}")
        other.write_bytes(flipped(content, at, number % 8))
        try:
            assert records_of(other, kind, block_bytes) == whole, f"byte {at:,} changes records without a word"
        except UserError as error:
            assert str(other) in str(error) and "\n" not in str(error)
            count += 1
        other.unlink()
    return count


def places_of(size: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(size), FLIPS)


@pytest.mark.parametrize("block_bytes", [100, 300, 100_000])
def test_all_flips_of_a_tfrecord_are_told(tmp_path, block_bytes):
    content = shard("tfrecord", texts_of(40), tmp_path)
    assert told(tmp_path / "x.tfrecord", "tfrecord", content, places_of(len(content)), block_bytes) == FLIPS


@pytest.mark.parametrize("block_bytes", [64, 1000])
def test_the_length_of_a_blocks_first_record_is_told_by_that_block(block_bytes, tmp_path):
    """The search finds a record by its length: without the check of what precedes, it would skip one that is corrupted."""
    contents = [bytes([65 + i]) * size for i, size in enumerate((10, 500, 0, 3, 90_000, 40, 7, 2000, 1))]
    content, path = tfrecord(contents), tmp_path / "x.tfrecord"
    begins = [0]
    for one in contents:
        begins.append(begins[-1] + 16 + len(one))
    reader = TfRecords(block_bytes=block_bytes)
    for number, begin in enumerate(begins[1:-1]):
        path = tmp_path / f"{number}.tfrecord"
        path.write_bytes(flipped(content, begin + number % 12, number % 8))
        (entry,) = listed("files", [str(path)])
        first = begin // block_bytes * block_bytes
        with pytest.raises(UserError, match=rf"{number}\.tfrecord is no TFRecord file, or corrupted, at byte"):
            reader.records(entry, first, min(first + block_bytes, len(content)))


@pytest.mark.parametrize("options", ["group_size:3", "group_size:3,uncompressed", "group_size:4,brotli"])
def test_all_flips_of_array_records_are_told_or_harmless(tmp_path, options):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "x.array_record"
    writer = module.ArrayRecordWriter(str(path), options)
    for text in texts_of(60):
        writer.write(json.dumps({"text": text}).encode())
    writer.close()
    content = path.read_bytes()
    (entry,) = listed("files", [str(path)])
    used = int(ArrayRecords(block_bytes=1).blocks(entry)[-1, 1])  # the footer begins where the last chunk ends
    first = told(
        path, "array_record", content, [64 + at for at in places_of(used - 64)]
    )  # after the head of page and file
    assert first == FLIPS
    told(path, "array_record", content, places_of(len(content), seed=1))


def test_array_records_of_a_bucket_are_verified_alike(tmp_path):
    import fsspec

    content = shard("array_record", texts_of(60), tmp_path)
    reader, store = ArrayRecords(block_bytes=300), fsspec.filesystem("memory")
    used = len(content[:65536].rstrip(b"\0"))

    def read(name: str, given: bytes) -> list:
        store.pipe_file(f"/{name}", given)
        entry = Entry(f"memory:///{name}", len(given), "")
        return [
            record for start, stop in reader.blocks(entry).tolist() for record in reader.records(entry, start, stop)
        ]

    assert len(read("whole", content)) == 60
    for number, at in enumerate(places_of(used - 64)):
        with pytest.raises(
            UserError, match=f"memory:///flipped{number} is corrupted at byte [0-9,]+ .*: copy it again"
        ):
            read(f"flipped{number}", flipped(content, 64 + at, number % 8))


def test_a_corrupted_chunk_is_named_by_its_position(tmp_path):
    content, path = shard("array_record", texts_of(60), tmp_path), tmp_path / "x.array_record"
    path.write_bytes(content)
    (entry,) = listed("files", [str(path)])
    reader = ShardedSource(files=(str(path),), block_bytes=1)._format("files", [entry])
    start, stop = reader.blocks(entry).tolist()[5]
    path.write_bytes(flipped(content, stop - 1, 0))
    (entry,) = listed("files", [str(path)])
    with pytest.raises(UserError, match=f"is corrupted at byte {start:,} .*hash"):
        reader.records(entry, start, stop)


@pytest.mark.parametrize("part", ["pages", "whole"])
@pytest.mark.parametrize("has_arrow_schema", [True, False])
def test_flips_of_a_parquet_file_with_checksums_are_told_or_harmless(tmp_path, part, has_arrow_schema):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    columns = {"number": list(range(90)), "text": texts_of(90), "domain": [f"of {i % 4}" for i in range(90)]}
    parquet.write_table(
        pyarrow.table(columns), path, row_group_size=30, write_page_checksum=True, store_schema=has_arrow_schema
    )
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    if part == "whole":
        told(path, "parquet", content, places_of(len(content)))
        return
    group = parquet.ParquetFile(path).metadata.row_group(1).column(1)
    assert group.path_in_schema == "text"
    # After the page's header, which no checksum covers.
    data = range(group.dictionary_page_offset + 40, group.data_page_offset)
    assert data.stop < footer
    assert told(path, "parquet", content, random.Random(0).sample(data, FLIPS)) == FLIPS


@pytest.mark.parametrize("has_arrow_schema", [True, False])
def test_a_footer_that_contradicts_itself_is_told(tmp_path, has_arrow_schema):
    """The footer has no checksum: a column with another name would be overlooked, and rows of a smaller count lost."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    columns = {"text": texts_of(90), "domain": [f"of {i % 4}" for i in range(90)]}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=45, store_schema=has_arrow_schema)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    name = content.index(b"\x06domain", footer) + 1
    # The last i64 that is 45, as a zigzag varint, is the number of rows of a row group.
    count = content.rindex(b"\x16\x5a") + 1
    for at in (name, count):
        path.write_bytes(flipped(content, at, 1))
        with pytest.raises(UserError, match="x.parquet .*(lists of columns|its footer says)"):
            records_of(path, "parquet", 300)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_flips_of_compressed_lines_are_told_or_harmless(tmp_path, name):
    content = shard("jsonl", texts_of(60), tmp_path)
    if name.endswith(".gz"):
        packed = gzip.compress(content, mtime=0)
    else:
        zstandard = pytest.importorskip("zstandard")
        packed = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    told(tmp_path / name, "jsonl", packed, places_of(len(packed)), 10**6)
