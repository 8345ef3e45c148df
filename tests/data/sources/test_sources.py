"""Sources: what they read, how they split, and the one line they say about bad input."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import pyarrow
import pytest

from capibara.core.types import UserError
from capibara.data.shards.source import ShardedSource
from capibara.data.sources.hugging_face import HuggingFaceSource
from capibara.data.sources.sources import JsonlSource, StdlibSource, TextSource


def texts(documents) -> list[str]:
    return [documents[i] for i in range(len(documents))]


def test_the_standard_library():
    train, validation = StdlibSource().open("train"), StdlibSource().open("validation")
    paths = StdlibSource().paths("train"), StdlibSource().paths("validation")
    assert not set(paths[0]) & set(paths[1]) and all(list(part) == sorted(part) for part in paths)
    assert len(train) > 300 and 0.01 < len(validation) / len(train) < 0.06
    assert not any("/test/" in path or "site-packages" in path for path in paths[0])
    assert train.fingerprint() == StdlibSource().open("train").fingerprint() != validation.fingerprint()
    assert sum(map(len, texts(validation))) > 50_000


def test_text_files_are_cut_at_line_ends_and_lose_nothing(tmp_path):
    lines = [f"line {i} " + "é" * (i % 50) + "\n" for i in range(500)]
    (tmp_path / "a.txt").write_text("".join(lines[:400]))
    (tmp_path / "b.txt").write_text("".join(lines[400:]))
    (tmp_path / "v.txt").write_text("held out")
    source = TextSource(
        files=(str(tmp_path / "[ab].txt"),), validation_files=(str(tmp_path / "v.txt"),), document_bytes=1000
    )
    parts = texts(source.open("train"))
    assert "".join(parts) == "".join(lines) and len(parts) > 15
    assert all(part.endswith("\n") for part in parts)
    assert texts(source.open("validation")) == ["held out"]


def test_a_file_without_lines_is_cut_between_characters(tmp_path):
    (tmp_path / "a.txt").write_text("漢字" * 1000)
    source = TextSource(files=(str(tmp_path / "a.txt"),), document_bytes=500)
    parts = texts(source.open("train")) + texts(source.open("validation"))
    assert len(parts) > 10 and not any("\ufffd" in part for part in parts)


def test_jsonl_reads_every_line_once(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "one"}\n\n{"body": "two"}\r\n\r\n{"body": "three"}')
    source = JsonlSource(files=(str(path),), field="body")
    train, validation = texts(source.open("train")), texts(source.open("validation"))
    assert sorted(train + validation) == ["one", "three", "two"] and train and validation


def test_a_document_keeps_its_side_when_others_are_added(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": str(i)}) for i in range(2000)]
    path.write_text("\n".join(lines[:1000]) + "\n")
    source = JsonlSource(files=(str(path),), validation_fraction=0.1)
    before = set(texts(source.open("validation")))
    path.write_text("\n".join(lines) + "\n")
    after = set(texts(source.open("validation")))
    assert 50 < len(before) < 150 and before <= after


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n{"text": "c"}\n', r"a.jsonl:2 is not JSON"),
        (b'{"text": "a"}\n\n{"txt": "b"}\n', r"a.jsonl:3 has no field 'text' \(it has: txt\): set JsonlSource.field"),
        (b'{"text": "a"}\n["b"]\n', r"a.jsonl:2 is no JSON object but a list: write one object a line"),
        (b'{"text": "a"}\n{"text": 7}\n', r"a.jsonl:2: field 'text' must be a string, not a number"),
        (b"\xff\xfe\n\x00\n", r"a.jsonl:\d is not JSON"),
        (b"", r"the corpus is empty"),
        (b"\n\n\n", r"the corpus is empty"),
        (b'{"text": "a"}\n', r"has 1 document: none can be held out"),
        (b'{"text": "a"\n', r"a.jsonl:1 is not JSON"),
        (b'{"txt": "a"}\n', r"a.jsonl:1 has no field 'text'"),
    ],
)
def test_bad_jsonl(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    source = JsonlSource(files=(str(tmp_path / "a.jsonl"),))
    with pytest.raises(UserError, match=message) as caught:
        source.open("train")
        source.open("validation")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [TextSource, JsonlSource])
def test_missing_and_empty_files(tmp_path, make):
    with pytest.raises(UserError, match=r"files \('.*nothing-\*'\) matches no file"):
        make(files=(str(tmp_path / "nothing-*"),)).open("train")
    with pytest.raises(UserError, match="files is empty: name at least one"):
        make(files=()).open("train")
    (tmp_path / "empty").write_text("")
    with pytest.raises(UserError, match="the corpus is empty"):
        make(files=(str(tmp_path / "empty"),)).open("train")
    with pytest.raises(UserError, match="split"):
        make(files=(str(tmp_path / "empty"),)).open("test")
    for path, what in (("/dev/null", "is no regular file"), (str(tmp_path / "link"), "is a link to nothing")):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("nowhere")
        with pytest.raises(UserError, match=f"files \\('{path}'\\) {what}: name a file, a folder or a glob"):
            make(files=(path,)).open("train")


@pytest.mark.parametrize("make", [TextSource, JsonlSource, HuggingFaceSource, ShardedSource, StdlibSource])
def test_a_fraction_that_is_none_is_told_with_its_parameter(make):
    others = {one.name: ("x",) for one in dataclasses.fields(make) if one.name == "files"}
    others |= {"path": "x"} if make is HuggingFaceSource else {}
    for fraction in (0.0, 1.0, 1.5, -0.1):
        with pytest.raises(
            UserError, match=f"^{make.__name__}.validation_fraction \\({fraction}\\) must lie between 0 and 1"
        ):
            make(**others, validation_fraction=fraction)


@pytest.mark.parametrize("make", [TextSource, JsonlSource, ShardedSource])
def test_files_that_are_trained_on_and_validated_on_are_told(tmp_path, make, caplog):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "again.jsonl").symlink_to(tmp_path / "a.jsonl")
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("a", "b", "c", "again")}
    # Where only the validation split is read, the files of training need not be there.
    for files in ((paths["a"], paths["b"]), (str(tmp_path / "elsewhere"), "nothing://there/*.jsonl")):
        make(files=files, validation_files=(paths["c"],)).open("validation")
        assert not caplog.records
    for files in ((paths["a"], paths["b"]), (str(tmp_path / "[ab].jsonl"),)):
        make(files=files, validation_files=(paths["c"], paths["again"])).open("validation")
        (record,) = caplog.records
        assert record.getMessage() == (
            f"{make.__name__}.validation_files and files have 1 in common, such as {paths['again']}: "
            "their loss is that of training documents"
        )
        caplog.clear()
    make(files=(str(tmp_path),), validation_files=(paths["c"],)).open("validation")
    (record,) = caplog.records  # without what a folder of training has besides
    assert f"have 1 in common, such as {paths['c']}" in record.getMessage()


@pytest.mark.parametrize("make", [TextSource, JsonlSource])
def test_an_empty_validation_file_is_named(tmp_path, make):
    (tmp_path / "empty").write_text("")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    source = make(files=(str(tmp_path / "a.jsonl"),), validation_files=(str(tmp_path / "empty"),))
    assert len(source.open("train")) == 1
    with pytest.raises(UserError, match=r"Source.validation_files \(.*empty\) have no .*: the corpus is empty"):
        source.open("validation")


def test_fingerprints_follow_the_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n" * 10)
    source = TextSource(files=(str(path),), document_bytes=8)
    first = source.open("train").fingerprint()
    path.touch()
    assert source.open("train").fingerprint() == first
    path.write_text("one\nTwo\n" * 10)
    assert source.open("train").fingerprint() != first


class _Table(list):
    """As much of a Hugging Face dataset as the source uses."""

    column_names = ("body", "id")
    _fingerprint = "abc"
    cache_files = ()  # it is in memory

    @property
    def data(self):
        return pyarrow.Table.from_pylist(list(self))

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def test_hugging_face(monkeypatch, tmp_path):
    table = _Table({"body": f"text {i}", "id": i} for i in range(100))

    def load_dataset(path, name=None, split=None, **files):
        if path != "known":
            raise FileNotFoundError(f"Couldn't find\n{path}")
        assert (name, split, files) == (None, "train", {"data_files": ["x.csv"]})
        return table

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = HuggingFaceSource(path="known", field="body", data_files=("x.csv",), validation_fraction=0.2)
    train, validation = source.open("train"), source.open("validation")
    assert sorted(texts(train) + texts(validation)) == sorted(f"text {i}" for i in range(100))
    assert train.fingerprint() != validation.fingerprint()
    with pytest.raises(UserError, match=r"field \('text'\) is not one of body, id"):
        HuggingFaceSource(path="known", data_files=("x.csv",)).open("train")
    with pytest.raises(UserError, match="Couldn't find unknown") as caught:
        HuggingFaceSource(path="unknown").open("train")
    assert "\n" not in str(caught.value)


def test_null_texts_of_a_data_set_are_skipped_and_counted(monkeypatch, caplog):
    table = _Table({"body": None if i % 10 == 3 else f"text {i}", "id": i} for i in range(100))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: table))
    source = HuggingFaceSource(path="known", field="body", validation_fraction=0.2)
    found = texts(source.open("train")) + texts(source.open("validation"))
    assert sorted(found) == sorted(f"text {i}" for i in range(100) if i % 10 != 3)
    assert "10 of 100 texts are null: skipped" in caplog.text
    table[:] = [{"body": None, "id": 0}] * 3
    with pytest.raises(UserError, match="no row with a text"):
        source.open("train")


def test_hugging_face_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install -e .*\[hf\]"):
        HuggingFaceSource(path="x").open("train")
