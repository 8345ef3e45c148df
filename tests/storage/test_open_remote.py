"""Gin files, tokenizers, texts and foreign models are opened at addresses as at local paths."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from capibara.config import search as gin_search
from capibara.core.types import UserError
from capibara.data.chat.template import ChatTemplate
from capibara.data.sources.sources import JsonlSource, TextSource
from capibara.data.tokenizers import files as tokenizer_files
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.interop import open_model


def put(store, folder: str, address: str) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            path = pathlib.Path(root, name)
            store.pipe_file(f"{address}/{path.relative_to(folder)}", path.read_bytes())


@pytest.fixture(autouse=True)
def no_copies_of_others():
    tokenizer_files.local.cache_clear()
    open_model.local_model.cache_clear()


def test_a_gin_file_and_what_it_includes(store):
    from capibara import config

    store.pipe({"/gin/run.gin": b"include 'base.gin'\nSTEPS = 3\n", "/gin/base.gin": b"STEPS = 1\nWIDTH = 5\n"})
    config.parse(["flaky://gin/run.gin"], [])
    found = gin_search.find_file("flaky://gin/run.gin", gin_search.search_folders())
    assert found.read_text().endswith("STEPS = 3\n") and (found.parent / "base.gin").exists()
    with pytest.raises(UserError, match=r"no Gin file flaky://gin/rum.gin, did you mean flaky:///gin/run.gin\?"):
        config.parse(["flaky://gin/rum.gin"], [])


def test_a_tokenizer_with_its_template(store, toy_tokenizer):
    put(store, toy_tokenizer, "/toy")
    store.pipe_file("/toy/model.safetensors", b"much")
    here = TokenizerJsonVocabulary(path=toy_tokenizer)
    for path, names in (("flaky://toy", {}), ("flaky://toy/tokenizer.json", {"eos_token": "<|end|>"})):
        there = TokenizerJsonVocabulary(path=path, **names)
        assert there.fingerprint() == here.fingerprint() and there.encode("as it is") == here.encode("as it is")
        template = ChatTemplate(tokenizer=path)
        assert template.fingerprint() == ChatTemplate(tokenizer=toy_tokenizer).fingerprint()
    assert not any("safetensors" in path for path, *_ in store.reads)
    with pytest.raises(UserError, match="flaky:///none does not exist"):
        TokenizerJsonVocabulary(path="flaky://none").fingerprint()


def test_small_corpora_are_copied(store, tmp_path):
    store.pipe({"/c/a.jsonl": b'{"text": "a"}\n{"text": "b"}\n', "/c/b.txt": b"some text\n" * 9})
    assert len(JsonlSource(files=("flaky://c/*.jsonl",)).open("train")) == 1
    (tmp_path / "b.txt").write_bytes(b"some text\n" * 9)
    sources = [TextSource(files=(files,), document_bytes=20) for files in ("flaky://c/*.txt", str(tmp_path / "b.txt"))]
    prints = [source.open("train").fingerprint() for source in sources]
    assert prints[0] == prints[1]
    with pytest.raises(UserError, match=r"JsonlSource.files \('flaky://c/\*.json'\) matches no file"):
        JsonlSource(files=("flaky://c/*.json",)).open("train")


def test_a_folder_of_a_bucket_is_read_as_one_on_disk(store, tmp_path):
    files = {
        "a.jsonl": b'{"text": "a"}\n',
        "in/b.jsonl": b'{"text": "b"}\n{"text": "c"}\n',
        "pictures/c.png": b"x",
        ".d.jsonl": b"{",
    }
    files |= {
        ".hidden/e.jsonl": b"{",
        "built/manifest.json": b"{}",
        "built/leaks.jsonl": b"{",
        "built/f.jsonl": b'{"text": "f"}\n',
    }
    for name, content in files.items():
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_bytes(content)
    store.pipe({f"/d/{name}": content for name, content in files.items()})
    there, here = (JsonlSource(files=(folder,)).open("train") for folder in ("flaky://d", str(tmp_path / "here")))
    assert [there.example(i).text for i in range(len(there))] == [here.example(i).text for i in range(len(here))]
    assert there.counts.files == here.counts.files == 3 and there.counts.files_left_out == 5
    with pytest.raises(
        UserError, match=r"TextSource.files \('flaky://d/pictures'\) is a folder without a file of .*: name"
    ):
        TextSource(files=("flaky://d/pictures",)).open("train")


def test_files_of_a_bucket_that_are_trained_on_and_validated_on_are_told(store, caplog):
    store.pipe({f"/o/{name}.jsonl": b'{"text": "a"}\n' for name in "ab"})
    for files, is_told in (("flaky://o/*.jsonl", True), ("flaky://o", True), ("flaky://gone", False)):
        JsonlSource(files=(files,), validation_files=("flaky://o/b.jsonl",)).open("validation")
        assert ("have 1 in common, such as flaky:///o/b.jsonl" in caplog.text) == is_told
        caplog.clear()


def test_large_corpora_are_not(store, monkeypatch):
    from capibara.data.text import disk

    monkeypatch.setattr(disk, "COPY_BYTES", 10)
    store.pipe({"/c/a.jsonl": b'{"text": "a"}\n{"text": "b"}\n'})
    with pytest.raises(UserError, match="use @ShardedSource"):
        JsonlSource(files=("flaky://c/*.jsonl",)).open("train")


def test_a_model_of_hugging_face(store, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    put(store, str(tmp_path), "/model")
    foreign = open_model.open_model("flaky://model")
    assert foreign.config == {"model_type": "llama"} and foreign.shapes() == {"w": (2, 3)}
    np.testing.assert_array_equal(foreign.read("w"), np.arange(6, dtype=np.float32).reshape(2, 3))
    with pytest.raises(UserError, match="flaky:///nothing does not exist"):
        open_model.open_model("flaky://nothing")
    with pytest.raises(UserError, match="flaky://nothing/a.gguf does not exist"):
        open_model.open_model("flaky://nothing/a.gguf")
    shutil.rmtree(tmp_path)
