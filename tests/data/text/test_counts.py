"""Every source counts what it reads, and the numbers add up: of files, and of the records in them."""

import dataclasses
import gzip
import importlib
import inspect
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from capibara.config import search
from capibara.data.chat.answers import PreferenceJsonlSource, PromptJsonlSource, UnpairedJsonlSource
from capibara.data.chat.conversations import ChatJsonlSource
from capibara.data.chat.steps import StepsJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.shards.source import Format, ShardedSource
from capibara.data.sources.hugging_face import HuggingFaceSource
from capibara.data.sources.sources import (
    Blocks,
    CombinedSource,
    Documents,
    Example,
    JsonlSource,
    Source,
    StdlibSource,
    TextSource,
)
from capibara.data.text.counts import Counts, total
from tests.data.sources import odd_files

TEXTS = [{"text": f"number {i}"} for i in range(30)]
CHATS = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]} for i in range(30)]
PAIRS = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(30)]
SOLVED = [{"prompt": f"q{i}", "steps": ["a", "b"], "labels": [True, i % 2 == 0]} for i in range(30)]
RATED = [{"prompt": f"q{i}", "completion": "yes", "label": i % 2 == 0} for i in range(30)]


@pytest.fixture
def folder(tmp_path):
    """A folder of 12 file types, with an empty file, a pipe, a socket, a link to nothing and one to a folder."""
    root = tmp_path / "in"
    root.mkdir()
    lines = [json.dumps(one) + "\n" for one in TEXTS]
    (root / "a.jsonl").write_text("".join([*lines[:10], "\n", '{"text": null}\n', "  \n"]))
    (root / "b.ndjson").write_text("".join(lines[10:15]))
    (root / "c.json").write_text("".join(lines[15:20]))
    (root / "d.jsonl.gz").write_bytes(gzip.compress("".join(lines[20:25]).encode()))
    (root / "e.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress("".join(lines[25:]).encode()))
    (root / "f.jsonl").touch()
    for name in ("g.txt", "h.md", "i.csv", "j.png", "k.rst", "l.py", ".hidden.jsonl"):
        (root / name).write_text("not of a json file\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), root / "m.parquet")
    odd_files.add(root, ".jsonl")
    return root


def written(folder, records):
    """A file of lines of JSON, with two blank lines."""
    path = folder / "records.jsonl"
    path.write_text("\n\n" + "".join(json.dumps(one) + "\n" for one in records))
    return (str(path),)


def parquet(folder):
    path = folder / "texts.parquet"
    texts = [*(one["text"] for one in TEXTS), None]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=4)
    return str(path)


def sharded(folder, template):
    return ShardedSource(files=(parquet(folder),), block_bytes=1, validation_fraction=0.3)


def texts(folder, template):
    return JsonlSource(files=written(folder, [*TEXTS, {"text": None}]), validation_fraction=0.3)


def combined(folder, template):
    (folder / "more").mkdir()
    return CombinedSource(sources=(texts(folder, template), texts(folder / "more", template)))


# Each source: of a folder, the number of its records, and of those that are skipped. None: as many as it finds.
CASES = {
    StdlibSource: (lambda folder, template: StdlibSource(), None, 0),
    TextSource: (lambda folder, template: TextSource(files=written(folder, TEXTS), document_bytes=10, validation_fraction=0.3), None, 0),
    JsonlSource: (texts, 33, 3),
    HuggingFaceSource: (
        lambda folder, template: HuggingFaceSource(path="parquet", data_files=(parquet(folder),), validation_fraction=0.3),
        31,
        1,
    ),
    CombinedSource: (combined, 66, 6),
    ShardedSource: (sharded, 8, 0),  # blocks; their nulls are counted as they are read
    ChatJsonlSource: (
        lambda folder, template: ChatJsonlSource(files=written(folder, CHATS), template=template, validation_fraction=0.3),
        32,
        2,
    ),
    PreferenceJsonlSource: (
        lambda folder, template: PreferenceJsonlSource(files=written(folder, PAIRS), template=template, validation_fraction=0.3),
        32,
        2,
    ),
    PromptJsonlSource: (
        lambda folder, template: PromptJsonlSource(files=written(folder, PAIRS), template=template, validation_fraction=0.3),
        32,
        2,
    ),
    StepsJsonlSource: (
        lambda folder, template: StepsJsonlSource(files=written(folder, SOLVED), template=template, validation_fraction=0.3),
        32,
        2,
    ),
    UnpairedJsonlSource: (
        lambda folder, template: UnpairedJsonlSource(files=written(folder, RATED), template=template, validation_fraction=0.3),
        32,
        2,
    ),
}  # fmt: skip


def sources():
    """All classes of sources in the package."""
    modules = {module for module in search.defining_modules().values() if module.startswith("capibara.data.")}
    found = {
        cls
        for module in sorted(modules)
        for _, cls in inspect.getmembers(importlib.import_module(module), inspect.isclass)
    }
    return {cls for cls in found if issubclass(cls, Source) and cls.__name__ in search.defining_modules()}


def test_no_source_is_without_a_case():
    assert sources() == {*CASES}


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_the_counts_of_a_source_add_up(cls, tmp_path, monkeypatch, toy_tokenizer):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make, records, skipped = CASES[cls]
    source = make(tmp_path, ChatTemplate(tokenizer=toy_tokenizer))
    opened = {split: source.open(split) for split in ("train", "validation")}
    train, validation = opened["train"].counts, opened["validation"].counts
    noun = "blocks" if isinstance(opened["train"], Blocks) else "documents"
    for split, counts in (("train", train), ("validation", validation)):
        assert getattr(counts, noun) == len(opened[split]) > 0
        assert sum(counts.skipped.values()) == skipped
        assert {*counts.as_json()} == {"files", "bytes", noun, "held_out", "trained_on", "skipped", "files_left_out"}
    assert (train.held_out, train.trained_on) == (len(opened["validation"]), 0)
    assert (validation.held_out, validation.trained_on) == (0, len(opened["train"]))
    assert records in (None, len(opened["train"]) + train.held_out + skipped)
    if cls not in (StdlibSource, HuggingFaceSource):
        paths = [path for one in getattr(source, "sources", (source,)) for path in one.files]
        assert (train.files, train.bytes) == (len(paths), sum(map(os.path.getsize, paths)))
    assert f"{train.held_out:,} held out" in str(train) and f"{train.bytes:,} bytes" in str(train)


def test_the_counts_of_a_folder_of_12_file_types_add_up(folder, caplog):
    there = sum(len(names) + len(folders) for _, folders, names in os.walk(folder))
    read = [folder / name for name in ("a.jsonl", "b.ndjson", "c.json", "d.jsonl.gz", "e.jsonl.zst")]
    for source in (
        JsonlSource(files=(str(folder),), validation_fraction=0.3),
        ShardedSource(files=(str(folder),), format=Format.JSONL, block_bytes=100, validation_fraction=0.3),
    ):
        opened = source.open("train")
        counts = opened.counts
        assert (counts.files, counts.files_left_out, there) == (5, there - 5, 18)
        assert counts.bytes == sum(path.stat().st_size for path in read)
        assert "left out for their name or kind" in caplog.text
        caplog.clear()
        if isinstance(opened, Documents):
            assert counts.documents + counts.held_out == 30
            assert counts.skipped == {"null texts": 1, "blank lines": 2}
        else:
            validation = source.open("validation")
            assert counts.held_out == len(validation) and counts.documents is None
            both = [
                example.text for part in (opened, validation) for i in range(len(part)) for example in part.examples(i)
            ]
            assert sorted(both) == sorted(one["text"] for one in TEXTS)
    counts = TextSource(files=(str(folder),)).open("train").counts
    assert (counts.files, counts.files_left_out) == (8, there - 8)  # g, h and l, too


@pytest.mark.parametrize("is_built", [False, True])
def test_the_records_of_a_build_are_no_documents(tmp_path, is_built):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in TEXTS))
    (tmp_path / "index.json").write_text('{"text": "index"}\n')
    (tmp_path / "lineage.jsonl").write_text('{"text": "event"}\n')
    if is_built:
        (tmp_path / "manifest.json").write_text('{"text": "manifest"}\n')
    for source in (JsonlSource(files=(str(tmp_path),)), ShardedSource(files=(str(tmp_path),), block_bytes=100)):
        counts = source.open("train").counts
        assert (counts.files, counts.files_left_out) == ((1, 3) if is_built else (3, 0))


