"""Every record of a shard is in one block, whatever the blocks' size; what is cut short or is something else is refused."""

from __future__ import annotations

import dataclasses
import json
import struct

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.shards import array_record, parquet, tfrecord
from capibara.data.shards.formats import read
from capibara.data.shards.index import listed
from capibara.data.shards.lines import JsonLines
from capibara.data.shards.source import Format, ShardedSource
from capibara.data.shards.tfrecord import TfRecords
from capibara.data.text.protobuf import Malformed, example
from capibara.storage.remote import Entry

from .conftest import FORMATS, shard, texts_of
from .conftest import tfrecord as tfrecord_file


def source(files: str, kind: str = "jsonl", **changes) -> ShardedSource:
    return ShardedSource(files=(files,), **{"format": Format(kind), "document_bytes": 1, **changes})


def all_texts(given: ShardedSource) -> list[str]:
    splits = [given.open(split) for split in ("train", "validation")]
    return [one.text.strip() for blocks in splits for i in range(len(blocks)) for one in blocks.examples(i)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("block_bytes", [7, 64, 1000])
def test_every_record_is_in_one_block(corpus, kind, block_bytes):
    found = all_texts(source(corpus(kind), kind, block_bytes=block_bytes))
    assert sorted(found) == sorted(texts_of(97))


@pytest.mark.parametrize("kind", FORMATS)
def test_local_files_are_read_like_those_in_a_store(corpus, kind, tmp_path):
    given = source(corpus(kind), kind, block_bytes=100)
    for i in range(5):
        (tmp_path / f"part-{i:05}.{kind}").write_bytes(shard(kind, texts_of(97)[i::5], tmp_path))
    local = source(f"{tmp_path}/part-*.{kind}", kind, block_bytes=100)
    assert local.open("train").fingerprint() == given.open("train").fingerprint()
    assert all_texts(local) == all_texts(given)


@pytest.mark.parametrize(
    "options", ["group_size:1", "group_size:7,uncompressed", "group_size:5,brotli", "group_size:2,snappy"]
)
def test_array_records_over_many_pages_are_what_was_written(tmp_path, options):
    """Chunks lie across the pages of 64 KiB, whose headers are in their midst."""
    module = pytest.importorskip("array_record.python.array_record_module")
    rng = np.random.default_rng(0)
    texts = [f"<{i}>" + rng.bytes(int(n)).hex() for i, n in enumerate(rng.integers(1, 20_000, 60))]
    writer = module.ArrayRecordWriter(str(tmp_path / "x.array_record"), options)
    for text in texts:
        writer.write(text.encode())
    writer.close()
    given = source(f"{tmp_path}/x.array_record", "array_record", block_bytes=50_000, record="text")
    assert sorted(all_texts(given)) == sorted(texts)


def test_transposed_array_records_are_refused(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(tmp_path / "x.array_record"), "transpose")
    writer.write(b"text")
    writer.close()
    given = source(f"{tmp_path}/x.array_record", "array_record", validation_files=(f"{tmp_path}/x.array_record",))
    with pytest.raises(UserError, match="transposed"):
        given.open("train")


def test_checksums_are_those_of_the_standard():
    google_crc32c = pytest.importorskip("google_crc32c")
    rng = np.random.default_rng(0)
    columns = rng.integers(0, 256, (8, 20), np.uint8)
    expected = [google_crc32c.value(bytes(column)) for column in columns.T]
    assert tfrecord._crc(columns).tolist() == expected


@pytest.mark.heavy
def test_tfrecords_are_those_of_tensorflow(tmp_path):
    tf = pytest.importorskip("tensorflow")
    texts = texts_of(50)
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as writer:
        for text in texts:
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
            writer.write(tf.train.Example(features=tf.train.Features(feature={"text": feature})).SerializeToString())
    assert sorted(all_texts(source(f"{tmp_path}/x.tfrecord", "tfrecord", block_bytes=100))) == sorted(texts)


def test_a_record_that_looks_like_a_header_does_not_mislead():
    inner = tfrecord_file([b"inside"])[:16]  # a whole header, followed by something else
    contents = [b"a" * 50 + inner + b"b" * 50, b"second", b"third"]
    content = tfrecord_file(contents)
    entry = _memory(content)
    found = [
        record for start, stop in TfRecords(block_bytes=40).blocks(entry) for record in _records(entry, start, stop)
    ]
    assert found == contents


def _records(entry: Entry, start: int, stop: int) -> list[bytes]:
    return [record for _, record in TfRecords(block_bytes=40).records(entry, start, stop)]


def _memory(content: bytes, name: str = "x") -> Entry:
    import fsspec

    fsspec.filesystem("memory").pipe_file(f"/{name}", content)
    return Entry(f"memory:///{name}", len(content), "")


def test_examples_of_tensorflow_are_read_without_it():
    # As tf.train.Example(...).SerializeToString() gives it: a text, floats, and integers of which one is negative.
    ids = b"\x1a\x0d\x0a\x0b\x05" + b"\xff" * 9 + b"\x01"
    features = [(b"text", b"\x0a\x04\x0a\x02hi"), (b"f", b"\x12\x06\x0a\x04" + struct.pack("<f", 0.5)), (b"ids", ids)]
    entries = b""
    for name, feature in features:
        pair = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(feature)]) + feature
        entries += b"\x0a" + bytes([len(pair)]) + pair
    assert example(b"\x0a" + bytes([len(entries)]) + entries) == {"text": [b"hi"], "f": [0.5], "ids": [5, -1]}
    number_for_floats = b"\x0a\x0b\x0a\x09\x0a\x01f\x12\x04\x12\x02\x08\x05"
    for corrupted in (b"\x0a\xff", b"\x0a\x05abc", b"\xff" * 12, number_for_floats):
        with pytest.raises(Malformed):
            example(corrupted)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "text"])
