"""Opening an index: whole files, the model that has embedded it, and queries that are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import sys

import numpy as np
import pytest

import capibara as cb
from capibara.cli.composition import retrieving
from capibara.core.types import UserError
from capibara.inference.engine.reading import Pooling
from capibara.retrieval import build
from capibara.retrieval.index import Index, IndexFolder
from tests.retrieval.conftest import save_run


def with_file(folder: str, copy: pathlib.Path, name: str, content: bytes) -> str:
    """A copy of an index with another file, and a manifest that fits: what somebody may hand over."""
    shutil.copytree(folder, copy)
    (copy / name).write_bytes(content)
    manifest = json.loads((copy / "manifest.json").read_text())
    for file in manifest["files"]:
        if file["name"] == name:
            file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return str(copy)


def with_record(folder: str, copy: pathlib.Path, **values) -> str:
    record = json.loads((pathlib.Path(folder) / build.RECORD).read_text()) | values
    return with_file(folder, copy, build.RECORD, json.dumps(record).encode())


def test_python_opens_an_index_with_the_model_that_it_names(folder):
    hits = cb.index(folder).search("number 7:", k=3)
    assert len(hits) == 3 and all(hit.text and hit.path.endswith("documents.jsonl") for hit in hits)


def test_opening_an_index_leaves_what_gin_has_parsed(folder):
    cb.config.parse((), ["Trainer.steps = 7"])
    retrieving.index(folder)
    assert cb.config.is_bound("Trainer.steps")
    cb.config.reset()


@pytest.mark.parametrize("name", [build.INDEX, build.CHUNKS, build.CENTER, build.RECORD])
@pytest.mark.parametrize("change", ["torn", "flipped", "gone"])
def test_a_file_that_is_not_whole_is_named(folder, tmp_path, name, change):
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = (copy / name).read_bytes()
    middle = len(content) // 2
    if change == "gone":
        (copy / name).unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        (copy / name).write_bytes(content[:middle] if change == "torn" else flipped)
    with pytest.raises(UserError, match=f"{name} (has changed|is missing).*build the index again"):
        IndexFolder.open(str(copy))


def test_folders_that_are_no_index_are_refused(tmp_path, folder):
    with pytest.raises(UserError, match="is no folder: name one that"):
        IndexFolder.open(str(tmp_path / "none"))
    with pytest.raises(UserError, match="manifest.json does not exist"):
        IndexFolder.open(str(tmp_path))
    other = shutil.copytree(folder, tmp_path / "other")
    text = (other / "manifest.json").read_text().replace('"kind": "index"', '"kind": "corpus"')
    (other / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="holds 'corpus', no index"):
        IndexFolder.open(str(other))


def test_another_model_or_pooling_is_refused(folder, tmp_path, model):
    another = retrieving.embedder(save_run(tmp_path / "another", 1), Pooling.MEAN)
    with pytest.raises(UserError, match="another is another model than .* its weights differ"):
        Index(IndexFolder.open(folder), another)
    with pytest.raises(UserError, match="its pooling differ .'last', not 'mean'"):
        Index(IndexFolder.open(folder), retrieving.embedder(model, Pooling.LAST))


def test_a_model_that_was_moved_is_the_same(folder, model, tmp_path):
    moved = shutil.copytree(model, tmp_path / "moved")
    assert len(cb.index(folder, model=str(moved)).search("river")) == 4


@pytest.mark.parametrize(
    ("query", "k", "error"),
    [
        ("river", 0, "k is 0, must be a number of at least 1"),
        (" ", 3, "a query is empty"),
        (5, 3, "the queries are .5., must be texts"),
        ("a" * 5000, 3, "must have at most"),
    ],
)
def test_queries_are_checked(folder, embedder, query, k, error):
    with pytest.raises(UserError, match=error):
        Index(IndexFolder.open(folder), embedder).search(query, k)


def test_one_text_is_not_taken_for_several(folder, embedder):
    with pytest.raises(UserError, match="the queries are 'river', must be texts: search several by a list"):
        Index(IndexFolder.open(folder), embedder).search_many("river")


def test_a_missing_extra_is_named(folder, embedder, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"faiss is not installed \(needed for an index\): pip install .*\[retrieval\]"):
        Index(IndexFolder.open(folder), embedder)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"model": {"path": "x"}}, "does not describe an index .*pooling"),
        ({"model": []}, "does not describe an index"),
        ({"model": {"path": 1, "pooling": "mean", "weights": "", "tokenizer": ""}}, "as chunks, dims and effort of 1, must be"),
        ({"model": {"path": "x", "pooling": "sum", "weights": "", "tokenizer": ""}}, "'sum' is not a valid Pooling"),
        ({"chosen": {}}, "does not describe an index .*effort"),
        ({"chunks": "400"}, "must be numbers of at least 1 and a path"),
        ({"chunks": 0}, "must be numbers of at least 1 and a path"),
        ({"dims": True}, "must be numbers of at least 1 and a path"),
    ],
)  # fmt: skip
def test_a_record_that_describes_no_index_is_refused(folder, tmp_path, values, error):
    with pytest.raises(UserError, match=f"index.json .*{error}.*: build the index again"):
        IndexFolder.open(with_record(folder, tmp_path / "copy", **values))


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        (build.INDEX, lambda content: content[:-9], "index.faiss is no index .* more are declared at byte"),
        (build.INDEX, lambda content: b"", "index.faiss is no index .cannot mmap an empty file"),
        (build.INDEX, lambda content: b"\x93NUMPY" + content, "is no index .an index of the kind b'.+x93NUM'"),
        (build.INDEX, lambda content: content[:8] + b"\xff\xff\xff\x7f" + content[12:], "as its vectors, must be"),
        (build.CENTER, lambda content: content[:-4], "center.f32 has 124 bytes, must have 128"),
        (build.CENTER, lambda content: content[:-4] + b"\0\0\xc0\x7f", "center.f32 has values that are not finite"),
        (build.CHUNKS, lambda content: content[: content.rindex(b"\n", 0, -1) + 1], r"has [\d,]+ chunks, must have"),
    ],
)
def test_a_file_that_fits_its_manifest_and_lies_is_refused(folder, tmp_path, embedder, name, change, error):
    content = change((pathlib.Path(folder) / name).read_bytes())
    copy = with_file(folder, tmp_path / "copy", name, content)
    with pytest.raises(UserError, match=f"{error}.*: build the index again"):
        Index(IndexFolder.open(copy), embedder)


def test_an_effort_that_was_not_tried_is_refused(folder, embedder):
    with pytest.raises(UserError, match="searches with effort 1,000,000,000, must be one of"):
        Index(dataclasses.replace(IndexFolder.open(folder), effort=10**9), embedder)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"[]", "no chunk"),
        (b"no JSON", "no chunk"),
        (b"[" * 200 + b"]" * 200, "nested deeper"),
        (b'{"path": "a", "document": 1, "start": 0, "end": 1}', "missing 1 required .*'text'"),
        (b'{"path": "a", "document": 1, "start": 0, "end": "1", "text": "b"}', "its end is no int"),
        (b'{"path": "a", "document": 1, "start": 0, "end": 1, "text": ["b"]}', "its text is no str"),
    ],
)
def test_a_line_that_is_no_chunk_is_named(folder, tmp_path, embedder, line, error):
    lines = (pathlib.Path(folder) / build.CHUNKS).read_bytes().splitlines()
    content = b"".join(item + b"\n" for item in [lines[0], line, *lines[2:]])
    index = Index(IndexFolder.open(with_file(folder, tmp_path / "copy", build.CHUNKS, content)), embedder)
    with pytest.raises(UserError, match=f"chunks.jsonl:2 .*{error}.*: build the index again"):
        index.chunk(1)


def test_links_out_of_the_folder_pipes_and_files_that_are_not_listed_are_refused(folder, tmp_path):
    for name, put in (
        ("link", lambda path: path.symlink_to(pathlib.Path(folder) / build.CHUNKS)),
        ("pipe", os.mkfifo),
        ("folder", os.mkdir),
    ):
        copy = shutil.copytree(folder, tmp_path / name)
        (copy / build.CHUNKS).unlink()
        put(copy / build.CHUNKS)
        with pytest.raises(UserError, match="a link out of its folder|must be a regular file"):
            IndexFolder.open(str(copy))
    copy = shutil.copytree(folder, tmp_path / "unlisted")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"] = [file for file in manifest["files"] if file["name"] != build.INDEX]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="does not list index.faiss: build the index again"):
        IndexFolder.open(str(copy))


def test_a_model_that_has_diverged_embeds_nothing(embedder, monkeypatch):
    monkeypatch.setattr(embedder, "_embed", lambda params, batch: np.full((len(batch["tokens"]), 32), np.nan))
    with pytest.raises(UserError, match="embeds a text as values that are not finite: name a model"):
        embedder(["river"])


def test_nothing_of_the_folder_is_executed(folder):
    assert not [name for name in os.listdir(folder) if name.endswith((".pkl", ".pickle", ".pt", ".npy"))]
