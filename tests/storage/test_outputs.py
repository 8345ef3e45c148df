"""Output files of verbs."""

from __future__ import annotations

import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from capibara.core.types import UserError
from capibara.storage import outputs


def test_a_check_leaves_nothing_behind(tmp_path):
    outputs.check_writable(str(tmp_path / "new" / "folder" / "a.json"), str(tmp_path / "new" / "b.json"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "a.json").write_text("kept")
    outputs.check_writable(str(tmp_path / "a.json"))
    assert (tmp_path / "a.json").read_text() == "kept"
    with pytest.raises(UserError, match="is named for two outputs"):
        outputs.check_writable(str(tmp_path / "b"), str(tmp_path / "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_check_makes_nothing_by_a_name_that_another_process_writes_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.json"

    def other_writes(name, *mode, **options):
        assert not path.parent.exists()
        path.parent.mkdir()
        path.write_text("of another")
        return open(name, *mode, **options)

    monkeypatch.setattr(outputs, "open", other_writes, raising=False)
    outputs.check_writable(str(path))
    assert path.read_text() == "of another" and list(tmp_path.iterdir()) == [path.parent]


@pytest.mark.parametrize("name", ["folder", "file/below", "x" * 300, "new/" + "x" * 300])
def test_a_check_refuses_what_cannot_be_written(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=r"cannot be written \((Is a directory|Not a directory|File name too long)\)"):
        outputs.check_writable(str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_bucket_is_refused_and_no_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^gs://bucket/a.json must be a local file: name one, and copy it there$"):
        outputs.check_writable("gs://bucket/a.json")
    assert not list(tmp_path.iterdir())


def test_of_two_writers_of_a_file_one_wins_whole(tmp_path):
    path = str(tmp_path / "a")
    with outputs.replacing(path) as first, outputs.replacing(path) as second:
        for name in (first, second):
            pathlib.Path(name).write_text(name)
    assert pathlib.Path(path).read_text() == first
    with pytest.raises(ZeroDivisionError), outputs.replacing(path) as third:
        pathlib.Path(third).write_text("half")
        raise ZeroDivisionError
    assert pathlib.Path(path).read_text() == first and [one.name for one in tmp_path.iterdir()] == ["a"]


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    """It keeps a living writer's file, and another host's."""
    path, program = str(tmp_path / "a"), (
        "import sys, time; from capibara.storage import outputs\n"
        "with outputs.replacing(sys.argv[1]) as name: print(name, flush=True); time.sleep(100)"
    )  # fmt: skip
    dead, alive = (
        subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        left, kept = dead.stdout.readline().strip(), alive.stdout.readline().strip()
        dead.kill()
        dead.wait()
        foreign = f"{path}.0123456789abcdef.partial"
        pathlib.Path(foreign).touch()
        with outputs.replacing(path) as name:
            pathlib.Path(name).write_text("new")
        assert sorted(map(str, tmp_path.iterdir())) == sorted([path, kept, foreign]) and left != kept
    finally:
        alive.kill()
        alive.wait()


def test_a_file_that_is_taken_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Another process takes it for a killed writer's."""
    path, lock, taken = str(tmp_path / "a"), fcntl.flock, []

    def late(file, how):
        if not taken:
            taken.append(file.name)
            outputs._remove_left(path)
            assert not os.path.exists(taken[0])
        return lock(file, how)

    monkeypatch.setattr(outputs.fcntl, "flock", late)
    with outputs.replacing(path) as partial:
        assert partial != taken[0] and os.path.exists(partial)
        outputs._remove_left(path)
        pathlib.Path(partial).write_text("whole")
    assert [one.name for one in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "whole"


def test_a_file_that_is_appended_to_is_one_process_s(tmp_path):
    with open(tmp_path / "a", "a") as file, open(tmp_path / "a", "a") as other:
        outputs.lock(file, "--out=a")
        with pytest.raises(UserError, match="--out=a is being written by another process: wait for its end, or name"):
            outputs.lock(other, "--out=a")
        file.close()
        outputs.lock(other, "--out=a")
