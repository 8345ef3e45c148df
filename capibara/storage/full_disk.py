"""Detects and explains a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from capibara.core.types import UserError
from capibara.storage import stores

_NOT_WRITABLE = {
    getattr(errno, name)
    for name in ("EACCES", "EEXIST", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENOENT", "ENOTDIR", "EPERM", "EROFS")
}


@contextmanager
def disk_full_explained(folder: str) -> Iterator[None]:
    """Context in which errors due to a full disk become a UserError that names `folder`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        free = stores.of(folder).free_bytes(folder) or 0
        raise UserError(
            f"disk full while saving to {folder} ({free / 2**20:.0f} MiB free): make room, lower "
            "Checkpointing.keep, or set another MODEL_DIR; run the command again to resume"
        ) from error


@contextmanager
def not_writable_explained(folder: os.PathLike[str] | str) -> Iterator[None]:
    """Context in which errors due to an unwritable run folder become a UserError that names `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise UserError(
            f"{os.fspath(folder)} cannot be written ({error.strerror}: {error.filename}): make it a folder that you may "
            "write to, or set another MODEL_DIR"
        ) from error


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or its cause, says that the disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def check_room(folder: os.PathLike[str], size: int) -> None:
    """Rejects a write that would fill the disk.

    Raises:
      OSError: the disk has less free space than `size` bytes.
    """
    free = stores.of(folder).free_bytes(folder)
    if free is not None and free < size:
        raise OSError(errno.ENOSPC, f"a checkpoint takes about {size / 2**20:.0f} MiB")
