"""Hostile files through the verbs: refused in a line before they cost anything, nothing of them executed."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile

import pytest

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.chat.instructions import prepare_instructions
from capibara.data.sources.sources import JsonlSource
from capibara.data.text import disk
from capibara.data.tokenizers import limits as tokenizer_limits
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.interop.gguf import file as gguf_file
from capibara.interop.hf import safetensors_header, torch_file
from capibara.interop.t5x import index as t5x_index
from capibara.storage import packed

HERE = pathlib.Path(__file__).resolve().parent


def run_script(*flags, seconds):
    environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, str(HERE / "hostile.py"), *flags],
        env=environment, capture_output=True, text=True, errors="replace", timeout=seconds,
    )  # fmt: skip


@pytest.mark.fault(61, 62, 63)
def test_hostile_files_are_refused_by_convert_and_prepare(tmp_path):
    """The small ones; what must not be is a fault in the table that is printed."""
    table = tmp_path / "table.json"
    done = run_script("--small", "--verb=convert", "--verb=prepare", "--every=9", f"--json={table}", seconds=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows = json.loads(table.read_text())["rows"]
    assert len({row["case"] for row in rows}) >= 15
    assert sum(row["code"] == 2 for row in rows) >= 10


@pytest.mark.heavy
@pytest.mark.fault(61, 62, 63)
def test_hostile_files_through_every_verb(tmp_path):
    done = run_script(f"--json={tmp_path / 'table.json'}", seconds=3600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def peak_of(call, error):
    """The memory of Python and numpy that a call took, and its seconds; it must raise."""
    tracemalloc.start()
    begin = time.monotonic()
    with pytest.raises(error) as raised:
        call()
    seconds, (_, peak) = time.monotonic() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(raised.value)
    return peak, seconds, str(raised.value)


def zipped(members, method=zipfile.ZIP_DEFLATED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.fault(61)
@pytest.mark.parametrize("member", ["data.pkl", "byteorder"])
def test_an_archive_of_torch_is_refused_by_the_size_that_it_declares(member, tmp_path):
    members = {"archive/data.pkl": pickle.dumps({}, protocol=2)} | {f"archive/{member}": bytes(80 << 20)}
    (tmp_path / "a.bin").write_bytes(zipped(members))
    peak, seconds, said = peak_of(lambda: torch_file.TorchFile(str(tmp_path / "a.bin")), torch_file.Refused)
    assert peak < 1 << 20 and seconds < 2 and "83,886,080 bytes" in said


@pytest.mark.fault(61)
def test_a_list_of_msgpack_is_refused_by_the_count_that_it_declares(tmp_path):
    (tmp_path / "checkpoint").write_bytes(b"\x81\xa6target" + b"\xdd\xff\xff\xff\xff" * 60 + bytes(1000))
    peak, seconds, _ = peak_of(lambda: t5x_index.leaves_of(str(tmp_path / "checkpoint")), UserError)
    assert peak < 1 << 20 and seconds < 2


@pytest.mark.fault(61)
@pytest.mark.parametrize("line", [1, 3])
def test_a_long_line_is_one_error_that_names_it(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * (line - 1) + b'{"text": "' + b"a" * (limits.LINE_BYTES + 1) + b'"}\n')
    for read in (
        lambda: JsonlSource(files=(str(path),)).open("train"),
        lambda: list(packed.lines(path)),
        lambda: prepare_instructions([str(path)], str(tmp_path / "out"), report=len),
    ):
        peak, seconds, said = peak_of(read, UserError)
        assert f"{path}:{line} " in said or line > 1 and "prepare" not in said
        assert peak < 2.5 * limits.LINE_BYTES and seconds < 10


def test_lines_are_found_as_python_finds_them(tmp_path):
    """Blank ones left out, at every place relative to a block's end."""
    path = tmp_path / "a.jsonl"
    for content in (b"", b"\n", b"a", b"a\n", b"\r\n\nab\n\r\n\nc", b"\n" * 5 + b"x" * ((4 << 20) - 3) + b"\nyy\n\nz"):
        path.write_bytes(content)
        want = [(n, line) for n, line in enumerate(content.split(b"\n"), 1) if line not in (b"", b"\r")]
        *bounds, blank = disk.line_bounds(str(path))
        assert [(int(n), content[a:b]) for a, b, n in zip(*bounds, strict=True)] == want
        assert blank == content.count(b"\n") + (not content.endswith((b"\n",)) and content != b"") - len(want)
        assert list(packed.lines(path)) == [(n, line.removesuffix(b"\r")) for n, line in want]


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|aa)*b", "(a*)*", "([a-z]+)*x", "(x+x+)+y", r"(.*)\1", "a*a*a*a*a*a*b", "((a?){50}){50}", "a?" * 40]
    + ["(?R)", r"\g<0>", "(a{1,3})+", "(?:a?)*b", "a{99999}", "(" * 100, "[a", "\\", "a**"],
)  # fmt: skip
def test_expressions_that_loop_are_refused(pattern, tmp_path):
    with pytest.raises(limits.Refused):
        limits.check_pattern(pattern)


