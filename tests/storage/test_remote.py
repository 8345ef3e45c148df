"""Reads of a store: passing errors are retried a few times, final ones are reported at once, in one line."""

from __future__ import annotations

import asyncio
import errno
import sys

import aiohttp
import pytest

from capibara.core.types import TryAgain, UserError
from capibara.storage import remote


class Status(Exception):
    """An error as the stores' libraries raise it."""

    def __init__(self, code: int):
        super().__init__(f"status {code}")
        self.code = code


class NoCredentialsError(Exception):
    """An error as botocore raises it."""


PASSING = [
    Status(429),
    Status(503),
    Status(408),
    ConnectionResetError("reset by peer"),
    OSError(errno.EBUSY, "Please reduce your request rate"),  # s3fs's of 503
    TimeoutError("nothing for a minute"),
    TimeoutError(),
    aiohttp.ClientPayloadError("not enough data"),
    None,  # a connection that ends in the middle, without a word
]


@pytest.mark.parametrize("fault", PASSING, ids=repr)
def test_a_read_that_fails_in_the_middle_is_made_again(store, fault):
    store.pipe_file("/a/b", b"0123456789")
    store.faults[:] = [fault, fault]
    assert remote.read("flaky://a/b", 2, 8) == b"234567"
    assert len(store.reads) == 3


@pytest.mark.parametrize("fault", [fault for fault in PASSING if fault], ids=repr)
def test_a_store_that_always_fails_is_given_up_with_one_line(store, fault):
    store.pipe_file("/a/b", b"0123456789")
    store.faults[:] = [fault] * 20
    with pytest.raises(TryAgain, match=r"flaky://a/b cannot be read: 6 attempts failed, the last with \w+") as raised:
        remote.read("flaky://a/b", 0, 5)
    assert len(store.reads) == remote.ATTEMPTS and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "fault",
    [PermissionError("no"), Status(403), Status(401), OSError("Forbidden: b/bucket\nno"), NoCredentialsError("none")],
)
def test_no_permission_is_told_at_once(store, fault):
    store.pipe_file("/a/b", b"0123456789")
    store.faults[:] = [fault] * 20
    with pytest.raises(UserError, match="flaky://a/b may not be read with this machine's credentials") as raised:
        remote.read("flaky://a/b", 0, 5)
    assert len(store.reads) == 1 and "\n" not in str(raised.value)


@pytest.mark.parametrize("fault", [Status(400), ValueError("Bad Request"), OSError(errno.EINVAL, "Bad Request")])
def test_what_will_not_pass_is_told_at_once(store, fault):
    store.pipe_file("/a/b", b"0123456789")
    store.faults[:] = [fault] * 20
    with pytest.raises(UserError, match="flaky://a/b cannot be read"):
        remote.read("flaky://a/b", 0, 5)
    assert len(store.reads) == 1


def test_a_file_that_has_fewer_bytes_is_called_cut_short(store):
    store.pipe_file("/a/b", b"0123")
    with pytest.raises(UserError, match="flaky://a/b is cut short .2 of 7 bytes at 2"):
        remote.read("flaky://a/b", 2, 9)


@pytest.mark.parametrize("fault", [OSError(errno.EINVAL, "The requested range is not satisfiable"), Status(416)])
def test_a_file_that_ends_before_the_first_byte_is_called_cut_short_at_once(store, fault):
    store.pipe_file("/a/b", b"0123")
    store.faults[:] = [fault] * 20
    with pytest.raises(UserError, match="flaky://a/b is cut short .it has no byte 5"):
        remote.read("flaky://a/b", 5, 9)
    assert len(store.reads) == 1


def test_a_server_that_gives_no_parts_is_told_at_once(store, monkeypatch):
    store.pipe_file("/a/b", b"0123456789")
    whole = store.cat_file
    monkeypatch.setattr(type(store), "cat_file", lambda self, path, **options: whole(path))
    with pytest.raises(UserError, match="flaky://a/b cannot be read in parts"):
        remote.read("flaky://a/b", 2, 8)
    assert len(store.reads) == 1


def test_files_are_listed_sorted_with_their_sizes(store):
    for name in ("b.txt", "a.txt", "c.bin", "inner/d.txt"):
        store.pipe_file(f"/x/{name}", name.encode())
    assert [(entry.url, entry.size) for entry in remote.listed("flaky://x/*.txt")] == [
        ("flaky:///x/a.txt", 5),
        ("flaky:///x/b.txt", 5),
    ]
    assert [entry.url for entry in remote.below("flaky://x")][-1] == "flaky:///x/inner/d.txt"
    assert remote.listed("flaky://x/c.bin")[0].size == 5
    assert remote.listed("flaky://x/none") == remote.listed("flaky://y/*") == remote.below("flaky://y") == []


@pytest.mark.parametrize(
    "url, said",
    [("nothing://a/b", "cannot be opened"), ("s3://bucket/a", r's3fs is not .*pip install -e "[^"]+\[s3\]"')],
)
def test_a_store_that_cannot_be_opened_is_told(url, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # not installed
    with pytest.raises(UserError, match=said):
        remote.read(url, 0, 1)


def test_a_store_that_says_nothing_is_asked_again(store, monkeypatch):
    """An asynchronous library's call is cancelled after the limit."""
    from fsspec.asyn import AsyncFileSystem

    class Silent(AsyncFileSystem):
        calls = 0

        async def _cat_file(self, path, start=None, end=None, **options):
            type(self).calls += 1
            if self.calls < 3:
                await asyncio.sleep(60)
            return b"0123"

    monkeypatch.setattr(remote, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(remote, "_opened", lambda url: (Silent(), "b"))
    assert remote.read("silent://b", 0, 4) == b"0123"
    assert Silent.calls == 3
