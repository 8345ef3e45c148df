"""A corpus is read from a bucket, and Beam's output may be in one."""

import fsspec
import pytest

from capibara.builders.files import fingerprints
from capibara.builders.files.problems import Problems
from capibara.builders.preparation import bucket, documents
from capibara.core.types import UserError
from capibara.storage import stores
from tests.builders.preparation import corpora
from tests.builders.preparation.test_build import SMALL, files, prepare

INPUT = fingerprints.Input(path="gs://bucket/in.jsonl", bytes=3, sha256="0" * 64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_files_in_a_bucket_are_read_as_local_ones(tmp_path):
    corpora.write_corpus(tmp_path / "in", 12)
    store = fsspec.filesystem("memory")
    for path in (tmp_path / "in").iterdir():
        store.pipe_file(f"/prepared/{path.name}", path.read_bytes())
    expected = prepare(tmp_path / "in", tmp_path / "local")
    found = prepare("memory://prepared/*", tmp_path / "out")
    assert found.counts == expected.counts
    shards = [
        {name: content for name, content in files(tmp_path / out).items() if "array_record" in name}
        for out in ("local", "out")
    ]
    assert shards[0] == shards[1] and len(shards[0]) > 0
    assert [(one.bytes, one.sha256) for one in found.inputs] == [(one.bytes, one.sha256) for one in expected.inputs]
    store.rm("/prepared", recursive=True)


def test_empty_files_in_a_bucket_are_counted(tmp_path):
    store = fsspec.filesystem("memory")
    store.pipe_file("/partly/a.txt", corpora.text(0).encode())
    for name in ("b.txt", "c.jsonl"):
        store.pipe_file(f"/partly/{name}", b"")
    manifest = prepare("memory://partly/*", tmp_path / "out")
    assert (manifest.counts["files"], manifest.counts["files_left_out"]) == (1, 2)
    found = [(one.path.rpartition("/")[2], one.kind) for one in manifest.problems]
    assert found == [("b.txt", "empty"), ("c.jsonl", "empty")]
    store.rm("/partly", recursive=True)


def test_a_missing_address_is_refused():
    with pytest.raises(UserError, match="memory://nothing/.*matches no file"):
        documents.files_of(["memory://nothing/*.jsonl"], Problems())


def opened(config=None, inputs=(INPUT,)):
    return bucket.BucketOutput("gs://bucket/out", "corpus", SMALL.as_json() if config is None else config, inputs)


def test_an_output_in_a_bucket_is_whole_or_resumed(gs):
    with opened() as output:
        assert output.done() is None and output.parts.done("a") is None
        with output.part("a") as part:
            part.write(b"content")
            part.records = 2
            part.counts["kept"] += 5
        with pytest.raises(ValueError), output.part("b") as part:
            part.write(b"half")
            raise ValueError
    again = opened()
    assert again.parts.done("a").file.records == 2 and again.parts.done("b") is None
    assert stores.of(again.parts.path("a")).read(again.parts.path("a")) == b"content"
    manifest = again.finish({"kept": 1}, Problems())
    of_input = {"files": 1, "file_bytes": 3, "files_left_out": 0, "skipped": 0}
    assert manifest.counts == {"kept": 6, **of_input} and [one.name for one in manifest.files] == ["a"]
    assert opened().done() == manifest and opened().parts.all() == []
    for other in (opened({"length": 3}), opened(inputs=())):
        assert other.parts.done("a") is None  # another build's
        with pytest.raises(UserError, match="was built with other inputs, settings or version"):
            other.done()
