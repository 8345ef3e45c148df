"""Changed files of every format: every reader's error is one line, and never ends the process."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE / "fuzz_readers.py"
_SPEC = importlib.util.spec_from_file_location("fuzz_readers", SCRIPT)
fuzz_readers = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fuzz_readers)
# Each case of these starts one process or more.
SLOW = {"t5x_index", "t5x_zarr", "t5x_chunk", "ocdbt", "sentencepiece", "tokenizer"}
QUICK = ("config", "torch", "gguf", "zip")


def run(*arguments, seconds=60):
    root = str(HERE.parent.parent)
    environment = dict(os.environ) | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "RUST_BACKTRACE": "0"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        cwd=root, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds,
    )  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    done = run("make", folder, seconds=120)
    assert done.returncode == 0, done.stderr
    return folder


def check(reader, seed, count, folder, seconds):
    done = run(reader, seed, count, folder, seconds=seconds)
    last = [line for line in done.stdout.splitlines() if line.startswith("case ")][-1:]
    assert done.returncode == 0, f"{last}, exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.count(f"case {reader} ") == count
    # Some changes are harmless, most are not: otherwise nothing was changed, or nothing was read.
    assert 1 <= done.stdout.splitlines().count("fine") <= count


@pytest.mark.parametrize("reader", QUICK)
def test_a_few_changes_of_each_form(reader, good):
    check(reader, 0, 40, good, seconds=120)


@pytest.mark.heavy
@pytest.mark.parametrize("reader", fuzz_readers.READERS)
def test_many_changes_of_each_form(reader, good):
    check(reader, 0, 150 if reader in SLOW else 3000, good, seconds=1200)


def test_the_fuzzer_finds_bad_readers(tmp_path, monkeypatch):
    """It finds a reader that raises another error, and one that hangs."""
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a").write_bytes(b"1234")

    def broken(path):
        raise KeyError(path.read_bytes())

    monkeypatch.setitem(fuzz_readers.READERS, "broken", ("a", "", fuzz_readers.changed_bytes, broken))
    monkeypatch.setattr(fuzz_readers.resource, "setrlimit", lambda *_: None)
    assert fuzz_readers.main("broken", 0, 5, tmp_path) == 5
