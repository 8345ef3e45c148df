"""Whatever is in a folder is counted: every file is read or told, every document kept or dropped by a count."""

import dataclasses
import gzip
import json
import os
import unicodedata

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from capibara.builders.preparation import stages
from capibara.builders.preparation.filters import Filter, Judged
from capibara.core.types import UserError
from tests.builders.preparation.corpora import text
from tests.builders.preparation.test_build import SMALL, prepare
from tests.data.sources import odd_files


@pytest.fixture
def folder(tmp_path):
    """A folder of 12 file types, with an empty file, a pipe, a socket, a link to nothing and one to a folder."""
    root = tmp_path / "in"
    root.mkdir()
    lines = [json.dumps({"text": text(i)}) for i in range(10)]
    (root / "a.jsonl").write_text("\n".join([*lines[:4], "", '{"text": null}', "{broken"]) + "\n")
    (root / "b.ndjson").write_text("\n".join([*lines[4:6], lines[0]]) + "\n")
    (root / "c.json").write_text(json.dumps([{"text": text(6)}, {"other": 1}]))
    pyarrow.parquet.write_table(pyarrow.table({"text": [text(7), None]}), root / "d.parquet")
    (root / "e.txt").write_text(text(20, 200))
    (root / "f.md").write_text(text(21, 200))
    (root / "g.jsonl.gz").write_bytes(gzip.compress(f"{lines[8]}\n".encode()))
    (root / "h.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text(22, 200).encode()))
    (root / "i.txt").write_bytes("Größe\n".encode("utf-16"))
    for name in ("j.csv", "k.png", "l.rst", ".hidden.txt"):
        (root / name).write_text("x")
    (root / "m.txt").touch()
    odd_files.add(root, ".jsonl")
    return root


def test_the_counts_of_a_folder_of_12_file_types_add_up(folder, tmp_path):
    manifest = prepare(folder, tmp_path / "out")
    counts, problems = manifest.counts, manifest.problems
    there = sum(len(names) + len(folders) for _, folders, names in os.walk(folder))
    of_files = {one.path for one in problems if not one.line} - {one.path for one in manifest.inputs}
    assert counts["files"] + len(of_files) == there == 18
    assert counts["files"] == len(manifest.inputs) == 9
    assert counts["file_bytes"] == sum(os.path.getsize(one.path) for one in manifest.inputs)
    # Left out: j, k, l, the hidden one, the link to a folder, and the empty file. Skipped: three that cannot be opened, a
    # text in UTF-16, two nulls, a broken line, an object without the field.
    assert counts["files_left_out"] == 6
    assert counts["skipped"] == problems.total - 6 == 8
    assert problems.counts == {
        "empty": 1, "encoding": 1, "left_out": 5, "malformed": 1, "no_text": 3, "unreadable": 3,
    }  # fmt: skip
    dropped = counts["blank"] + counts["exact_duplicates"] + counts["filtered"] + counts["near_duplicates"]
    assert counts["documents"] == dropped + counts["kept"] == 13
    assert counts["exact_duplicates"] == 1


@dataclasses.dataclass(frozen=True)
class Every(Filter):
    def judge(self, text):
        return Judged(text)


@pytest.mark.parametrize("filters", [(), (Every(),)], ids=["read once", "filtered"])
def test_two_spellings_of_a_text_are_duplicates_in_both_steps(filters, tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    composed = [" ".join(f"é{word}ö" for word in text(i, 80).split()) for i in range(3)]
    decomposed = [unicodedata.normalize("NFD", one) for one in composed]
    assert composed[0] != decomposed[0]
    near = decomposed[1].replace(decomposed[1].split()[40], "other")
    texts = [
        composed[0],
        decomposed[0],
        composed[1],
        near,
        composed[2],
        "x\u00b2 is not x2 " + text(9),
        "x2 is not x2 " + text(8),
    ]
    (root / "a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    counts = prepare(root, tmp_path / "out", dataclasses.replace(SMALL, filters=filters)).counts
    assert (counts["exact_duplicates"], counts["near_duplicates"], counts["kept"]) == (1, 1, 5)


def test_compatible_characters_stay_different():
    assert stages.normalized("x\u00b2") != stages.normalized("x2")
    assert stages.normalized("e\u0301") == stages.normalized("\u00e9") == "\u00e9"


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
def test_a_corpus_in_another_encoding_is_that_of_utf8(encoding, tmp_path):
    """JSON lines, a list, a compressed text; a file that has not this encoding is counted, and the rest is read."""
    made = {}
    texts = [f"Größe {i}: {text(i)}" for i in range(4)]
    for name, one in (("plain", "utf-8"), ("other", encoding)):
        root = tmp_path / name
        root.mkdir()
        lines = "".join(json.dumps({"text": content}, ensure_ascii=False) + "\n" for content in texts[:2])
        (root / "a.jsonl").write_text(lines, encoding=one)
        (root / "b.json").write_text(json.dumps([{"text": texts[2]}], ensure_ascii=False), encoding=one)
        (root / "c.txt.gz").write_bytes(gzip.compress(f"{texts[3]}\n".encode(one)))
        settings = dataclasses.replace(SMALL, encoding=one)
        made[name] = prepare(root, tmp_path / f"{name} out", settings)
    assert made["other"].counts["documents"] == 4 and not made["other"].problems
    shards = {
        name: [one.sha256 for one in manifest.files if one.name.startswith("corpus")] for name, manifest in made.items()
    }
    assert shards["other"] == shards["plain"] != []
    (tmp_path / "other/d.txt").write_bytes(b"x\x81\x81")
    settings = dataclasses.replace(SMALL, encoding=encoding)
    problems = prepare(tmp_path / "other", tmp_path / "again", settings).problems
    assert problems.counts == {"encoding": 1} and "d.txt" in problems.text()
    with pytest.raises(UserError, match="CorpusPreparation.encoding .* is no encoding of texts"):
        dataclasses.replace(SMALL, encoding="rot13")
