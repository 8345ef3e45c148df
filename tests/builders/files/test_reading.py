"""Files with faults are read as far as they are good; every fault is counted with its file and line."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
import zlib

import pytest

from capibara.builders.files import reading
from capibara.builders.files.problems import Kind, Problems
from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import packed as packing

zstandard = pytest.importorskip("zstandard")
PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str = "a.jsonl") -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


def read(path, how=reading.records, **options):
    """What is read as (number, value or text), and the problems as (line, kind)."""
    problems = Problems()
    found = [(one[1], one[2]) for one in how(path, problems, **options)]
    assert all(one.path == path for one in problems)
    return found, [(one.line, one.kind) for one in problems]


def lines_of(path, **options):
    return read(path, reading.lines, **options)


@pytest.mark.parametrize("packed", PACK)
def test_good_lines_among_bad_ones_are_all_read(write, packed):
    bad = {
        2: (b"{bad", Kind.MALFORMED),
        3: (b'{"a": NaN}', Kind.MALFORMED),
        4: (b"[1]", Kind.MALFORMED),
        5: (b"7", Kind.MALFORMED),
        6: ('{"a": "ü"}'.encode("latin-1"), Kind.ENCODING),
        7: (b'{"a": "\\ud800"}', Kind.ENCODING),
        8: (b'{"a": "\0"}', Kind.MALFORMED),
        9: (b"\0" * 50, Kind.ENCODING),
        10: (b"[" * 500 + b"]" * 500, Kind.MALFORMED),
        11: (b'{"a": 1} {"a": 2}', Kind.MALFORMED),
        12: (b'{"a": 1' + b"0" * 500 + b"}", Kind.MALFORMED),
    }
    rows = [bad.get(i, (json.dumps({"i": i}).encode(), None))[0] for i in range(1, 20)]
    path = write(PACK[packed](b"\n".join(rows) + b"\n"), f"a.jsonl{packed}")
    found, problems = read(path)
    assert found == [(i, {"i": i}) for i in range(1, 20) if i not in bad]
    assert sorted(problems) == [(line, kind) for line, (_, kind) in bad.items()]


def test_line_ends_marks_and_blank_lines(write):
    path = write(b'\xef\xbb\xbf{"i": 1}\r\n\r\n   \n\n{"i": 5}\n\xef\xbb\xbf{"i": 6}')
    assert read(path) == ([(1, {"i": 1}), (5, {"i": 5}), (6, {"i": 6})], [])


def test_lines_keep_what_is_between_them(write):
    path = write("\ufeffone\r\n\n  two \u2028 half\r \nlast".encode())
    assert lines_of(path) == ([(1, "one"), (2, ""), (3, "  two \u2028 half\r "), (4, "last")], [])


def test_a_line_of_text_with_a_nul_or_another_encoding_is_skipped(write):
    path = write(b"one\ntwo\0\n" + "drei ü\n".encode("latin-1") + b"four")
    assert lines_of(path) == ([(1, "one"), (4, "four")], [(2, Kind.ENCODING), (3, Kind.ENCODING)])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_another_encoding_of_the_whole_file_is_no_record(write, encoding):
    text = '{"i": 1}\n'
    found, problems = read(write(("\ufeff" + text if encoding == "utf-16-be" else text).encode(encoding)))
    assert found == [] and [kind for _, kind in problems] == [Kind.ENCODING]


@pytest.mark.parametrize("how", [reading.lines, reading.records])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_line_that_is_too_long_is_skipped_and_the_next_ones_are_read(write, packed, how):
    long = b'{"a": "' + b"x" * 5000 + b'"}'
    content = b'{"i":1}\n' + long + b'\n{"i":3}\n' + long + b"\n" + long
    found, problems = read(write(PACK[packed](content), f"a.jsonl{packed}"), how, most=1000)
    assert [number for number, _ in found] == [1, 3]
    assert problems == [(2, Kind.TOO_LONG), (4, Kind.TOO_LONG), (5, Kind.TOO_LONG)]


@pytest.mark.parametrize("size", [limits.MIB - 1, limits.MIB, limits.MIB + 1])
def test_lines_at_the_limit_of_a_block_are_whole(write, size):
    rows = [b"a" * size, b"b", b"", b"c" * (size - 2), b"d"]
    path = write(b"\n".join(rows))
    assert lines_of(path) == ([(i, row.decode()) for i, row in enumerate(rows, 1)], [])
    assert lines_of(path, most=size)[1] == []
    assert lines_of(path, most=size - 1)[1] == [(1, Kind.TOO_LONG)]


def test_a_very_long_line_is_not_kept_in_memory(write):
    path = write(b"")
    with open(path, "wb") as file:
        file.write(b'{"i":1}\n')
        for _ in range(64):
            file.write(b"x" * limits.MIB)
        file.write(b'\n{"i":3}\n')
    tracemalloc.start()
    found, problems = read(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(1, {"i": 1}), (3, {"i": 3})] and problems == [(2, Kind.TOO_LONG)]
    assert most < limits.LINE_BYTES + 12 * limits.MIB


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_short_is_read_up_to_the_cut(write, packed):
    rows = [json.dumps({"i": i, "noise": os.urandom(20).hex()}).encode() for i in range(1, 30_001)]
    whole = PACK[packed](b"\n".join(rows) + b"\n")
    assert len(read(write(whole, f"a.jsonl{packed}"))[0]) == len(rows)
    for size in (len(whole) // 3, len(whole) * 9 // 10, len(whole) - 2):
        found, problems = read(write(whole[:size], f"a.jsonl{packed}"))
        assert [value for _, value in found] == [json.loads(row) for row in rows[: len(found)]]
        assert problems == [(len(found) + 1, Kind.TRUNCATED)]
        assert len(found) > len(rows) * (size / len(whole)) - 8000  # zstd has blocks of 128 KiB


def test_a_cut_before_the_first_block_leaves_nothing(write):
    assert read(write(gzip.compress(b'{"i":1}\n')[:12], "a.jsonl.gz")) == ([], [(1, Kind.TRUNCATED)])


def test_a_plain_file_that_is_cut_short_is_told_from_a_malformed_one(write):
    assert read(write(b'{"i":1}\n{"i": 2, "te')) == ([(1, {"i": 1})], [(2, Kind.TRUNCATED)])
    assert read(write(b'{"i":1}\nnot json')) == ([(1, {"i": 1})], [(2, Kind.MALFORMED)])


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_flipped_bit_is_reported(write, packed):
    data = bytearray(PACK[packed](b"".join(b'{"i":%d}\n' % i for i in range(5000))))
    data[len(data) // 2] ^= 0x10
    found, problems = read(write(bytes(data), f"a.jsonl{packed}"))
    assert problems[-1][1] in (Kind.CORRUPTED, Kind.TRUNCATED)
    assert len(found) <= 5000


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_several_members_and_padding_are_one_file(write, packed):
    parts = [PACK[packed](b'{"i":%d}\n' % i) for i in range(1, 4)]
    assert read(write(b"".join(parts), f"a.jsonl{packed}")) == ([(i, {"i": i}) for i in range(1, 4)], [])
    if packed == ".gz":
        assert read(write(parts[0] + bytes(3000), "b.jsonl.gz")) == ([(1, {"i": 1})], [])


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_what_follows_a_compressed_file_is_reported_and_its_lines_are_kept(write, packed):
    found, problems = read(write(PACK[packed](b'{"i":1}\n') + b"trailing", f"a.jsonl{packed}"))
    assert found == [(1, {"i": 1})] and problems == [(2, Kind.CORRUPTED)]


def test_the_content_decides_whether_a_file_is_compressed(write):
    assert read(write(gzip.compress(b'{"i":1}\n'), "a.jsonl")) == ([(1, {"i": 1})], [])
    assert read(write(b'{"i":1}\n', "b.jsonl.gz")) == ([], [(1, Kind.CORRUPTED)])
    assert read(write(b"", "c.jsonl.gz")) == ([], [])
    assert read(write(b"BZh9", "d.jsonl.bz2")) == ([], [(1, Kind.UNREADABLE)])


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_decompression_bomb_is_stopped(write, packed, monkeypatch):
    monkeypatch.setattr(packing, "_FREE_BYTES", 4 * limits.MIB)
    bomb = {".gz": zlib.compress, ".zst": zstandard.ZstdCompressor(level=19).compress}[packed](bytes(64 * limits.MIB))
    if packed == ".gz":
        bomb = gzip.compress(bytes(64 * limits.MIB), 9)
    path = write(bomb, f"a.jsonl{packed}")
    tracemalloc.start()
    assert read(path) == ([], [(1, Kind.TOO_LARGE)])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * limits.MIB


def test_what_is_no_file_is_a_problem_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert read(str(tmp_path / "pipe.jsonl")) == ([], [(0, Kind.UNREADABLE)])
    assert read(str(tmp_path)) == ([], [(0, Kind.UNREADABLE)])
    assert read(str(tmp_path / "none.jsonl")) == ([], [(0, Kind.UNREADABLE)])


@pytest.mark.parametrize("packed", PACK)
def test_a_json_file_has_a_list_or_one_object(write, packed):
    rows = [{"i": 1}, 7, {"i": 3}, None]
    listed = write(PACK[packed](json.dumps(rows, indent=2).encode()), f"a.json{packed}")
    found = ([(1, {"i": 1}), (3, {"i": 3})], [(2, Kind.MALFORMED), (4, Kind.MALFORMED)])
    assert read(listed) == found
    assert read(write(PACK[packed](b'\xef\xbb\xbf{\n"i": 1\n}'), f"b.json{packed}")) == ([(1, {"i": 1})], [])


def test_a_json_file_of_lines_is_read_by_lines(write):
    assert read(write(b'{"i":1}\n{bad\n{"i":3}\n', "a.json")) == (
        [(1, {"i": 1}), (3, {"i": 3})],
        [(2, Kind.MALFORMED)],
    )


def test_a_json_file_that_is_bad_is_one_problem(write, monkeypatch):
    assert read(write(b'[{"i": 1},\n{"i": 2}, {"i"', "a.json")) == ([], [(2, Kind.TRUNCATED)])
    assert read(write(b'[{"i": 1},\n{"i": x}]', "a.json")) == ([], [(2, Kind.MALFORMED)])
    assert read(write(gzip.compress(b'[{"i": 1}]' * 50)[:-9], "a.json.gz")) == ([], [(0, Kind.TRUNCATED)])
    monkeypatch.setattr(limits, "TEXT_BYTES", 100)
    assert read(write(json.dumps([{"i": i} for i in range(50)]).encode(), "a.json")) == ([], [(0, Kind.TOO_LARGE)])
    rows = b"".join(b'{"i":%d}\n' % i for i in range(50))
    assert len(read(write(rows, "b.json"))[0]) == 50


def test_folders_globs_and_files_are_found_sorted_and_once(tmp_path):
    for name in ("b/x.jsonl", "b/c/y.jsonl.gz", "a.jsonl", "b/z.txt", "b/.hidden.jsonl", "b/.git/w.jsonl", "b/v.zst"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    os.symlink(tmp_path, tmp_path / "b/around")
    wanted = [str(tmp_path / name) for name in ("a.jsonl", "b/c/y.jsonl.gz", "b/x.jsonl")]
    folder, glob = str(tmp_path / "b"), str(tmp_path / "*.jsonl")
    assert reading.expand([folder, glob, wanted[0], wanted[2]], [".jsonl"], Problems()) == wanted
    assert reading.expand([str(tmp_path / "b/z.txt")], [".jsonl"], Problems()) == [
        str(tmp_path / "b/z.txt")
    ]  # named by the user


def test_inputs_that_match_nothing_are_the_users_mistake(tmp_path):
    for patterns in ([], [str(tmp_path / "none*")], [str(tmp_path)]):
        with pytest.raises(UserError, match="IN"):
            reading.expand(patterns, [".jsonl"], Problems())


def test_the_files_of_the_output_folder_are_no_input(tmp_path):
    for name in ("a.jsonl", "out/b.jsonl", "outer/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "out/.building").mkdir()
    problems = Problems()
    found = reading.expand([str(tmp_path)], [".jsonl"], problems, str(tmp_path / "outer/../out"))
    assert found == [str(tmp_path / "a.jsonl"), str(tmp_path / "outer/c.jsonl")]
    assert not problems  # what this build writes is neither read nor left out
    with pytest.raises(UserError, match="outside of --out"):
        reading.expand([str(tmp_path / "out")], [".jsonl"], Problems(), str(tmp_path / "out"))


def test_what_cannot_be_read_is_counted_and_the_rest_is_read(tmp_path):
    open(os.fsencode(tmp_path) + b"/caf\xe9.jsonl", "wb").close()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "other.csv").write_text("x")
    with pytest.raises(UserError, match=r"IN has no file that can be read \(.*empty.jsonl: empty: has no byte\)"):
        reading.expand([str(tmp_path)], [".jsonl"], Problems())
    (tmp_path / "a.jsonl").write_text("{}")
    problems = Problems()
    assert reading.expand([str(tmp_path)], [".jsonl"], problems) == [str(tmp_path / "a.jsonl")]
    assert problems.counts == {"empty": 1, "left_out": 1, "unreadable": 2} and problems.left_out == 2
    assert "no text in UTF-8: rename it" in problems.text() and "pipe.jsonl: unreadable: is a pipe" in problems.text()


def test_the_common_folder_of_files_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reading.common_folder(["a/b.md"]) == str(tmp_path / "a")
    assert reading.common_folder(["a/b.md", str(tmp_path / "a/c/d.md")]) == str(tmp_path / "a")
