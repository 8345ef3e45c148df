"""Files that a verb writes its results to: checked before the long work, written after it; and those of run folders."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator

from capibara import limits
from capibara.types import UserError


def check_writable(*paths: str, inputs: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Raises UserError where `save` would, or would write over an input or another output.

    To be asked before the long work whose results they are for, of several processes by the one that writes them; it
    leaves nothing behind.
    """
    taken = {
        os.path.realpath(path): "is read as a Gin file" if os.fspath(path).endswith(".gin") else "is an input"
        for path in inputs
    }
    made: list[pathlib.Path] = []  # the innermost first
    try:
        for path in paths:
            real = os.path.realpath(path)
            if not path or real in taken:
                why = f"{path} {taken[real]}" if path else "--json, --html or --output has no name"
                raise UserError(f"{why}: name another file for what is written")
            taken[real] = "is named for two outputs"
            file = pathlib.Path(real)
            made = [*(one for one in (file, *file.parents) if not one.exists()), *made]
            _write(path, "", "a")
    finally:
        for one in made:
            with contextlib.suppress(OSError):
                if one.is_dir():
                    one.rmdir()
                elif not one.stat().st_size:  # else another process has written it meanwhile
                    one.unlink()


@contextlib.contextmanager
def unwritable_told(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises UserError where the system does not let a path be written."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or error
        raise UserError(f"{os.fspath(path)} cannot be written ({cause}): name a file in a folder of yours") from error


def save(path: str, text: str) -> None:
    """Writes a text, and the folders above it.

    Raises:
      UserError: the file cannot be written.
    """
    _write(path, text, "w")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a bucket (gs://): there a file is there whole or not at all, and nothing can be locked."""
    return "://" in os.fspath(path)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises OSError where a local path is a pipe, a socket or a device: to open it may block, to read it never end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read(path: str, most: int = limits.SMALL_BYTES) -> str | None:
    """The text of a file, also of one in a bucket (gs://); None where there is none.

    Raises:
      UserError: it is no text in UTF-8, no regular file, or has more than `most` bytes.
    """
    try:
        if is_remote(path):
            from etils import epath

            return epath.Path(path).read_text()
        check_regular(path)
        if os.path.isfile(path):
            limits.check_file(path, most)
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): it must be a file that you may read") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): copy it again") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): copy it again") from None


def replace(path: str, text: str) -> None:
    """Puts a whole file in place of what was there, also in a bucket."""
    if is_remote(path):
        from etils import epath

        epath.Path(path).write_text(text)
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(f"{path}.partial", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.partial", path)


def sync_entry(path: str | os.PathLike[str]) -> None:
    """Waits until a local file, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: str, text: str, mode: str) -> None:
    with unwritable_told(path):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