def test_a_shard_that_is_cut_short_is_refused_before_training(corpus, kind):
    import fsspec

    given = source(corpus(kind), kind)
    store = fsspec.filesystem("memory")
    path = f"/corpus/part-00003.{kind}"
    store.pipe_file(path, store.cat_file(path)[:-5])
    with pytest.raises(UserError, match="part-00003.* cut short") as raised:
        given.open("train")
    assert "\n" not in str(raised.value)


def test_a_shard_that_is_cut_short_while_it_is_read_is_refused(corpus, monkeypatch):
    import fsspec

    from capibara.storage import remote

    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    blocks = source(corpus("jsonl")).open("train")
    store = fsspec.filesystem("memory")
    for path in list(store.store):
        store.pipe_file(path, store.cat_file(path)[:-40])
    with pytest.raises(UserError, match="is cut short"):
        blocks.examples(0)


def test_a_local_shard_that_is_cut_short_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"0123456789")
    (entry,) = listed("files", [str(path)])
    assert read(entry, 2, 9) == b"2345678"
    path.write_bytes(b"0123")
    with pytest.raises(UserError, match=r"x\.jsonl is cut short .2 of 7 bytes at 2"):
        read(entry, 2, 9)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.jsonl", b'{"text": 3}\n{"text": "b"}\n', "field 'text' must be text, not int"),
        ("x.jsonl", b'{"body": "a"}\n{"body": "b"}\n', "has no field 'text'"),
        ("x.jsonl", b'[1]\n{"text": "b"}\n', "is no JSON object"),
        ("x.jsonl", b'{"text": "a"\n{"text": "b"}\n', "is not JSON"),
        ("x.parquet", b"no table at all", "no Parquet file"),
        ("x.array_record", b"no records", "no ArrayRecord file"),
        ("x.array_record", b"\0" * (1 << 18), "no ArrayRecord file"),
        ("x.tfrecord", b"no records at all", "no TFRecord file"),
        ("x.tfrecord", b"\x1f\x8b\x08" + b"\0" * 20, "is compressed"),
        ("x.jsonl.gz", b"whatever", "is not compressed as its name says"),
        ("x.jsonl.xz", b"whatever", "is compressed"),
        ("x.bin", b"whatever", "has no known ending"),
        ("x.jsonl", b"", "are empty"),
    ],
)
def test_bad_shards_are_refused_by_name(corpus, name, content, said):
    entry = _memory(content, name)
    with pytest.raises(UserError, match=said) as raised:
        ShardedSource(files=(entry.url,), validation_files=(entry.url,)).open("train")
    assert ("x." in str(raised.value)) and "\n" not in str(raised.value)


def test_of_a_table_only_the_named_columns_are_read(corpus):
    given = source(corpus("parquet"), "parquet", field="nothing")
    with pytest.raises(UserError, match="has no field 'nothing'"):
        given.open("train")


