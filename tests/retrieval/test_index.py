"""Opening an index: whole files, the model that has embedded it, and queries that are refused."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

import capibara as cb
from capibara.cli.composition import retrieving
from capibara.core.types import UserError
from capibara.inference.engine.reading import Pooling
from capibara.retrieval import build
from capibara.retrieval.index import Index, IndexFolder
from tests.retrieval.conftest import save_run


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
        ("a" * 5000, 3, "must have at most"),
    ],
)
def test_queries_are_checked(folder, embedder, query, k, error):
    with pytest.raises(UserError, match=error):
        Index(IndexFolder.open(folder), embedder).search(query, k)


def test_a_missing_extra_is_named(folder, embedder, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"faiss is not installed \(needed for an index\): pip install .*\[retrieval\]"):
        Index(IndexFolder.open(folder), embedder)


def test_nothing_of_the_folder_is_executed(folder):
    assert not [name for name in os.listdir(folder) if name.endswith((".pkl", ".pickle", ".pt", ".npy"))]
