"""Copies of remote files: complete or absent, of the right size, and renewed when the store's files change."""

from __future__ import annotations

import errno
import os

import pytest

from capibara.core.types import TryAgain, UserError
from capibara.storage import copies


def test_a_folder_is_copied_once_and_what_has_changed_again(store):
    store.pipe({"/m/config.json": b"{}", "/m/inner/model": b"0123456789", "/m/empty": b""})
    folder = copies.local_folder("flaky://m/")
    assert os.path.basename(folder) == "m"
    with open(os.path.join(folder, "inner/model"), "rb") as file:
        assert file.read() == b"0123456789"
    assert os.path.getsize(os.path.join(folder, "empty")) == 0
    store.reads.clear()
    assert copies.local_folder("flaky://m") == folder and not store.reads
    store.pipe_file("/m/config.json", b"[]")  # of the same size, but later
    assert copies.local_folder("flaky://m") == folder
    assert [path for path, *_ in store.reads] == ["/m/config.json"]
    with open(os.path.join(folder, "config.json"), "rb") as file:
        assert file.read() == b"[]"


def test_a_copy_that_somebody_cut_is_made_again(store):
    store.pipe_file("/m/a", b"0123456789")
    path = copies.local_file("flaky://m/a")
    os.truncate(path, 3)
    assert copies.local_file("flaky://m/a") == path and os.path.getsize(path) == 10


def test_only_the_named_files_of_a_folder_are_copied(store):
    store.pipe({"/m/tokenizer.json": b"{}", "/m/model.safetensors": b"large", "/m/old/tokenizer.json": b"another"})
    folder = copies.local_folder("flaky://m", {"tokenizer.json"})
    assert os.listdir(folder) == ["tokenizer.json"]


def test_what_the_store_has_no_longer_is_no_longer_in_the_copy(store):
    store.pipe({"/m/config.json": b"{}", "/m/adapter_config.json": b"{}"})
    folder = copies.local_folder("flaky://m")
    store.rm_file("/m/adapter_config.json")
    assert copies.local_folder("flaky://m", {"config.json"}) == folder
    assert os.listdir(folder) == ["config.json"]


def test_files_that_are_not_wanted_do_not_count(store, monkeypatch):
    monkeypatch.setattr(copies, "MOST_FILES", 2)
    store.pipe({f"/m/checkpoints/{i}": b"x" for i in range(3)} | {"/m/tokenizer.json": b"{}"})
    assert os.listdir(copies.local_folder("flaky://m", {"tokenizer.json"})) == ["tokenizer.json"]
    with pytest.raises(UserError, match="has 4 files, must have at most 2"):
        copies.local_folder("flaky://m")


def test_a_copy_survives_a_read_that_fails_and_leaves_nothing_where_all_do(store, monkeypatch):
    monkeypatch.setattr(copies, "PIECE_BYTES", 4)
    store.pipe_file("/m/a", b"0123456789")
    store.faults[:] = [ConnectionResetError("reset"), None]
    with open(copies.local_file("flaky://m/a"), "rb") as file:
        assert file.read() == b"0123456789"
    store.pipe_file("/m/b", b"0123456789")
    store.faults[:] = [ConnectionResetError("reset")] * 100
    with pytest.raises(TryAgain, match="flaky:///m/b cannot be read"):
        copies.local_file("flaky://m/b")
    left = [name for _, _, names in os.walk(copies.cache_folder("copies")) for name in names]
    assert sorted(left) == ["a", "copied.json", "m.lock"]


def test_copies_of_one_version_have_one_time(store):
    store.pipe_file("/m/a", b"0123456789")
    path = copies.local_file("flaky://m/a")
    first_ns = os.stat(path).st_mtime_ns
    os.unlink(path)
    assert os.stat(copies.local_file("flaky://m/a")).st_mtime_ns == first_ns


def test_what_is_not_there_or_does_not_fit_is_refused(store, monkeypatch):
    for ask in (copies.local_file, copies.local_folder):
        with pytest.raises(UserError, match="flaky:///?m/none does not exist"):
            ask("flaky://m/none")
    store.pipe_file("/m/a", b"0123456789")
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda path: _Free())
    with pytest.raises(UserError, match="GiB to copy"):
        copies.local_file("flaky://m/a")


class _Free:
    free = 3


def test_hosts_that_share_a_disk_without_locks_copy_beside_each_other(store, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(copies.fcntl, "flock", no_locks)
    store.pipe_file("/m/a", b"0123456789")
    read, others = copies.remote.read, []

    def meanwhile(*asked):
        if not others:
            others.append(None)
            others.append(copies.local_file("flaky://m/a"))  # another host, from beginning to end
        return read(*asked)

    monkeypatch.setattr(copies.remote, "read", meanwhile)
    path = copies.local_file("flaky://m/a")
    assert others == [None, path] and os.listdir(os.path.dirname(path)) == ["a"]
    with open(path, "rb") as file:
        assert file.read() == b"0123456789"
