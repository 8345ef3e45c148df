"""Finds the store of a path: a disk, a bucket (gs://, s3://), or the one that was assigned to its folder.

`stores.of(path).write_atomic(path, data)` writes a file as its store does.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.core import bucket_faults, extras
from capibara.core.types import UserError
from capibara.storage.checked import checked
from capibara.storage.store import Entry, Path, Store

if TYPE_CHECKING:
    from etils import epath

# For buckets etils imports TensorFlow if it is installed, which takes 13 s; it decides this once, early.
os.environ.setdefault("EPATH_USE_TF", "false")

_LIBRARIES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}  # scheme -> library, and the extra that installs it


_assigned: dict[str, Store] = {}  # folder -> its assigned store


def of(path: Path) -> Store:
    """The store of a path, or of an address in any store that fsspec knows."""
    name = os.fspath(path)
    for folder, store in _assigned.items():
        if name == folder or name.startswith(f"{folder}/"):
            return store
    return _store(scheme_of(path))


def assign(folder: Path, store: Store | None) -> None:
    """Assigns a store to a folder and its contents, in this process; None: the store of its address."""
    if store is None:
        _assigned.pop(os.fspath(folder), None)
    else:
        _assigned[os.fspath(folder)] = checked(store)


def scheme_of(path: Path) -> str:
    """The scheme of an address, such as gs; empty: a path on this machine."""
    return os.fspath(path).partition("://")[0] if "://" in os.fspath(path) else ""


@functools.cache
def _store(scheme: str) -> Store:
    if scheme:
        from capibara.storage.bucket import BucketStore

        return BucketStore(scheme)
    from capibara.storage.disk import DiskStore

    return DiskStore()


def folder_of(path: Path) -> epath.Path:
    """The folder that a user names: a local one as an absolute path, one in a bucket unchanged.

    Raises:
      UserError: the bucket's library is not installed, or the store cannot be written.
    """
    from etils import epath

    path, scheme = os.fspath(path), scheme_of(path)
    if scheme in _LIBRARIES:
        library, extra = _LIBRARIES[scheme]
        extras.require(library, extra=extra, why=path)
        bucket_faults.note(path)
        for name in (library, "fsspec"):  # they log each error with its traceback, and raise it as well
            logging.getLogger(name).setLevel(logging.CRITICAL)
    elif scheme:
        raise UserError(
            f"{path} must be a local folder, or one in a bucket: name that, e.g. gs://bucket/run or s3://bucket/run"
        )
    return epath.Path(of(path).absolute(path))


def listed(patterns: Sequence[str]) -> list[Entry]:
    """The files that several paths or globs match, each once."""
    return list(dict.fromkeys(entry for pattern in patterns for entry in of(pattern).matching(pattern)))
