"""Outputs are complete or absent, and the next writer removes the partial outputs of a killed one."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from capibara.core.types import UserError
from capibara.storage import partial

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
WRITER = """
import sys
from capibara.storage import partial
with partial.{kind}(sys.argv[1]) as unfinished:
    open(unfinished + {inner!r}, "w").write("half")
    print(unfinished, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer():
    """(path) -> a process that has begun to write there and waits, and its partial output."""
    begun = []

    def start(path, kind="whole"):
        code = WRITER.format(kind=kind, inner="/x" if kind == "whole" else "")
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process, pathlib.Path(process.stdout.readline().strip()).parent

    yield start
    for process in begun:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["whole", "scratch"])
def test_only_a_killed_writers_partial_output_is_removed(writer, tmp_path, kind, caplog):
    path = tmp_path / "model.gguf"
    killed, left = writer(path, kind)
    living, kept = writer(path, kind)
    other, others = writer(tmp_path / "another", kind)
    for process in (killed, other):
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / "model.gguf.abcdefgh.partial").mkdir()  # a user's own folder with such a name
    (tmp_path / "model.gguf.abcdefgh.partial" / "mine").write_text("mine")
    (tmp_path / "model.gguf.partial").write_text("mine")
    (tmp_path / "model.gguf.ijklmnop.partial").symlink_to(others)
    assert left.is_dir() and (kept.parent, left.parent) == (tmp_path, tmp_path)
    before = {*os.listdir(tmp_path)}
    with partial.scratch(str(path)) as unfinished:
        assert before - {*os.listdir(tmp_path)} == {left.name}
        pathlib.Path(unfinished).write_text("new")
    assert {*os.listdir(tmp_path)} == before - {left.name}
    assert left.name in caplog.text and "interrupted" in caplog.text
    living.communicate("")  # it continues undisturbed
    assert living.returncode == 0 and not kept.exists()
    assert path.is_dir() == (kind == "whole")


def test_another_hosts_partial_output_is_kept(writer, tmp_path):
    killed, left = writer(tmp_path / "model")
    killed.kill()
    killed.wait()
    (left / ".capibara-convert").write_text("another-host")
    partial.remove_left(str(tmp_path / "model"))
    assert left.is_dir()
    (left / ".capibara-convert").unlink()  # killed before it wrote its owner file
    partial.remove_left(str(tmp_path / "model"))
    assert left.is_dir()


def test_a_folder_is_complete_or_absent(tmp_path):
    target = str(tmp_path / "new")
    with pytest.raises(ZeroDivisionError), partial.whole(target) as unfinished:
        pathlib.Path(unfinished, "x").write_text("half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with partial.whole(target) as unfinished:
        pathlib.Path(unfinished, "x").write_text("all")
        assert not os.path.exists(target)
    assert os.listdir(tmp_path) == ["new"] and os.listdir(target) == ["x"]
    with pytest.raises(UserError, match="must be a new folder"), partial.whole(target):
        pass