KNOWN = [
    *sorted(tokenizer_limits.KNOWN),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
    r"[\p{Han}]+|[^\r\n\p{L}]?[\p{Lu}\p{Lt}&&[^\p{Han}]]*[\p{Ll}\p{Lm}&&[^\p{Han}]]+(?i:'s|'t)?",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"(?=(\d{3})+(?!\d))",
]


@pytest.mark.parametrize("pattern", KNOWN)
def test_expressions_of_known_tokenizers_are_not(pattern):
    limits.check_pattern(pattern)


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAP////////9hYmMA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
    ids=["pattern", "normalizer", "table", "length"],
)  # fmt: skip
def test_tokenizers_that_loop_or_allocate_are_refused(change, tmp_path):
    model = {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}
    spec = {"version": "1.0", "added_tokens": [], "model": model} | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    vocabulary = TokenizerJsonVocabulary(path=str(tmp_path))
    begin = time.monotonic()
    try:
        vocabulary.encode("a" * 40 + "b")
        assert change["pre_tokenizer"]["type"] == "FixedLength"  # a version of the library that reads it
    except UserError as error:
        assert "\n" not in str(error)
    assert time.monotonic() - begin < 10


def header(values, data=b""):
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (header({"a": TENSOR, "b": TENSOR}, bytes(8)), "overlaps another"),
        (header({"a": TENSOR}, bytes(9)), "its tensors have 8 bytes"),
        (header({"a": TENSOR | {"data_offsets": [8, 16]}}, bytes(16)), "is not where the one before it ends"),
        (header({"a": TENSOR | {"shape": [2**62, 4]}}, bytes(8)), "has the shape"),
        (header({"a": TENSOR | {"shape": [-2]}}, bytes(8)), "whole numbers"),
        (header({"a": TENSOR | {"dtype": ["F32"]}}, bytes(8)), "has the dtype"),
        (header(b'{"a":' * 5000 + b"1" + b"}" * 5000), "nested deeper"),
        (struct.pack("<Q", 2**63) + b"{}", "header says"),
    ],
)
def test_headers_of_safetensors_that_lie(content, told, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(limits.Refused, match=told):
        safetensors_header.check(str(tmp_path / "a.safetensors"))


@pytest.mark.fault(63)
def test_counts_of_gguf_that_lie_cost_nothing(tmp_path):
    for content in (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 12, 2**61),
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"a"
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 9,
    ):
        (tmp_path / "a.gguf").write_bytes(content)
        peak, seconds, _ = peak_of(lambda: gguf_file.GgufFile(str(tmp_path / "a.gguf")), limits.Refused)
        assert peak < 1 << 20 and seconds < 1


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper"),
        (b"9" * 10**6, "number of 1,000,000 digits"),
        (b"[1e999]", "no finite number"),
        (b"[NaN]", "NaN"),
        (b"[" + b"[]," * 3_000_000 + b"1]", "more than 4,000,000 values"),
        (b"\xff\xfe[\0]\0", "no text in UTF-8"),
        (rb'["\ud800"]', "lone surrogate"),
        (rb'["\ud83e\udd99\udd99"]', "lone surrogate"),
    ],
)
def test_json_is_bounded(content, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        limits.parse_json(content)


def test_json_in_strings_is_no_structure():
    values = {"text": "[[[[" * 1000 + '"{' * 1000 + "\\", "deep": [[[[1]]]], "n": 10**30}
    assert limits.parse_json(json.dumps(values)) == values
    assert limits.parse_json(b"\xef\xbb\xbf[1]") == [1]
    assert limits.parse_json(rb'["\ud83e\udd99", "\\ud800"]') == ["\U0001f999", "\\ud800"]


@pytest.mark.fault(63)
@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "a\0b", "", "gs://b/a", "..", "a\\..\\..\\b"])
def test_names_that_lead_out_are_refused(name, tmp_path):
    with pytest.raises(UserError, match="must be a name in its own folder"):
        limits.inside(str(tmp_path), name, "index.json")


@pytest.mark.fault(63)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_what_is_no_regular_file_is_not_waited_for(kind, tmp_path):
    path = tmp_path / "a"
    make = {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda p: os.symlink("/dev/zero", p)}
    make.get(kind, lambda p: os.symlink(p, p))(path)
    with pytest.raises(UserError, match="must be a regular file"):
        limits.read(path)
