"""All documents are read once, wherever the files are cut, and what cannot be read is named with file and line."""

import gzip
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from capibara.builders.files.problems import Problem, Problems
from capibara.builders.preparation import documents
from capibara.builders.preparation.documents import Document, Fields
from capibara.core import limits
from capibara.core.types import UserError

FIELDS = Fields(text="text", domain="domain", document_bytes=1 << 20)


def read(*patterns, part_bytes=1 << 20, fields=FIELDS):
    """The documents of files, in all their parts, and the problems at the lines of the parts."""
    found, problems = [], Problems()
    parts = documents.parts_of(
        documents.files_of([str(one) for one in patterns], problems), fields, part_bytes, problems
    )
    assert [part.number for part in parts] == [*range(len(parts))]
    for part in parts:
        reader = documents.PartReader(part, fields)
        found += reader
        problems.merge(reader.problems)
    return found, problems, parts


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1000, 1 << 20])
def test_lines_are_read_once_in_their_order(tmp_path, part_bytes):
    lines = [json.dumps({"text": f"{i} " + "ä" * (i * 7 % 50), "domain": "sql"}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines[:30]) + "\r\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[30:]))
    found, problems, _ = read(tmp_path, part_bytes=part_bytes)
    assert [json.dumps({"text": one.text, "domain": one.domain}) for one in found] == lines and not problems


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_blocks_do_not_matter(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(30)))
    assert [one.text for one in read(path, part_bytes=50)[0]] == [*map(str, range(30))]


def test_all_formats_are_read(tmp_path):
    table = pyarrow.table({"text": ["parquet 1", "parquet 2", None], "domain": ["sql", None, "sql"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"text": "packed"}\n')
    (tmp_path / "c.json").write_text('[{"text": "of a list"}, {"text": "second"}]')
    (tmp_path / "d.py").write_text("import os\n")
    (tmp_path / "e.md").write_text("# title\n")
    found, problems, _ = read(tmp_path, tmp_path / "d.py", part_bytes=1)
    assert found == [
        Document("parquet 1", "sql"), Document("parquet 2", ""), Document("packed", ""), Document("of a list", ""),
        Document("second", ""), Document("import os\n", "python"), Document("# title\n", "markdown"),
    ]  # fmt: skip
    assert [*problems] == [
        Problem(str(tmp_path / "a.parquet"), 3, "no_text", "its field 'text' is null, must be a text")
    ]


def test_long_texts_are_cut_at_line_ends(tmp_path):
    lines = [f"line {i}\n" for i in range(100)]
    (tmp_path / "a.txt").write_text("".join(lines))
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.writelines(lines)
    fields = Fields(text="text", domain=None, document_bytes=50)
    for name in ("a.txt", "b.txt.gz"):
        found = [one.text for one in read(tmp_path / name, fields=fields)[0]]
        assert "".join(found) == "".join(lines) and len(found) > 10
        assert all(len(one) >= 50 for one in found[:-1]) and {
            one.domain for one in read(tmp_path / name, fields=fields)[0]
        } == {""}


def test_what_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "good"}',
        b"{bad",
        b"",
        b'{"text": "\xff"}',
        b"[1]",
        b'{"other": 1}',
        b'{"text": "also good"}',
        b'{"text": "cut',
    ]
    path.write_bytes(b"\n".join(lines))
    found, problems, _ = read(path)
    assert [one.text for one in found] == ["good", "also good"]
    assert {(one.line, one.kind) for one in problems} == {
        (2, "malformed"), (4, "encoding"), (5, "malformed"), (6, "no_text"), (8, "truncated"),
    }  # fmt: skip


def test_bad_lines_of_a_text_are_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\xfe\ntwo\n\0\nthree")
    found, problems, _ = read(tmp_path / "a.txt")
    assert [one.text for one in found] == ["one\ntwo\nthree"] and [one.line for one in problems] == [2, 4]


def test_other_encodings_and_formats_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n', "utf-16")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 cut")
    (tmp_path / "c.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "whole"}\n{"text": "cu' + bytes(range(256)) * 9)[:-20]
    )
    (tmp_path / "d.jsonl").write_text('{"text": "good"}\n')
    found, problems, _ = read(tmp_path)
    assert [one.text for one in found] == ["whole", "good"]
    assert {one.path.rpartition("/")[2] for one in problems} == {"a.jsonl", "b.parquet", "c.jsonl.gz"}


def test_a_line_that_is_too_long_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LINE_BYTES", 100)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 40)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + json.dumps({"text": "x" * 1000}) + '\n{"text": "two"}\n')
    for part_bytes in (10, 200, 10_000):
        found, problems, _ = read(path, part_bytes=part_bytes)
        assert [one.text for one in found] == ["one", "two"] and problems.counts == {"too_long": 1}


def test_only_the_first_piece_of_a_part_begins_inside_a_file(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "0123456789"}\n' * 7)
    _, _, parts = read(tmp_path, part_bytes=60)
    assert len(parts) > 5 and all(piece.start == 0 for part in parts for piece in part.pieces[1:])


def test_a_small_corpus_has_parts_for_many_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_LEAST_PART_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789"}\n' * 600)
    assert len(read(tmp_path, part_bytes=1 << 20)[2]) > 50
    assert len(read(tmp_path, part_bytes=1 << 20)[0]) == 600


def test_blank_lines_are_no_problem(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n \t\n{"text": "x"}\r\n\r\n')
    found, problems, _ = read(tmp_path)
    assert [one.text for one in found] == ["x"] and not problems


def test_what_the_fast_parser_refuses_is_read_by_the_other(tmp_path, monkeypatch):
    lines = [b'\n\xef\xbb\xbf{"text": "a"}', b'{"text": "b"}' + b" " * 200, b'{"text": "\\ud800"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    for fast_bytes in (100, 1 << 20):
        monkeypatch.setattr(documents, "FAST_BYTES", fast_bytes)
        found, problems, _ = read(tmp_path)
        assert [one.text for one in found] == ["a", "b"] and [one.line for one in problems] == [4]


@pytest.mark.parametrize(
    "library, name", [("orjson", "a.jsonl"), ("zstandard", "a.txt.zst"), ("pyarrow.parquet", "a.parquet")]
)
def test_a_missing_library_is_no_problem_of_the_file(tmp_path, monkeypatch, library, name):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (part,) = documents.parts_of(documents.files_of([str(tmp_path)], Problems()), FIELDS, 1 << 20, Problems())
    piece = part.pieces[0]._replace(file=part.pieces[0].file._replace(url=str(tmp_path / name)))
    (tmp_path / name).write_text('{"text": "x"}\n')
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"{library} is not installed"):
        read(tmp_path / name)
    with pytest.raises(UserError, match=f"{library} is not installed"):
        list(documents.PartReader(documents.CorpusPart(number=0, pieces=(piece,)), FIELDS))


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="matches no file"):
        documents.files_of([str(tmp_path / "*.jsonl")], Problems())
