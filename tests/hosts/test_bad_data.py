"""Bad data and buckets, as two hosts of a run meet them: one line on each, in time. What finds them has its own tests."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import time

import pytest

hosts = sys.modules["of_hosts_conftest"]
WITHIN_S = 60  # of a busy machine
pytestmark = [pytest.mark.heavy, pytest.mark.fault(65)]


def _load(path: str):
    file = pathlib.Path(__file__).parent / path
    spec = importlib.util.spec_from_file_location(f"of_{file.parent.name}_conftest_for_bad_data", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shards = _load("../data/shards/conftest.py")


@pytest.fixture
def refused(cluster, shell):
    """(flags, environment) -> the line of each of two hosts that train."""

    def run(*flags: str, **environment: str) -> list[str]:
        two, began_s = cluster("flags", 2), time.monotonic()
        asked = ("--gin_file=tiny.gin", "--gin.TRAIN_STEPS=2", *flags)
        ends = two.run("train", *asked, XDG_CACHE_HOME=str(shell.folder / "cache"), **environment)
        assert time.monotonic() - began_s < WITHIN_S
        assert [one.code for one in ends] == [2, 2], [(one.code, one.out[-500:], one.err[-2000:]) for one in ends]
        lines = [[line for line in one.err.splitlines() if line.startswith("error: ")] for one in ends]
        assert [len(one) for one in lines] == [1, 1] and not any("Traceback" in one.err for one in ends), ends
        assert not any("step      1/" in one.out for one in ends)
        return [line for (line,) in lines]

    return run


def of_shards(shell, name: str, kind: str, count: int, cut: int | None = None) -> tuple[str, ...]:
    """Flags of a corpus of so many files, of which one is `cut` in its middle."""
    folder = shell.folder / name
    folder.mkdir()
    texts = shards.texts_of(400)
    for i in range(count):
        content = shards.shard(kind, texts[i::count], folder)
        (folder / f"part-{i:05}.{kind}").write_bytes(content[: len(content) // 2] if i == cut else content)
    (folder / f"written.{kind}").unlink(missing_ok=True)
    source = f"--gin.ShardedSource.files=('{folder}/part-*.{kind}',)"
    return "--gin.Dataset.source=@ShardedSource()", source, f"--gin.MODEL_DIR='{name}_run'"


@pytest.mark.parametrize("kind", ["parquet", "array_record", "tfrecord", "jsonl"])
def test_a_shard_that_is_cut_short_is_named(refused, shell, kind):
    for line in refused(*of_shards(shell, f"cut_{kind}", kind, 4, cut=2)):
        assert f"part-00002.{kind}" in line


def test_fewer_shards_than_hosts_are_shared(cluster, shell):
    """One file has blocks for all."""
    flags = (*of_shards(shell, "one", "jsonl", 1), "--gin.ShardedSource.block_bytes=1000")
    done = cluster("flags", 2).run("train", "--gin_file=tiny.gin", "--gin.TRAIN_STEPS=2", *flags)
    assert [one.code for one in done] == [0, 0], [one.err[-2000:] for one in done]


def test_fewer_blocks_than_rows_are_refused(refused, shell):
    flags = of_shards(shell, "few", "jsonl", 1)
    for line in refused(*flags):
        assert "has 4 blocks for the 8 rows of a batch (Plan.batch_size) on 2 hosts" in line


@pytest.mark.fault(66)
def test_a_bucket_without_permission_is_named(refused, bucket_server):
    with bucket_server.failing(lambda method, path: 403):
        for line in refused("--gin.MODEL_DIR='gs://bucket/closed'", **bucket_server.environment):
            assert "permission denied in gs://bucket" in line


def test_data_in_a_bucket_without_permission_is_named(refused, bucket_server):
    files = "--gin.ShardedSource.files=('gs://bucket/corpus/*.jsonl',)"
    flags = ("--gin.Dataset.source=@ShardedSource()", files, "--gin.MODEL_DIR='closed_data'")
    with bucket_server.failing(lambda method, path: 403):
        for line in refused(*flags, **bucket_server.environment):
            assert "gs://bucket/corpus/*.jsonl may not be read with this machine's credentials" in line