def test_corrupted_array_records_raise_nothing_else(tmp_path):
    """Bytes changed at random: each is a UserError, or does no harm."""
    content = shard("array_record", texts_of(30), tmp_path)
    rng = np.random.default_rng(0)
    reader = array_record.ArrayRecords(block_bytes=200)
    refused = 0
    for _ in range(150):
        corrupted = bytearray(content)
        used = [int(i) for i in rng.integers(0, 3000, 3)] + [len(content) - 65536 + int(rng.integers(0, 140))]
        for at in used:
            corrupted[at] = int(rng.integers(0, 256))
        entry = _memory(bytes(corrupted), "corrupted")
        try:
            for start, stop in reader.blocks(entry):
                reader.records(entry, int(start), int(stop))
        except UserError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("move", [1, -1])
def test_chunks_with_other_counts_than_in_the_footer_are_refused(tmp_path, monkeypatch, move):
    """The sum is that of the file, which is all that the library compares."""
    entry = _memory(shard("array_record", texts_of(30), tmp_path), "moved")
    layout = array_record._layout(entry)
    firsts = layout.firsts.copy()
    firsts[2] += move
    moved = dataclasses.replace(layout, firsts=firsts)
    monkeypatch.setattr(array_record, "_layout", lambda shard: moved)
    reader = array_record.ArrayRecords(block_bytes=1)
    with pytest.raises(UserError, match=f"a chunk of 3 records at byte .*, {3 + move} by the footer"):
        reader.records(entry, int(layout.begins[1]), int(layout.begins[2]))


def test_lines_longer_than_blocks_and_files_without_a_last_line_end():
    lines = [json.dumps({"text": "y" * size}) for size in (3, 200_000, 1, 70_000, 0)]
    entry = _memory("\n".join(lines).encode())
    reader = JsonLines(block_bytes=1000)
    found = [record for start, stop in reader.blocks(entry) for _, record in reader.records(entry, start, stop)]
    assert [record.decode() for record in found] == lines


def test_array_records_without_a_record_are_empty_and_places_that_are_no_numbers_are_refused(tmp_path):
    reader, entry = array_record.ArrayRecords(block_bytes=200), _memory(shard("array_record", [], tmp_path), "empty")
    assert reader.blocks(entry).shape == (0, 2)
    with pytest.raises(Malformed, match="no number"):
        array_record._footer_entry(b"\x0a\x01x")


def test_array_records_that_are_larger_than_they_may_be_are_refused(tmp_path, monkeypatch):
    entry = _memory(shard("array_record", texts_of(30), tmp_path), "large")
    reader = array_record.ArrayRecords(block_bytes=1 << 20)
    ((start, stop),) = reader.blocks(entry)
    monkeypatch.setattr(array_record, "MOST_BYTES", 900)  # of chunks that have 3 of the 30 records each
    with pytest.raises(UserError, match="corrupted.*more than 900 bytes unpacked"):
        reader.records(entry, int(start), int(stop))
    monkeypatch.setattr(array_record, "read", None)
    monkeypatch.setattr(array_record, "MOST_BYTES", (int(stop) - int(start)) // 2 - 1)
    with pytest.raises(UserError, match="corrupted.*a chunk of"):
        reader.records(entry, int(start), int(stop))


def test_a_tfrecord_file_without_a_record_at_its_end_is_not_read_through(monkeypatch):
    entry = _memory(tfrecord_file([b"x" * 10]) + b"y" * 5_000_000)
    monkeypatch.setattr(tfrecord, "MOST_BYTES", 1 << 17)
    most, read = [], tfrecord.read
    monkeypatch.setattr(tfrecord, "read", lambda shard, a, b: most.append(b - a) or read(shard, a, b))
    with pytest.raises(UserError, match="corrupted: its last"):
        TfRecords(block_bytes=1000).blocks(entry)
    assert max(most) < 1 << 20


def test_a_row_group_that_is_larger_than_it_says_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet as tables

    tables.write_table(
        pyarrow.table({"text": ["x" * 1000] * 3000}), tmp_path / "x.parquet"
    )  # one text, and its numbers
    monkeypatch.setattr(parquet, "MOST_BYTES", 1 << 20)
    with pytest.raises(UserError, match="row group of more than"):
        ShardedSource(files=(f"{tmp_path}/x.parquet",), validation_files=(f"{tmp_path}/x.parquet",)).open("train")


@pytest.mark.parametrize("name", ["block_bytes", "mix_blocks", "document_bytes"])
def test_counts_of_none_are_refused(name):
    with pytest.raises(UserError, match=rf"{name} \(0\) must be at least 1"):
        source("x.jsonl", **{name: 0})
