"""Texts and JSON lines in other encodings, compressed, with marks, blanks and nulls: read as Python reads them, or refused.

The right values come from Python's own codecs, gzip and zstandard.
"""

from __future__ import annotations

import gzip
import json

import pytest
import zstandard

from capibara.core.types import UserError
from capibara.data.shards.source import ShardedSource
from capibara.data.sources.sources import JsonlSource, TextSource

LINES = [f"Zeile {i}: Größe, naïve café" for i in range(300)]
SOURCES = (TextSource, ShardedSource)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def texts_of(source) -> list[str]:
    found = []
    for split in ("train", "validation"):
        opened = source.open(split)
        for i in range(len(opened)):
            found += [one.text for one in opened.examples(i)] if hasattr(opened, "examples") else [opened[i]]
    return found


def lines_of(source) -> list[str]:
    """The lines of all documents, sorted."""
    return sorted(line for text in texts_of(source) for line in text.splitlines())


def packed(content: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(content)
    return zstandard.ZstdCompressor(write_checksum=True).compress(content) if ending == ".zst" else content


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "cp1252", "shift_jis"])
def test_texts_of_an_encoding_that_is_named_are_read(tmp_path, source, ending, encoding):
    lines = [line.replace("ö", "o").replace("ß", "s").replace("ï", "i").replace("é", "e") for line in LINES]
    lines = [f"{line} 漢字" for line in lines] if encoding == "shift_jis" else LINES
    path = tmp_path / f"x.txt{ending}"
    path.write_bytes(packed("".join(f"{line}\n" for line in lines).encode(encoding), ending))
    named = "utf-8" if encoding == "utf-8-sig" else encoding
    assert lines_of(source(files=(str(path),), encoding=named, document_bytes=500)) == sorted(lines)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "content, at",
    [
        ("Zeile\nGröße".encode("cp1252"), 8),
        ("Zeile\nGröße".encode("utf-16"), 0),
        (b"plain\nand a \0 there", 12),
        (b"\xef\xbb\xbfplain\n\xff", 9),
        (b"cut in a character \xc3", 19),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_what_is_no_utf8_is_refused_with_its_place_and_a_fix(tmp_path, source, content, at, ending):
    path = tmp_path / f"x.txt{ending}"
    path.write_bytes(packed(content, ending))
    with pytest.raises(UserError, match=rf"x\.txt{ending} is no text in .* at byte {at}\).* 'cp1252'") as error:
        texts_of(source(files=(str(path),), validation_files=(str(path),)))
    assert "\n" not in str(error.value) and str(tmp_path / "cache") not in str(error.value)


def test_a_bad_byte_far_into_a_file_is_named_by_its_place(tmp_path):
    content = "".join(f"{line}\n" for line in LINES * 20).encode()
    at = content.index(b"\n", 100_000) + 1
    path = tmp_path / "x.txt"
    path.write_bytes(content[:at] + b"\xe9" + content[at + 1 :])
    for source in SOURCES:
        with pytest.raises(UserError, match=rf"x\.txt is no text in UTF-8 .* at byte {at:,}\)"):
            texts_of(source(files=(str(path),), document_bytes=4096))


@pytest.mark.parametrize("source", [*SOURCES, JsonlSource])
def test_an_unknown_encoding_is_refused(tmp_path, source):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' * 3)
    for name in ("utf-99", "base64", "rot13"):
        with pytest.raises(UserError, match=rf"{source.__name__}\.encoding \('{name}'\) is no encoding of texts: try"):
            source(files=(str(path),), encoding=name).open("train")


@pytest.mark.parametrize("source", [JsonlSource, ShardedSource])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_blank_lines_and_nulls_among_lines_of_json_are_skipped(tmp_path, source, ending, encoding, caplog):
    records = [{"text": None if i % 7 == 3 else f"é {i}", "domain": None} for i in range(70)]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    lines[10:10] = ["", "  ", "\t\r"]
    lines[30:30] = ['{"other": {"text": null}, "text": "inside \\"text\\": null"}']
    path = tmp_path / f"x.jsonl{ending}"
    path.write_bytes(packed("".join(f"{line}\n" for line in lines).encode(encoding), ending))
    named = "utf-16" if encoding == "utf-16" else "utf-8"
    expected = [f"é {i}" for i in range(70) if i % 7 != 3] + ['inside "text": null']
    more = {"block_bytes": 500} if source is ShardedSource else {}
    assert sorted(texts_of(source(files=(str(path),), encoding=named, **more))) == sorted(expected)
    assert "null" in caplog.text and "skipped" in caplog.text
    if source is JsonlSource:
        assert "10 of 71 texts are null" in caplog.text


def test_a_file_of_nulls_alone_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": null}\n' * 4)
    with pytest.raises(UserError, match="all 4 texts are null: name another field than text"):
        JsonlSource(files=(str(path),)).open("train")


@pytest.mark.parametrize("ending, content", [(".gz", b"\x1f\x8b\x08"), (".zst", b"\x28\xb5\x2f\xfd")])
@pytest.mark.parametrize("source", [TextSource, JsonlSource, ShardedSource])
def test_compressed_files_that_are_cut_or_too_large_are_refused(tmp_path, source, ending, content, monkeypatch):
    from capibara.storage import packed as packing

    path = tmp_path / f"x.jsonl{ending}"
    whole = packed(b'{"text": "a"}\n' * 200_000, ending)
    path.write_bytes(whole[:-6])
    with pytest.raises(UserError, match=rf"x\.jsonl{ending} ends in the middle of its compressed data"):
        source(files=(str(path),)).open("train")
    monkeypatch.setattr(packing, "_FREE_BYTES", 1000)
    path.write_bytes(whole)
    with pytest.raises(UserError, match="unpacks to more than 256 times its size"):
        source(files=(str(path),)).open("train")
    path.write_bytes(b"no compression")
    with pytest.raises(UserError, match="is not compressed as its name says"):
        source(files=(str(path),)).open("train")


def test_a_file_that_was_replaced_is_unpacked_again(tmp_path):
    path = tmp_path / "x.txt.gz"
    for text in ("one and\ntwo and\n", "three and\nfour and\nfive and\n"):
        path.write_bytes(gzip.compress(text.encode()))
        assert lines_of(TextSource(files=(str(path),), document_bytes=6)) == sorted(text.splitlines())


def test_files_may_be_a_folder_and_what_it_has_besides_is_told(tmp_path, caplog):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.txt", "inner/b.md", "c.png", ".d.txt"):
        (folder / name).write_text("".join(f"{name} {i}\n" for i in range(9)))
    (folder / "e.py.gz").write_bytes(gzip.compress(b"x = 1\n" * 9))
    found = lines_of(TextSource(files=(str(folder),), document_bytes=20))
    assert found == sorted([f"{name} {i}" for name in ("a.txt", "inner/b.md") for i in range(9)] + ["x = 1"] * 9)
    assert "3 files read, 2 left out" in caplog.text
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is a folder without a file"):
        TextSource(files=(str(tmp_path / "empty"),)).open("train")
