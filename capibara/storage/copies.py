"""Local copies of remote files, for libraries that open files by path: weights, tokenizers, Gin files.

Each address has a folder in the user's cache, with sizes and versions of the copied files: a file that was replaced in
the store is copied again, an unchanged one is not.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from typing import IO

from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import outputs, remote, stores
from capibara.storage.store import Entry

PIECE_BYTES = 16 << 20  # per request
_THREADS = 8
MOST_FILES = 10_000
_RECORD = "copied.json"


def cache_folder(name: str) -> str:
    """Makes a folder in this user's cache: capibara/NAME in XDG_CACHE_HOME, or in ~/.cache.

    Raises:
      UserError: it cannot be made.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(base, "capibara", name)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made ({error.strerror}): set XDG_CACHE_HOME to a folder of yours"
        ) from None
    return folder


def local_file(url: str) -> str:
    """The path of a local copy of one file; a local file's own path.

    Raises:
      UserError: it does not exist, cannot be read, or does not fit the disk.
    """
    if stores.of(url).has_local_paths:
        return url
    result = remote.listed(url)
    if not result:
        raise UserError(f"{url} does not exist, or its bucket does not")
    return local_files(result[:1])[0]


def local_files(entries: Sequence[Entry]) -> list[str]:
    """The paths of local copies of files, in order; raises like `local_file`."""
    folders: dict[str, list[Entry]] = {}
    for entry in entries:
        folders.setdefault(os.path.dirname(entry.url), []).append(entry)
    paths = {
        entry.url: path
        for folder, inner in folders.items()
        for entry, path in zip(inner, _copied(folder, inner), strict=True)
    }
    return [paths[entry.url] for entry in entries]


def local_folder(url: str, names: Collection[str] | None = None) -> str:
    """The path of a local copy of a folder; a local folder's own path.

    Args:
      url: the folder.
      names: the wanted files in it; None: all below it.

    Returns:
      A folder with the existing files; it may lack some of `names`.

    Raises:
      UserError: it is empty, cannot be read, or does not fit the disk.
    """
    if stores.of(url).has_local_paths:
        return url
    url = remote.address(url.rstrip("/"))
    result = remote.below(url)
    if not result:
        raise UserError(f"{url} does not exist, or its bucket does not")
    there = {entry.url[len(url) + 1 :] for entry in result}
    if names is not None:
        result = [entry for entry in result if entry.url[len(url) + 1 :] in names]
    if len(result) > MOST_FILES:
        raise UserError(
            f"{url} has {len(result):,} files, must have at most {MOST_FILES:,}: name the model's own folder"
        )
    _copied(url, result, there)
    return _folder_of(url)


def _folder_of(url: str) -> str:
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    # The last component is kept: errors show it, and libraries look at its extension.
    return os.path.join(cache_folder("copies"), digest, os.path.basename(url) or "root")


def _copied(url: str, entries: Sequence[Entry], there: Collection[str] | None = None) -> list[str]:
    """Paths of copies of files below an address; `there`: all names that exist there, copies of others are removed."""
    folder = _folder_of(url)
    names = [entry.url[len(url) :].lstrip("/") for entry in entries]
    paths = [limits.inside(folder, name, url) for name in names]
    os.makedirs(folder, exist_ok=True)
    with _locked(f"{folder}.lock"):
        record = _record(folder)
        if there is not None and (absent := [name for name in record if name not in there]):
            for name in absent:
                with contextlib.suppress(OSError):
                    os.unlink(limits.inside(folder, name, url))
            record = {name: about for name, about in record.items() if name in there}
            _save_record(folder, record)
        known = {name: [entry.size, entry.version] for name, entry in zip(names, entries, strict=True)}
        missing = [
            (entry, path)
            for name, entry, path in zip(names, entries, paths, strict=True)
            if record.get(name) != known[name] or _size(path) != entry.size
        ]
        if missing:
            begin_s, total = time.perf_counter(), sum(entry.size for entry, _ in missing)
            _check_space(url, folder, total)
            for entry, path in missing:
                _copy(entry, path)
            _save_record(folder, record | known)
            took_s = time.perf_counter() - begin_s
            line = "copied %d files, %.1f MiB, of %s to %s in %.1f s"
            logging.getLogger(__name__).info(line, len(missing), total / limits.MIB, url, folder, took_s)
    return paths


def _copy(entry: Entry, path: str) -> None:
    """Writes a complete copy, atomically."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    starts = range(0, entry.size, PIECE_BYTES)
    try:
        with _written(path, entry) as file, concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            file.truncate(entry.size)

            def piece(start: int) -> None:
                content = remote.read(entry.url, start, min(start + PIECE_BYTES, entry.size))
                os.pwrite(file.fileno(), content, start)

            waiting = [pool.submit(piece, start) for start in starts]
            try:
                for item in waiting:
                    item.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): free the disk, or set XDG_CACHE_HOME") from error


@contextlib.contextmanager
def _written(path: str, entry: Entry) -> Iterator[IO[bytes]]:
    """A file that is renamed to the path when the context ends."""
    with outputs.replacing(path) as partial:
        with open(partial, "wb") as file:
            yield file
        # Where changes are detected by times, copies on all hosts, and of later starts, have the same time.
        stamp_ns = int.from_bytes(hashlib.blake2b(entry.version.encode(), digest_size=7).digest(), "little")
        os.utime(partial, ns=(stamp_ns, stamp_ns))


def _check_space(url: str, folder: str, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(
            f"{url} has {size / 2**30:.1f} GiB to copy, {folder} has room for {free / 2**30:.1f}: set XDG_CACHE_HOME to a "
            "larger disk (or, for training texts, read them as they come with @ShardedSource())"
        )


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


def _record(folder: str) -> dict[str, list]:
    try:
        return limits.read_json(os.path.join(os.path.dirname(folder), _RECORD))
    except (FileNotFoundError, UserError):  # incomplete: everything is copied again
        return {}


def _save_record(folder: str, record: dict[str, list]) -> None:
    path = os.path.join(os.path.dirname(folder), _RECORD)
    with outputs.replacing(path) as partial, open(partial, "w", encoding="utf-8") as file:
        json.dump(record, file)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Lets concurrent processes copy the same files once; without disk locks each copies, and one copy stays."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
