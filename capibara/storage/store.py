"""What a store of files is asked for: a disk and a bucket each do it in their own way.

A path is an etils.epath.Path, which lists and opens files alike everywhere; `stores.of(path)` gives its Store.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

if TYPE_CHECKING:  # verbs come here before they know what they need
    import numpy as np
    from etils import epath

PARTIAL = ".partial"  # ends the name of a file that is being written
NONE = ""  # the version of a file that is not there, and of all files where there are no versions

Path = str | os.PathLike[str]


class Entry(NamedTuple):
    """A file of a store.

    Attributes:
      url: its address, or its path on this machine.
      size: its bytes.
      version: changes when its content is replaced, as far as the store tells; may be empty.
    """

    url: str
    size: int
    version: str


class Changed(Exception):
    """The file is not at the version that was expected: another has written or removed it."""


class Locked(TimeoutError):
    """Another process holds a folder's lock and does not give it back; its argument is that process's id, if known."""


class OpenFile(Protocol):
    """A file that is being read."""

    def readinto(self, buffer: memoryview) -> int:
        """Fills a buffer, or a part of it; the bytes that came, 0 at the end."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None, /
    ) -> None: ...


@runtime_checkable
class Store(Protocol):
    """Operations on files that lie together; all paths that it is given are its own.

    Attributes:
      has_local_paths: libraries that open files by their names open these; of others they need `copies`.
      appends: a file can be added to; else it is written anew, whole.
      renames: a folder can be renamed at once; else its files are copied, one after the other.
      verifies: what it has taken it keeps, or says that it has lost it: no bit changes without a word.
    """

    has_local_paths: bool
    appends: bool
    renames: bool
    verifies: bool

    def read(self, path: Path, most: int | None = None) -> bytes:
        """The bytes of a whole file.

        Raises:
          limits.Refused: it has more than `most`, as far as that is known before.
          OSError: it is no file, or cannot be read.
        """
        ...

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """As many bytes of a file as there should be.

        Raises:
          UserError: it is shorter, or cannot be read.
          TryAgain: the store does not answer.
        """
        ...

    def open(self, path: Path) -> OpenFile:
        """A file to read, without a buffer where that costs nothing; raises OSError as `read`."""
        ...

    def lines(self, path: Path) -> Iterator[bytes]:
        """The lines of a file, without their ends; of those that are too long none, where that is known before."""
        ...

    def size(self, path: Path) -> int:
        """The bytes of a file."""
        ...

    def make_folder(self, folder: epath.Path) -> None:
        """Makes a folder and those above it, where there are such and they are not there; never a bucket."""
        ...

    def write_atomic(self, path: epath.Path, data: bytes) -> None:
        """Puts a whole file in place, or none: when this returns, a power cut does not lose it.

        Raises:
          OSError: it cannot be written; a file that was there before is unchanged.
        """
        ...

    def write_hashed(self, path: epath.Path, data: np.ndarray) -> str:
        """Writes a new file that nobody reads yet, and hashes it in the same pass: hashing.hash_of its data, uint8 [size].

        Its content is kept when this returns; its name after a `sync` of the folders above it.
        """
        ...

    def append(self, path: epath.Path, line: str) -> None:
        """Adds a line to a file, which need not be there; what a killed process left of one becomes a line of its own."""
        ...

    def list(self, folder: epath.Path) -> dict[str, int]:
        """The bytes of all files below a folder, by their paths relative to it, sorted.

        Raises:
          OSError: the folder cannot be read.
        """
        ...

    def matching(self, pattern: str) -> Sequence[Entry]:
        """The files that a path or a glob names, sorted; empty: none is there. Raises as `read_range`."""
        ...

    def is_link(self, path: epath.Path) -> bool:
        """Whether a path is a link to another."""
        ...

    def absolute(self, path: str) -> str:
        """The path that names the same file from everywhere."""
        ...

    def free_bytes(self, folder: Path) -> int | None:
        """What can still be written to a folder, or to where it would be; None: there is no limit that is known."""
        ...

    def remove(self, path: epath.Path) -> None:
        """Removes a file, if it is there; a power cut does not bring it back."""
        ...

    def remove_folder(self, folder: epath.Path, *, aside: epath.Path, last: str) -> None:
        """Removes a folder. Whenever this is stopped, what is left of it is told from a whole one.

        Args:
          folder: to remove.
          aside: takes its name first, where the store renames.
          last: the file in it that goes last, where it does not.
        """
        ...

    def sync(self, folder: epath.Path) -> None:
        """Waits until everything below a folder, and the folder's own name, survive a power cut."""
        ...

    def lock(self, folder: epath.Path, within_s: float) -> contextlib.AbstractContextManager[None]:
        """Within it no other process is within it, as far as the store has locks: who needs more compares versions.

        Raises:
          Locked: one has been for longer than `within_s`.
        """
        ...

    def read_version(self, path: epath.Path, most: int) -> tuple[bytes, str]:
        """A file's content and its version; b"" where there is none, or more than `most` bytes, or no regular file.

        Raises:
          OSError: the store cannot be read.
          TryAgain: others write it so often that it cannot be read whole.
        """
        ...

    def write_version(self, path: epath.Path, data: bytes, expected: str) -> str:
        """`write_atomic` where the file is at the version `expected`; returns the new one.

        Raises:
          Changed: it is at another, and stays as it is.
          OSError: it cannot be written.
        """
        ...

    def remove_version(self, path: epath.Path, expected: str) -> None:
        """Removes a file that is at the version `expected`; another is left alone."""
        ...
