"""The interface of a store of files, which disks and buckets implement.

A path is an etils.epath.Path, which lists and opens files in every store; `stores.of(path)` returns its Store.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

if TYPE_CHECKING:  # verbs import this module early, so it imports little
    import numpy as np
    from etils import epath

PARTIAL = ".partial"  # the extension of a file that is being written
NONE = ""  # the version of a missing file, and of all files in stores without versions

Path = str | os.PathLike[str]


class Entry(NamedTuple):
    """A file of a store.

    Attributes:
      url: its address, or its path on this machine.
      size: its bytes.
      version: changes when its content is replaced, if the store reports that; may be empty.
    """

    url: str
    size: int
    version: str


class Changed(Exception):
    """The file does not have the expected version: another process has written or removed it."""


class Locked(TimeoutError):
    """Another process holds a folder's lock for too long; the argument is that process's id, if known."""


class OpenFile(Protocol):
    """A file that is open for reading."""

    def readinto(self, buffer: memoryview) -> int:
        """Fills a buffer, or a part of it; returns the number of bytes, 0 at the end."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None, /
    ) -> None: ...


@runtime_checkable
class Store(Protocol):
    """Operations on the files of one store; all paths passed to it lie in that store.

    Attributes:
      has_local_paths: libraries can open its files by path; files of other stores need `copies`.
      appends: a file can be appended to; otherwise it is rewritten as a whole.
      renames: a folder can be renamed at once; otherwise its files are copied one by one.
      verifies: the store detects corruption and loss of stored content itself.
    """

    has_local_paths: bool
    appends: bool
    renames: bool
    verifies: bool

    def read(self, path: Path, most: int | None = None) -> bytes:
        """The bytes of a whole file.

        Raises:
          limits.Refused: it has more than `most` bytes, if the size is known before the read.
          OSError: it is no file, or cannot be read.
        """
        ...

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop` of a file.

        Raises:
          UserError: it is shorter, or cannot be read.
          TryAgain: the store does not answer.
        """
        ...

    def open(self, path: Path) -> OpenFile:
        """Opens a file for reading, without a buffer where that costs nothing; raises OSError like `read`."""
        ...

    def lines(self, path: Path) -> Iterator[bytes]:
        """The lines of a file, without their ends; leaves out lines whose length is known to be over the limit."""
        ...

    def size(self, path: Path) -> int:
        """The size of a file in bytes."""
        ...

    def make_folder(self, folder: epath.Path) -> None:
        """Makes a missing folder and its parents, in stores that have folders; never makes a bucket."""
        ...

    def write_atomic(self, path: epath.Path, data: bytes) -> None:
        """Writes a complete file, atomically: once this returns, a power cut does not lose it.

        Raises:
          OSError: it cannot be written; an existing file is unchanged.
        """
        ...

    def write_hashed(self, path: epath.Path, data: np.ndarray) -> str:
        """Writes a new file that no process reads yet; returns hashing.hash_of its data, uint8 [size], from the same pass.

        The content is durable when this returns; the name is after a `sync` of the folders above it.
        """
        ...

    def append(self, path: epath.Path, line: str) -> None:
        """Appends a line to a file, or makes it; a line that a killed process left incomplete is ended first."""
        ...

    def list(self, folder: epath.Path) -> dict[str, int]:
        """The sizes of all files below a folder, by their paths relative to it, sorted.

        Raises:
          OSError: the folder cannot be read.
        """
        ...

    def matching(self, pattern: str) -> Sequence[Entry]:
        """The files that a path or a glob matches, sorted; empty: there are none. Raises like `read_range`."""
        ...

    def is_link(self, path: epath.Path) -> bool:
        """Whether a path is a symbolic link."""
        ...

    def absolute(self, path: str) -> str:
        """The path that names the same file from any working directory."""
        ...

    def free_bytes(self, folder: Path) -> int | None:
        """The bytes that can still be written to a folder, which need not exist; None: no known limit."""
        ...

    def remove(self, path: epath.Path) -> None:
        """Removes a file if it exists, durably."""
        ...

    def rename_folder(self, folder: epath.Path, target: epath.Path) -> None:
        """Gives a folder a name that nothing has; where the store does not rename, file by file."""
        ...

    def remove_folder(self, folder: epath.Path, *, aside: epath.Path, last: str) -> None:
        """Removes a folder so that an interrupted removal never leaves a folder that looks complete.

        Args:
          folder: to remove.
          aside: the name that it gets first, in stores that rename.
          last: the file that is removed last, in stores that do not.
        """
        ...

    def sync(self, folder: epath.Path) -> None:
        """Waits until everything below a folder, and the folder's own name, are durable."""
        ...

    def lock(self, folder: epath.Path, within_s: float) -> contextlib.AbstractContextManager[None]:
        """Locks a folder against other processes, if the store has locks; without locks callers must compare versions.

        Raises:
          Locked: another process has held it for longer than `within_s`.
        """
        ...

    def read_version(self, path: epath.Path, most: int) -> tuple[bytes, str]:
        """A file's content and its version; b"" if it is missing, larger than `most` bytes, or no regular file.

        Raises:
          OSError: the store cannot be read.
          TryAgain: it is rewritten so often that no complete read succeeds.
        """
        ...

    def write_version(self, path: epath.Path, data: bytes, expected: str) -> str:
        """`write_atomic` if the file has the version `expected`; returns the new version.

        Raises:
          Changed: it has another version, and is unchanged.
          OSError: it cannot be written.
        """
        ...

    def remove_version(self, path: epath.Path, expected: str) -> None:
        """Removes a file that has the version `expected`; keeps one with another version."""
        ...
