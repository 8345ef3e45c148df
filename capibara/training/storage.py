"""Files that survive a power cut, in local folders and in buckets (gs://)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from etils import epath

_PIECE = 1 << 20  # bytes that are hashed at a time
_MOST_THREADS = 16
PARTIAL = ".partial"  # ends the name of a file that is being written

T = TypeVar("T")
R = TypeVar("R")


def folder_of(path: str) -> epath.Path:
    """The folder that a user names: a local one as an absolute path, one in a bucket as it is."""
    return epath.Path(path if is_remote(path) else os.path.abspath(path))


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is in a bucket: there a file is there whole or not at all, and nothing is renamed."""
    return "://" in os.fspath(path)


def write(path: epath.Path, data: bytes) -> None:
    """Puts a whole file in place, or none: when this returns, a power cut does not lose it.

    Raises:
      OSError: it cannot be written; a file that was there before is unchanged.
    """
    if is_remote(path):
        path.write_bytes(data)
        return
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    _sync(path.parent)


def remove(path: epath.Path) -> None:
    """Removes a file, if it is there; a power cut does not bring it back."""
    path.unlink(missing_ok=True)
    if not is_remote(path):
        _sync(path.parent)


def sync(folder: epath.Path) -> None:
    """Has everything below a local folder, and the folder's own entry, written to the disk.

    Raises:
      OSError: the disk could not take it.
    """
    if is_remote(folder):
        return
    folders, files = [os.fspath(folder.parent)], []
    for root, _, names in os.walk(folder, onerror=_raise):
        folders.append(root)
        # Another process may be writing one: it syncs it itself, and under that name it is gone in a moment.
        files += [os.path.join(root, name) for name in names if not name.endswith(PARTIAL)]
    each(_sync, files)
    each(_sync, folders[::-1])


def files_below(folder: epath.Path) -> list[str]:
    """The paths of all files below a folder, relative to it, sorted.

    Raises:
      OSError: the folder cannot be read.
    """
    found = []

    def walk(inner: epath.Path, prefix: str) -> None:
        for path in inner.iterdir():
            if path.is_dir():
                walk(path, f"{prefix}{path.name}/")
            else:
                found.append(f"{prefix}{path.name}")

    walk(folder, "")
    return sorted(found)


def sha256(path: epath.Path) -> str:
    """The hash of a file's bytes, as the command sha256sum prints it."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb") as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def each(fn: Callable[[T], R], items: Sequence[T] | Iterable[T]) -> list[R]:
    """`fn` of every item, in threads; the first fault is raised when all have ended."""
    items = list(items)
    if len(items) < 2:
        return [fn(item) for item in items]
    threads = min(_MOST_THREADS, 2 * (os.cpu_count() or 1), len(items))
    with concurrent.futures.ThreadPoolExecutor(threads, "capibara-files") as pool:
        return list(pool.map(fn, items))


def _sync(path: epath.PathLike) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
