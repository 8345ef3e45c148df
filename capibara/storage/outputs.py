"""Output files of verbs: checked before long work, written after it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pathlib
import re
import secrets
import socket
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import disk, stores


def check_writable(*paths: str, inputs: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Raises UserError if `save` would, or would overwrite an input or another output.

    Call it before the work whose results are saved, in the process that will save them. It leaves nothing behind, and
    creates no file under a name that another process may be writing.
    """
    taken = {
        os.path.realpath(path): "is read as a Gin file" if os.fspath(path).endswith(".gin") else "is an input"
        for path in inputs
    }
    with contextlib.ExitStack() as stack:
        scratch_in = functools.cache(
            lambda above: stack.enter_context(tempfile.TemporaryDirectory(prefix=".capibara-", dir=above))
        )
        for path in paths:
            real = os.path.realpath(path)
            if real in taken:
                raise UserError(f"{path} {taken[real]}: name another file for what is written")
            taken[real] = "is named for two outputs"
            if not stores.of(path).has_local_paths:
                raise UserError(f"{path} must be a local file: name one, and copy it there")
            with unwritable_told(path):
                file = pathlib.Path(real)
                above = next(item for item in (file, *file.parents) if item.exists())
                # Missing folders are created under this process's own names.
                like = file if above == file else pathlib.Path(scratch_in(above), *file.relative_to(above).parts)
                like.parent.mkdir(parents=True, exist_ok=True)
                open(like, "a", encoding="utf-8").close()


@contextlib.contextmanager
def unwritable_told(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context that raises UserError if a path cannot be written."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or error
        raise UserError(f"{os.fspath(path)} cannot be written ({cause}): name a file in a folder of yours") from error


def save(path: str, text: str) -> None:
    """Writes a text file, and creates its parent folders.

    Raises:
      UserError: the file cannot be written.
    """
    with unwritable_told(path):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def read(path: str, most: int = limits.SMALL_BYTES) -> str | None:
    """The text of a file, also in a bucket (gs://); None if it does not exist.

    Raises:
      UserError: it is not UTF-8 text, no regular file, or has more than `most` bytes.
    """
    try:
        if not stores.of(path).has_local_paths:
            return stores.of(path).read(path, most).decode()
        disk.check_regular(path)
        if os.path.isfile(path):
            limits.check_file(path, most)
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except limits.Refused as error:
        raise UserError(f"{path} has {error}: name another file") from None
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): it must be a file that you may read") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): copy it again") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): copy it again") from None


def path_in(folder: str | os.PathLike[str], name: str) -> str:
    """The path of a file in a folder that may come from anyone; in a bucket there are no links.

    Raises:
      UserError: it, or a folder on its way, is a link out of the folder.
    """
    folder = os.fspath(folder)
    return limits.own_file(folder, name) if stores.of(folder).has_local_paths else os.path.join(folder, name)


def read_own(folder: str | os.PathLike[str], name: str, most: int = limits.SMALL_BYTES) -> str | None:
    """`read` of a file in a folder that may come from anyone; raises as that and `path_in`."""
    return read(path_in(folder, name), most)


def replace(path: str, content: str | bytes) -> None:
    """Puts a whole file in place of what was there, also in a bucket; other processes may write it meanwhile."""
    data = content.encode() if isinstance(content, str) else content
    if not stores.of(path).has_local_paths:
        from etils import epath

        stores.of(path).write_atomic(epath.Path(path), data)
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with replacing(path) as partial, open(partial, "wb") as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """A name beside a local file to write it to, which is no other process's.

    It takes the file's name when the context ends: of several writers one wins, whole. It goes where the context fails;
    where the process is killed, the next writer of the path on this host removes it, whose lock nobody holds then.
    """
    _remove_left(path)
    with contextlib.ExitStack() as stack:
        partial = _locked(path, stack)
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise


def _locked(path: str, stack: contextlib.ExitStack) -> str:
    """A file beside the path, locked by this process until the stack is left; nobody takes it for a killed writer's."""
    while True:
        partial = f"{path}.{_host()}{secrets.token_hex(4)}.partial"
        alive = open(partial, "xb")
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.stat(partial), os.fstat(alive.fileno()))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        except OSError:  # a file system without locks: then nobody removes it
            mine = True
        if mine:
            stack.enter_context(alive)
            return partial
        alive.close()  # another process took it for a left-over, between its making and its lock


def _host() -> str:
    """Of this host, in a name: file systems tell hosts of each other's locks, or do not."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _remove_left(path: str) -> None:
    """Removes what killed writers of a path left."""
    above, name = os.path.split(path)
    pattern = re.compile(re.escape(f"{name}.{_host()}") + r"[0-9a-f]{8}\.partial")
    with contextlib.suppress(OSError):  # it is said where the file is written
        for left in filter(pattern.fullmatch, os.listdir(above or os.curdir)):
            # A living writer's is locked; another may remove it just now.
            with contextlib.suppress(OSError), open(os.path.join(above, left), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(file.name)


def lock(file: IO[Any], name: str) -> None:
    """Takes an open local file for this process alone, until it is closed.

    Args:
      file: what is appended to.
      name: of the flag and the file.

    Raises:
      UserError: another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{name} is being written by another process: wait for its end, or name another file") from None
    except OSError:  # a file system without locks
        return
