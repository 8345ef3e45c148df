"""Corpora in every shard format, whose documents each name their own number, and a cache of its own for every test."""

from __future__ import annotations

import json

import fsspec
import google_crc32c
import numpy as np
import pytest

from capibara.data.shards.tfrecord import masked

FORMATS = ("jsonl", "parquet", "array_record", "tfrecord", "text")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def texts_of(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Short lines that begin with their number."""
    rng = np.random.default_rng(seed)
    return [f"<{i}>" + "x" * int(rng.integers(1, longest)) for i in range(count)]


def tfrecord(contents: list[bytes]) -> bytes:
    """A file as TensorFlow writes it."""
    parts = []
    for content in contents:
        head = len(content).to_bytes(8, "little")
        checks = [masked(google_crc32c.value(part)).to_bytes(4, "little") for part in (head, content)]
        parts += [head, checks[0], content, checks[1]]
    return b"".join(parts)


def shard(kind: str, texts: list[str], folder) -> bytes:
    """The bytes of a file of a format with these documents."""
    records = [json.dumps({"text": text}).encode() for text in texts]
    if kind == "jsonl":
        return b"".join(record + b"\n" for record in records)
    if kind == "text":
        return "".join(f"{text}\n" for text in texts).encode()
    if kind == "tfrecord":
        return tfrecord(records)
    path = folder / f"written.{kind}"
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"number": list(range(len(texts))), "text": texts})
        parquet.write_table(table, path, row_group_size=4)
    else:
        module = pytest.importorskip("array_record.python.array_record_module")
        writer = module.ArrayRecordWriter(str(path), "group_size:3")
        for record in records:
            writer.write(record)
        writer.close()
    return path.read_bytes()


@pytest.fixture
def corpus(tmp_path):
    """(format, documents, shards) -> the glob of its files in a store in memory."""
    store = fsspec.filesystem("memory")
    store.store.clear()

    def make(kind: str, count: int = 97, shards: int = 5, longest: int = 60) -> str:
        texts = texts_of(count, longest=longest)
        for i in range(shards):
            store.pipe_file(f"/corpus/part-{i:05}.{kind}", shard(kind, texts[i::shards], tmp_path))
        return f"memory://corpus/part-*.{kind}"

    yield make
    store.store.clear()
