"""The store of this machine's files: disks, and mounted file systems."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from capibara.core import limits, processes
from capibara.core.types import UserError
from capibara.storage import packed, threads
from capibara.storage.store import NONE, PARTIAL, Entry, Locked, OpenFile, Path

if TYPE_CHECKING:
    import numpy as np
    from etils import epath

DEEPEST = 32  # nested folders
_WRITTEN = 1 << 20  # bytes that are hashed and written at a time
_LOCK_LOOK_S = 0.05  # between two attempts at a lock


class DiskStore:
    """See `stores.Store`."""

    has_local_paths = appends = renames = True
    verifies = False

    def read(self, path: Path, most: int | None = None) -> bytes:
        check_regular(path)
        if most is not None and (size := self.size(path)) > most:
            raise limits.Refused(f"{size:,} bytes, must have at most {most:,}")
        with open(path, "rb") as file:
            content = file.read(-1 if most is None else most + 1)
        if most is not None and len(content) > most:  # it has grown, or has no size, as in /proc
            raise limits.Refused(f"more than {most:,} bytes")
        return content

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        try:
            # Without waiting for a writer, if it is a pipe: that cannot be read at a position.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                content = os.pread(descriptor, stop - start, start)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): copy it again") from None
        if len(content) != stop - start:
            raise UserError(
                f"{path} is cut short ({len(content):,} of {stop - start:,} bytes at {start:,}): copy it again"
            )
        return content

    def open(self, path: Path) -> OpenFile:
        check_regular(path)
        return open(path, "rb", buffering=0)

    def lines(self, path: Path) -> Iterator[bytes]:
        return (line for _, line in packed.lines(path))

    def size(self, path: Path) -> int:
        return os.stat(path).st_size

    def make_folder(self, folder: epath.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def write_atomic(self, path: epath.Path, data: bytes) -> None:
        # A name of its own: of two processes that write the same file, one must not rename what the other is writing.
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
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

    def write_hashed(self, path: epath.Path, data: np.ndarray) -> str:
        import xxhash

        view, digest = memoryview(data.data), xxhash.xxh3_128()
        with open(path, "wb", buffering=0) as file:
            for begin in range(0, len(view), _WRITTEN):
                left = view[begin : begin + _WRITTEN]
                digest.update(left)
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        return digest.hexdigest()

    def append(self, path: epath.Path, line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode() + b"\n")

    def list(self, folder: epath.Path) -> dict[str, int]:
        result: dict[str, int] = {}
        left = [(os.fspath(folder), "")]
        while left:
            inner, prefix = left.pop()
            if prefix.count("/") > DEEPEST:
                raise OSError(errno.ELOOP, f"it has folders more than {DEEPEST} deep", inner)
            with os.scandir(inner) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append((entry.path, f"{prefix}{entry.name}/"))
                        continue
                    try:
                        result[f"{prefix}{entry.name}"] = entry.stat().st_size
                    except OSError as error:  # a run has just replaced it; or a link to nothing, or to itself
                        if error.errno not in (errno.ENOENT, errno.ELOOP):
                            raise
        return dict(sorted(result.items()))

    def matching(self, pattern: str) -> Sequence[Entry]:
        result = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        entries = []
        for path in filter(os.path.isfile, result):
            about = os.stat(path)
            entries.append(Entry(path, about.st_size, str(about.st_mtime_ns)))
        return entries

    def is_link(self, path: epath.Path) -> bool:
        return os.path.islink(path)

    def absolute(self, path: str) -> str:
        return os.path.abspath(path)

    def free_bytes(self, folder: Path) -> int:
        folder = os.path.abspath(folder)
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        return shutil.disk_usage(folder).free

    def remove(self, path: epath.Path) -> None:
        path.unlink(missing_ok=True)
        sync_entry(path.parent)

    def rename_folder(self, folder: epath.Path, target: epath.Path) -> None:
        folder.rename(target)

    def remove_folder(self, folder: epath.Path, *, aside: epath.Path, last: str) -> None:
        if aside.exists():
            aside.rmtree()
        folder.rename(aside).rmtree()

    def sync(self, folder: epath.Path) -> None:
        folders, files = [os.fspath(folder.parent)], []
        for root, _, names in os.walk(folder, onerror=_raise):
            folders.append(root)
            # Another process may be writing one: it syncs the file itself, and renames it in a moment.
            files += [os.path.join(root, name) for name in names if not name.endswith(PARTIAL)]
        threads.each(sync_entry, files)
        threads.each(sync_entry, folders[::-1])

    @contextlib.contextmanager
    def lock(self, folder: epath.Path, within_s: float) -> Iterator[None]:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _lock(descriptor, within_s)
            yield
        finally:
            os.close(descriptor)

    def read_version(self, path: epath.Path, most: int) -> tuple[bytes, str]:
        try:
            # Without waiting for a writer, if it is a pipe.
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                return (file.read(most) if regular else b""), NONE
        except OSError:
            return b"", NONE

    def write_version(self, path: epath.Path, data: bytes, expected: str) -> str:
        self.write_atomic(path, data)  # the folder's lock is what others wait for
        return NONE

    def remove_version(self, path: epath.Path, expected: str) -> None:
        path.unlink()


def _lock(descriptor: int, within_s: float) -> None:
    limit_s = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= limit_s:
                raise Locked(processes.lock_holder(descriptor)) from None
        except OSError:  # a file system without locks
            return
        time.sleep(_LOCK_LOOK_S)


def check_regular(path: Path) -> None:
    """Raises OSError if a path is a pipe, a socket or a device: opening it may block, and reading never end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def sync_entry(path: Path) -> None:
    """Waits until a file, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
