"""The store's interface, for each kind: a disk, gs:// and s3://."""

from __future__ import annotations

import concurrent.futures
import secrets
import threading

import numpy as np
import pytest
from etils import epath

from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import disk, hashing, remote, stores
from capibara.storage.store import NONE, PARTIAL, Changed, Locked

MOST = 1 << 16


@pytest.fixture(params=["disk", "gs", "s3"])
def folder(request, tmp_path):
    """A folder that does not exist yet, in each kind of store."""
    if request.param == "disk":
        return epath.Path(tmp_path / "folder")
    request.getfixturevalue(request.param)
    return stores.folder_of(f"{request.param}://bucket/{secrets.token_hex(4)}")


@pytest.fixture(params=["gs", "s3"])
def path(request):
    """A file that does not exist yet, in each kind of bucket."""
    request.getfixturevalue(request.param)
    return stores.folder_of(f"{request.param}://bucket/{secrets.token_hex(4)}") / "a file"


def test_files_are_written_read_listed_and_removed(folder):
    store = stores.of(folder)
    (folder / "inner").mkdir(parents=True, exist_ok=True)
    store.write_atomic(folder / "a", b"one")
    store.write_atomic(folder / "a", b"two")
    data = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)
    assert store.write_hashed(folder / "inner" / "0.0", data) == hashing.hash_of(data)
    store.sync(folder)
    assert store.read(folder / "a") == b"two" and store.size(folder / "a") == 3
    assert store.list(folder) == {"a": 3, "inner/0.0": data.size}
    content, digest = hashing.read_hashed(folder / "inner" / "0.0", data.size)
    assert np.array_equal(content, data) and digest == hashing.hash_of(data)
    store.remove(folder / "a")
    store.remove(folder / "a")
    assert store.list(folder) == {"inner/0.0": data.size}
    store.remove_folder(folder, aside=folder.with_name("aside"), last="0.0")
    assert not folder.exists() and not folder.with_name("aside").exists()


def test_a_folder_gets_another_name(folder):
    """With the folders in it, which s3fs's own renaming takes for files."""
    store, other = stores.of(folder), folder.with_name(f"{folder.name}.corrupted")
    store.make_folder(folder / "inner" / "deep")
    for name in ("a", "inner/b", "inner/deep/c"):
        store.write_atomic(folder / name, name.encode())
    store.rename_folder(folder, other)
    assert not folder.exists() and store.list(other) == {"a": 1, "inner/b": 7, "inner/deep/c": 12}
    assert store.read(other / "inner" / "b") == b"inner/b"


def test_ranges_globs_and_lines(folder, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)  # a range beyond the end may be a connection that was cut
    store = stores.of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    store.append(folder / "a.jsonl", "first")
    store.append(folder / "a.jsonl", "second")
    store.write_atomic(folder / "b.jsonl", b"torn")
    store.append(folder / "b.jsonl", "more") if store.appends else None
    assert [line for line in store.lines(folder / "a.jsonl") if line] == [b"first", b"second"]
    found = store.matching(f"{folder}/*.jsonl")
    assert [entry.url for entry in found] == [f"{folder}/a.jsonl", f"{folder}/b.jsonl"] and found[0].size == 13
    assert store.matching(f"{folder}/none") == store.matching(f"{folder}/*.none") == []
    assert store.read_range(f"{folder}/a.jsonl", 2, 8) == b"rst\nse"
    with pytest.raises(UserError, match="a.jsonl is cut short"):
        store.read_range(f"{folder}/a.jsonl", 8, 20)


def test_a_disk_adds_a_line_after_a_torn_one_and_reads_no_more_than_it_is_told(tmp_path):
    store, path = stores.of(tmp_path), epath.Path(tmp_path / "a")
    path.write_bytes(b"torn")
    store.append(path, "more")
    assert path.read_bytes() == b"torn\nmore\n"
    with pytest.raises(limits.Refused, match="10 bytes, must have at most 9"):
        store.read(path, 9)


def test_of_two_that_lock_a_folder_on_a_disk_the_second_waits(tmp_path):
    store = stores.of(tmp_path)
    with store.lock(tmp_path, 1.0):
        with pytest.raises(Locked), store.lock(tmp_path, 0.1):
            pass
    with store.lock(tmp_path, 0.1):
        pass


def test_a_file_that_another_process_is_writing_is_left_to_it(tmp_path, monkeypatch):
    """The temporary name may be gone before its turn comes."""
    synced = []
    monkeypatch.setattr(disk, "sync_entry", synced.append)
    (tmp_path / "step").mkdir()
    for name in ("whole", f"hashes.1{PARTIAL}"):
        (tmp_path / "step" / name).touch()
    stores.of(tmp_path).sync(epath.Path(tmp_path / "step"))
    assert {epath.Path(path).name for path in synced} == {tmp_path.name, "step", "whole"}


def test_what_writers_of_one_file_write_is_whole(tmp_path):
    """Neither may rename what the other is still writing."""
    path, errors = epath.Path(tmp_path / "file"), []

    def write(content):
        try:
            for _ in range(20):
                stores.of(path).write_atomic(path, content)
                assert path.read_bytes() in contents
        except BaseException as error:
            errors.append(error)

    contents = [letter * 100_000 for letter in (b"a", b"b", b"c")]
    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not errors and [found.name for found in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_written_to_is_no_folder_of_a_run():
    with pytest.raises(
        UserError, match="^memory://run must be a local folder, or one in a bucket: name that, e.g. gs://"
    ):
        stores.folder_of("memory://run")


def test_a_file_is_written_and_removed_at_the_version_that_was_seen_alone(path):
    store = stores.of(path)
    assert store.read_version(path, MOST) == (b"", NONE)
    first = store.write_version(path, b"one", NONE)
    for expected in (NONE, f"{first}1"):
        with pytest.raises(Changed):
            store.write_version(path, b"another", expected)
    assert store.read_version(path, MOST) == (b"one", first)
    second = store.write_version(path, b"two", first)
    store.remove_version(path, first)
    assert store.read_version(path, MOST) == (b"two", second)
    store.remove_version(path, second)
    store.remove_version(path, second)
    assert store.read_version(path, MOST) == (b"", NONE)
    with pytest.raises(Changed):
        store.write_version(path, b"three", second)


def test_of_several_at_once_one_wins(path):
    store = stores.of(path)

    def tried(number, expected):  # what it writes was there in no turn before: S3 tells versions by their content
        try:
            return store.write_version(path, f"{number}".encode(), expected), number
        except Changed:
            return None

    version = NONE
    for first in (0, 6):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            found = [one for one in pool.map(tried, range(first, first + 6), [version] * 6) if one]
        assert len(found) == 1
        content, version = store.read_version(path, MOST)
        assert (version, int(content)) == found[0]


def test_a_file_that_is_larger_than_any_of_ours_is_not_read(path):
    store = stores.of(path)
    version = store.write_version(path, b"x" * (MOST + 1), NONE)
    assert store.read_version(path, MOST) == (b"", version)
