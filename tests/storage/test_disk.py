"""The disk's store with unexpected files."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from etils import epath

from capibara.core.types import UserError
from capibara.storage import disk
from capibara.storage.disk import DiskStore
from capibara.storage.store import NONE, Locked

STORE, MOST = DiskStore(), 1 << 16


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path)


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(folder, monkeypatch):
    STORE.write_atomic(folder / "a", b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full)
        STORE.write_atomic(folder / "a", b"new")
    assert STORE.read(folder / "a") == b"old" and STORE.list(folder) == {"a": 3}


@pytest.mark.parametrize("how", ["pipe", "folder", "nothing"])
def test_what_is_no_file_is_not_waited_for(folder, how):
    if how != "nothing":
        (os.mkfifo if how == "pipe" else os.mkdir)(folder / "a")
    with pytest.raises(OSError):
        STORE.read(folder / "a")
    with pytest.raises(OSError):
        STORE.open(folder / "a")
    assert STORE.read_version(folder / "a", MOST) == (b"", NONE)
    assert STORE.matching(str(folder / "a")) == []
    if how != "pipe":  # what is listed is read in ranges, and no pipe is listed
        with pytest.raises(UserError, match="a cannot be read"):
            STORE.read_range(str(folder / "a"), 0, 4)


def test_links_are_files_and_folders_that_are_too_deep_are_refused(folder):
    (folder / "a").write_bytes(b"12345")
    os.symlink(folder / "a", folder / "link")
    os.symlink(folder / "none", folder / "to nothing")
    assert STORE.list(folder) == {"a": 5, "link": 5} and STORE.is_link(folder / "link")
    deep = folder.joinpath(*["d"] * (disk.DEEPEST + 2))
    STORE.make_folder(deep)
    STORE.make_folder(deep)
    with pytest.raises(OSError, match="folders more than 32 deep"):
        STORE.list(folder)


def test_a_folder_that_is_being_removed_has_another_name(folder, monkeypatch):
    """So that no part of it passes for a complete folder; an older folder with the temporary name is removed first."""
    STORE.make_folder(folder / "5")
    STORE.make_folder(folder / "5.unfinished")
    (folder / "5" / "a").write_bytes(b"1")
    (folder / "5.unfinished" / "b").write_bytes(b"1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        rmtree = type(folder).rmtree
        patch.setattr(type(folder), "rmtree", lambda path: rmtree(path) if (path / "b").exists() else _interrupt())
        STORE.remove_folder(folder / "5", aside=folder / "5.unfinished", last="a")
    assert STORE.list(folder) == {"5.unfinished/a": 1}


def _interrupt():
    raise KeyboardInterrupt


def test_a_lock_is_waited_for_and_its_holder_is_named(folder):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with STORE.lock(folder, 1.0):
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    with pytest.raises(Locked) as raised, STORE.lock(folder, 0.05):
        pass
    assert raised.value.args == (os.getpid(),)
    threading.Timer(0.1, leave.set).start()
    with STORE.lock(folder, 10.0):
        pass
    holder.join()


def test_room_is_that_of_the_disk_where_the_folder_would_be(folder):
    assert STORE.free_bytes(folder / "none" / "yet") == pytest.approx(STORE.free_bytes(folder), rel=0.1)
