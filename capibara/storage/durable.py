"""Files that survive a power cut, in local folders and in buckets (gs://)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import xxhash
from etils import epath

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.storage.outputs import check_regular, is_remote, sync_entry

_PIECE = 1 << 18  # bytes that are hashed at a time: still in the processor's cache when they are
_WRITTEN = 1 << 20  # bytes that are hashed and written at a time
_ALIGNED = 64  # bytes: what JAX takes over on a CPU without a copy
_MOST_THREADS = 16
_DEEPEST = 32  # folders in each other
PARTIAL = ".partial"  # ends the name of a file that is being written

# For buckets etils takes TensorFlow where that is installed, which takes 13 s to import; it asks this once, early.
os.environ.setdefault("EPATH_USE_TF", "false")

T = TypeVar("T")
R = TypeVar("R")


def folder_of(path: str) -> epath.Path:
    """The folder that a user names: a local one as an absolute path, one in a bucket as it is.

    Raises:
      UserError: what reads that bucket is not installed.
    """
    if path.startswith("gs://"):
        extras.require("gcsfs", extra="gcs", why=path)
        for library in ("gcsfs", "fsspec"):  # they log each fault with its trace, and raise it as well
            logging.getLogger(library).setLevel(logging.CRITICAL)
    elif is_remote(path):
        raise UserError(
            f"{path} must be a local folder, or one in Google Cloud Storage: name that, e.g. gs://bucket/run"
        )
    return epath.Path(path if is_remote(path) else os.path.abspath(path))


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
    sync_entry(path.parent)


def remove(path: epath.Path) -> None:
    """Removes a file, if it is there; a power cut does not bring it back."""
    path.unlink(missing_ok=True)
    if not is_remote(path):
        sync_entry(path.parent)


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
    each(sync_entry, files)
    each(sync_entry, folders[::-1])


def read_bounded(path: epath.Path, most: int) -> bytes:
    """The bytes of a file that is read whole.

    Raises:
      limits.Refused: it has more than `most`.
      OSError: it is no file, or cannot be read.
    """
    if not is_remote(path):
        check_regular(path)
        if (size := size_of(path)) > most:
            raise limits.Refused(f"{size:,} bytes, must have at most {most:,}")
    return path.read_bytes()


def files_below(folder: epath.Path) -> dict[str, int]:
    """The bytes of all files below a folder, by their paths relative to it, sorted.

    Raises:
      OSError: the folder cannot be read.
    """
    found: dict[str, int] = {}

    def walk(inner: epath.Path, prefix: str) -> None:
        for path in inner.iterdir():
            if path.is_dir():
                walk(path, f"{prefix}{path.name}/")
            else:
                found[f"{prefix}{path.name}"] = size_of(path)

    def walk_local() -> None:
        left = [(os.fspath(folder), "")]
        while left:
            inner, prefix = left.pop()
            if prefix.count("/") > _DEEPEST:
                raise OSError(errno.ELOOP, f"it has folders more than {_DEEPEST} deep", inner)
            with os.scandir(inner) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append((entry.path, f"{prefix}{entry.name}/"))
                        continue
                    with contextlib.suppress(FileNotFoundError):  # a run has just replaced it; or a link to nothing
                        found[f"{prefix}{entry.name}"] = entry.stat().st_size

    if is_remote(folder):
        walk(folder, "")
    else:
        walk_local()
    return dict(sorted(found.items()))


def size_of(path: epath.Path) -> int:
    """The bytes of a file."""
    return path.stat().length if is_remote(path) else os.stat(path).st_size


def hash_of(data: bytes | memoryview | np.ndarray) -> str:
    """XXH3 with 128 bits, as the command xxh128sum prints it: hashed faster than read, it finds what chance does."""
    return xxhash.xxh3_128_hexdigest(data)


def file_hash(path: epath.Path) -> str:
    """`hash_of` a file's bytes."""
    return first_hash(path, None)[1]


def first_hash(path: epath.Path, size: int | None) -> tuple[int, str]:
    """How many of a file's first `size` bytes (None: of all) there are, and their hash; little of it is held."""
    digest, piece, left = (
        xxhash.xxh3_128(),
        memoryview(np.empty(_PIECE, np.uint8)),
        sys.maxsize if size is None else size,
    )
    begun = left
    with _unbuffered(path) as file:
        while left and (count := file.readinto(piece[: min(left, _PIECE)])):
            digest.update(piece[:count])
            left -= count
    return begun - left, digest.hexdigest()


def write_hashed(path: epath.Path, data: np.ndarray) -> str:
    """Writes a new file that nobody reads yet, and hashes it in the same pass; it is on the disk when this returns.

    Its name is after a `sync` of the folders above it.

    Args:
      path: the file.
      data: uint8 [size].

    Returns:
      `hash_of` the data.
    """
    view, digest = memoryview(data), xxhash.xxh3_128()
    if is_remote(path):
        path.write_bytes(data.tobytes())
        return hash_of(data)
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, len(view), _WRITTEN):
            left = view[begin : begin + _WRITTEN]
            digest.update(left)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def read_hashed(path: epath.Path, size: int) -> tuple[np.ndarray, str]:
    """A file's bytes and their hash, in one pass.

    Args:
      path: the file.
      size: its bytes; of a longer file these are the first.

    Returns:
      uint8 [size], or shorter where the file is, aligned for the devices; and the hash.
    """
    content, digest, begin = empty(size), xxhash.xxh3_128(), 0
    view = memoryview(content)
    with _unbuffered(path) as file:
        while begin < size and (count := file.readinto(view[begin : begin + _PIECE])):
            digest.update(view[begin : begin + count])
            begin += count
    return content[:begin], digest.hexdigest()


def empty(size: int) -> np.ndarray:
    """uint8 [size] of any content, aligned for the devices."""
    room = np.empty(size + _ALIGNED, np.uint8)
    begin = -room.ctypes.data % _ALIGNED
    return room[begin : begin + size]


def each(fn: Callable[[T], R], items: Sequence[T] | Iterable[T]) -> list[R]:
    """`fn` of every item, in threads; a fault is raised when all that were under way have ended, and no more begin."""
    items = list(items)
    found: list[R | None] = [None] * len(items)
    left, failed = iter(range(len(items))), threading.Event()

    def some() -> None:
        # A job a thread, not one an item: beside training, the handing out of small ones costs more than they do.
        for index in left:
            if failed.is_set():
                return
            try:
                found[index] = fn(items[index])
            except BaseException:
                failed.set()
                raise

    helpers = [_pool().submit(some) for _ in range(min(_MOST_THREADS, 2 * (os.cpu_count() or 1), len(items)) - 1)]
    try:
        some()
    finally:
        # What has not begun finds nothing left; to wait for it could be for ever, where `fn` comes here as well.
        begun = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(begun)
    for helper in begun:
        helper.result()
    return found


def _unbuffered(path: epath.Path) -> Any:
    if is_remote(path):
        return path.open("rb")
    check_regular(path)
    return open(path, "rb", buffering=0)


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_MOST_THREADS, "capibara-files")


def _raise(error: OSError) -> None:
    raise error
