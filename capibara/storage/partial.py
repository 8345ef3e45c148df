"""Writes outputs under a temporary name and renames them when complete; removes what killed writers have left.

A writer holds a lock on a file in its temporary folder while it lives. A later writer of the same output on the same host
removes the folders with a free lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator

from capibara.core.types import UserError
from capibara.storage import disk, outputs

_ENDING = ".partial"
_MARK = ".capibara-convert"  # in each temporary folder, locked by its writer; contains the host's name
_RANDOM = re.compile(r"[a-z0-9_]{8}")  # tempfile's random names


@contextlib.contextmanager
def whole(folder: str) -> Iterator[str]:
    """A temporary folder that is renamed to `folder`, durably, when the context ends, and removed if it fails.

    Raises:
      UserError: the folder exists and is not empty, or cannot be written.
    """
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UserError(f"{folder} must be a new folder: it is there already, name another or remove it")
    with outputs.unwritable_told(folder), scratch(folder) as partial:
        os.mkdir(partial)
        yield partial
        for above, _, names in os.walk(partial):
            for path in (above, *(os.path.join(above, name) for name in names)):
                disk.sync_entry(path)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder)
        os.rename(partial, folder)
        disk.sync_entry(os.path.dirname(os.path.abspath(folder)))


@contextlib.contextmanager
def scratch(path: str) -> Iterator[str]:
    """An unused name on the same disk as an output path; whatever has this name at the end is removed.

    So are the partial outputs of killed writers of this path.
    """
    above, name = os.path.split(os.path.abspath(path))
    os.makedirs(above, exist_ok=True)
    remove_left(path)
    with tempfile.TemporaryDirectory(prefix=f"{name[:40]}.", suffix=_ENDING, dir=above) as folder, _alive(folder):
        yield os.path.join(folder, name)


def remove_left(path: str) -> None:
    """Removes the temporary folders of dead writers of this path; keeps those of living ones, and other folders."""
    above, name = os.path.split(os.path.abspath(path))
    prefix = f"{name[:40]}."
    for entry in os.listdir(above):
        inner = entry.removeprefix(prefix).removesuffix(_ENDING)
        if entry == f"{prefix}{inner}{_ENDING}" and _RANDOM.fullmatch(inner) and _remove(os.path.join(above, entry)):
            logging.getLogger(__name__).warning("%s is removed: an interrupted conversion left it", entry)


def _remove(folder: str) -> bool:
    """Removes a folder with our mark, of this host, with a free lock; returns whether it did."""
    import fcntl

    try:
        with open(os.path.join(folder, _MARK), encoding="utf-8") as mark:
            if mark.read() != socket.gethostname():
                return False  # file systems differ in whether hosts see each other's locks
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            return True
    except OSError:  # a living writer's, not ours, or being removed by another process
        return False


@contextlib.contextmanager
def _alive(folder: str) -> Iterator[None]:
    """Marks a folder as ours, and as a living writer's while the context lasts."""
    import fcntl

    mark = os.path.join(folder, _MARK)
    with open(f"{mark}.new", "w", encoding="utf-8") as file:
        file.write(socket.gethostname())
        file.flush()
        with contextlib.suppress(OSError):  # without locks no process removes the folder
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(f"{mark}.new", mark)  # only now, so that the mark is never unlocked
        yield