def test_a_folder_of_several_formats_is_told(folder):
    with pytest.raises(
        Exception, match=r"ShardedSource.files have several formats .*: set ShardedSource.format to one of"
    ):
        ShardedSource(files=(str(folder),)).open("train")
    (folder.parent / "empty").mkdir()
    with pytest.raises(Exception, match=r"ShardedSource.files .* is a folder without a file of shards: name files"):
        ShardedSource(files=(str(folder.parent / "empty"),)).open("train")


def test_validation_files_are_counted_by_themselves(tmp_path):
    (tmp_path / "v").mkdir()
    source = JsonlSource(files=written(tmp_path, TEXTS), validation_files=written(tmp_path / "v", TEXTS[:7]))
    assert str(source.open("train").counts) == "1 files, 700 bytes, 30 documents, 2 blank lines skipped".replace(
        "700", str(os.path.getsize(source.files[0]))
    )
    assert dataclasses.replace(source.open("validation").counts, bytes=0) == Counts(
        files=1, bytes=0, documents=7, skipped={"blank lines": 2}
    )


def test_what_is_unknown_of_one_source_is_unknown_of_all():
    known, unknown = Counts(files=1, bytes=10, documents=3, skipped={"null texts": 1}), Counts(documents=4)
    assert total([known, unknown]) == Counts(documents=7, skipped={"null texts": 1})
    assert str(Counts()) == "what is read is not counted"


def test_a_users_source_counts_its_documents():
    class Mine(Documents):
        def __len__(self):
            return 3

        def example(self, i):
            return Example("x")

        def fingerprint(self):
            return {}

    assert Mine().counts == Counts(documents=3)
