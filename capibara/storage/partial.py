"""Files and folders that are written beside their name and take it when they are whole; what a killed writer left goes.

A writer holds a lock on a file in its folder as long as it lives. Whoever writes under the same name later removes the
folders whose lock is free.
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
_MARK = ".capibara-convert"  # in each folder, locked by its writer; its text is the host
_RANDOM = re.compile(r"[a-z0-9_]{8}")  # of tempfile's names


@contextlib.contextmanager
def whole(folder: str) -> Iterator[str]:
    """A folder to write into that becomes this one, on the disk, when the context ends, and is gone if it fails.

    Raises:
      UserError: the folder is there already, and not empty, or cannot be written.
    """
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UserError(f"{folder} must be a new folder: it is there already, name another or remove it")
    with outputs.unwritable_told(folder), beside(folder) as partial:
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
def beside(path: str) -> Iterator[str]:
    """A name that nothing has, on the same disk as a path that is to be written; what is there in the end goes.

    So does what writers of this path left that were killed.
    """
    above, name = os.path.split(os.path.abspath(path))
    os.makedirs(above, exist_ok=True)
    remove_left(path)
    with tempfile.TemporaryDirectory(prefix=f"{name[:40]}.", suffix=_ENDING, dir=above) as folder, _alive(folder):
        yield os.path.join(folder, name)


def remove_left(path: str) -> None:
    """Removes the folders of writers of this path that are dead; living ones' stay, and all that we did not make."""
    above, name = os.path.split(os.path.abspath(path))
    prefix = f"{name[:40]}."
    for entry in os.listdir(above):
        inner = entry.removeprefix(prefix).removesuffix(_ENDING)
        if entry == f"{prefix}{inner}{_ENDING}" and _RANDOM.fullmatch(inner) and _remove(os.path.join(above, entry)):
            logging.getLogger(__name__).warning("%s is removed: an interrupted conversion left it", entry)


def _remove(folder: str) -> bool:
    """Removes a folder that has our mark, of this host, whose lock nobody holds; whether it was one."""
    import fcntl

    try:
        with open(os.path.join(folder, _MARK), encoding="utf-8") as mark:
            if mark.read() != socket.gethostname():
                return False  # file systems tell hosts of each other's locks, or do not
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            return True
    except OSError:  # a living one's, none of ours, or another process removes it just now
        return False


@contextlib.contextmanager
def _alive(folder: str) -> Iterator[None]:
    """Marks a folder as ours, and as that of a living process while the context lasts."""
    import fcntl

    mark = os.path.join(folder, _MARK)
    with open(f"{mark}.new", "w", encoding="utf-8") as file:
        file.write(socket.gethostname())
        file.flush()
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(f"{mark}.new", mark)  # only now: nobody finds it unlocked
        yield
