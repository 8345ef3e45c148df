"""A checkpoint's data is named by the data sets that its files belong to, or by the files."""

from __future__ import annotations

import hashlib
import json
import types

import pytest

from capibara.data.dataset import Dataset
from capibara.data.pipeline import task_feed as feed
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import CombinedSource, JsonlSource, TextSource
from capibara.data.text import provenance
from capibara.data.tokenizers.vocabulary import ByteVocabulary


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def built(tmp_path):
    """The output folder of a builder with two files, one of them in a folder."""
    folder = tmp_path / "built"
    (folder / "more").mkdir(parents=True)
    for name in ("train.jsonl", "more/x.jsonl"):
        (folder / name).write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(9)))
    files = [
        {"name": name, "bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name), "records": 9}
        for name in ("train.jsonl", "more/x.jsonl")
    ]
    document = {"format": 1, "kind": "playbooks", "fingerprint": "f" * 64, "files": files}
    (folder / "manifest.json").write_text(json.dumps(document))
    return folder


def entry(folder, files):
    return {"path": str(folder), "kind": "playbooks", "fingerprint": "f" * 64, "files": files}


def test_the_files_of_a_builder_are_one_data_set(built):
    source = JsonlSource(files=(str(built / "*.jsonl"), str(built / "more/x.jsonl")))
    assert provenance.of_source(source) == [entry(built, 2)]


def test_relative_names_are_made_absolute(built, monkeypatch):
    monkeypatch.chdir(built)
    assert provenance.of_source(JsonlSource(files=("train.jsonl",))) == [entry(built, 1)]


def test_other_files_stand_for_themselves(built, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    source = CombinedSource(
        sources=(TextSource(files=(str(tmp_path / "a.txt"),)), JsonlSource(files=(str(built / "train.jsonl"),)))
    )
    plain = {"path": str(tmp_path / "a.txt"), "bytes": 9, "sha256": sha256(tmp_path / "a.txt")}
    assert provenance.of_source(source) == [entry(built, 1), plain]


def test_a_file_that_was_changed_after_it_was_built_stands_for_itself(built):
    path = built / "train.jsonl"
    path.write_text(path.read_text().replace("train", "TRAIN"))
    plain = {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256(path)}
    assert provenance.of_paths([str(path)]) == [plain]


def test_large_corpora_are_known_by_their_sizes(built, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "HASH_BYTES", 10)
    (tmp_path / "a.txt").write_text("some text")
    found = provenance.of_paths([str(tmp_path / "a.txt"), str(built / "train.jsonl")])
    assert found == [entry(built, 1), {"path": str(tmp_path / "a.txt"), "bytes": 9}]


def test_many_files_are_one_entry(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "NAMED", 3)
    paths = [tmp_path / f"{i}.txt" for i in range(4)]
    for path in paths:
        path.write_text("text")
    [found] = provenance.of_paths(map(str, paths))
    assert (found["path"], found["files"], found["bytes"]) == (str(tmp_path), 4, 16)
    paths[0].write_text("TEXT")
    assert provenance.of_paths(map(str, paths)) != [found]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"steps": [1], "files": []}', '{"kind": 1, "fingerprint": 2, "files": [{}]}']
)
def test_other_manifests_are_ignored(tmp_path, text):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "manifest.json").write_text(text)
    assert "kind" not in provenance.of_paths([str(tmp_path / "a.txt")])[0]


def test_a_task_has_the_data_sets_of_what_its_sources_list(built):
    shards = {"train": [str(built / "train.jsonl"), "a shard that is no file"], "validation": ["none"]}
    part = types.SimpleNamespace(splits=list(shards), source=types.SimpleNamespace(list_shards=shards.get))
    mixture = types.SimpleNamespace(splits=list(shards), tasks=[part, part])
    assert feed._datasets(part, "train", False) == feed._datasets(mixture, "train", False) == [entry(built, 1)]
    assert feed._datasets(part, "validation", False) == feed._datasets(part, "test", False) == []


def test_a_source_without_files_has_no_data_sets(tmp_path):
    assert provenance.of_source(None) == provenance.of_source(JsonlSource(files=(str(tmp_path / "none*"),))) == []


def test_the_state_of_a_loader_names_what_it_reads_and_ignores_it_when_it_resumes(built):
    dataset = Dataset(
        source=JsonlSource(files=(str(built / "train.jsonl"),)), vocabulary=ByteVocabulary(), length=32, workers=0
    )
    loader = make_loader(dataset, batch_size=2)
    state = loader.get_state()
    assert state["datasets"] == [entry(built, 1)]
    (built / "manifest.json").unlink()
    again = make_loader(dataset, batch_size=2)
    again.set_state(state)
    next(again)
    assert again.get_state()["datasets"][0]["path"] == str(built / "train.jsonl")
    again.close()
