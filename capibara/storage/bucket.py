"""The store of a bucket, through fsspec: reads and writes gs:// and s3://, reads other schemes that fsspec knows.

In a bucket a file is complete or does not exist, nothing can be locked or renamed, and in gs:// and s3:// every file has a version.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from etils import epath

from capibara.storage import remote, threads, versions
from capibara.storage.store import Entry, OpenFile, Path
from capibara.storage.versions import Versions

_OPTIONS = {"gs": {"finalize_on_close": True}}  # as etils opens it: what one has listed the other must not remember
# Other processes write there, too. fsspec gives this to whoever opens the store, etils included.
_DEFAULTS = {"s3": {"use_listings_cache": False}}


class BucketStore:
    """See `stores.Store`.

    Args:
      scheme: of its addresses, such as gs.
    """

    has_local_paths = appends = renames = False
    verifies = True

    def __init__(self, scheme: str):
        import fsspec

        self._scheme = scheme
        for name, value in _DEFAULTS.get(scheme, {}).items():
            fsspec.config.conf.setdefault(scheme, {}).setdefault(name, value)

    @functools.cached_property
    def _versions(self) -> Versions:
        return versions.of(self._scheme)

    def _files(self) -> Any:
        import fsspec

        return fsspec.filesystem(self._scheme, **_OPTIONS.get(self._scheme, {}))

    def read(self, path: Path, most: int | None = None) -> bytes:
        return self._files().cat_file(os.fspath(path))  # one request: never half of another process's write

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        return remote.read(path, start, stop)

    def open(self, path: Path) -> OpenFile:
        return epath.Path(path).open("rb")

    def lines(self, path: Path) -> Iterator[bytes]:
        return iter(self.read(path).split(b"\n"))

    def size(self, path: Path) -> int:
        return epath.Path(path).stat().length

    def make_folder(self, folder: epath.Path) -> None:
        """Does nothing: a file's name includes its folders."""

    def write_atomic(self, path: epath.Path, data: bytes) -> None:
        path.write_bytes(data)

    def write_hashed(self, path: epath.Path, data: np.ndarray) -> str:
        self._files().pipe_file(os.fspath(path), data.tobytes())
        return xxhash.xxh3_128_hexdigest(data.data)

    def append(self, path: epath.Path, line: str) -> None:
        path.write_text((path.read_text() if path.exists() else "") + line + "\n")

    def list(self, folder: epath.Path) -> dict[str, int]:
        files = self._files()
        root = files._strip_protocol(os.fspath(folder))
        # One request for a thousand files. What it tells is not remembered: others write there, too.
        files.invalidate_cache()
        result = files.find(root, detail=True)
        files.invalidate_cache()
        sizes = {name.removeprefix(f"{root}/"): int(about["size"]) for name, about in result.items()}
        return dict(sorted((name, size) for name, size in sizes.items() if not name.endswith("/")))

    def matching(self, pattern: str) -> Sequence[Entry]:
        return remote.listed(pattern)

    def is_link(self, path: epath.Path) -> bool:
        return False

    def absolute(self, path: str) -> str:
        return path

    def free_bytes(self, folder: Path) -> None:
        return None

    def remove(self, path: epath.Path) -> None:
        path.unlink(missing_ok=True)

    def rename_folder(self, folder: epath.Path, target: epath.Path) -> None:
        files, names = self._files(), list(self.list(folder))
        threads.each(lambda name: files.cp_file(os.fspath(folder / name), os.fspath(target / name)), names)
        threads.each(lambda name: files.rm_file(os.fspath(folder / name)), names)
        files.invalidate_cache()

    def remove_folder(self, folder: epath.Path, *, aside: epath.Path, last: str) -> None:
        files = self._files()
        threads.each(
            lambda path: files.rm_file(os.fspath(folder / path)), [path for path in self.list(folder) if path != last]
        )
        with contextlib.suppress(FileNotFoundError):  # the folder may not have this file
            folder.rmtree()

    def sync(self, folder: epath.Path) -> None:
        """Does nothing: accepted writes are durable."""

    def lock(self, folder: epath.Path, within_s: float) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def read_version(self, path: epath.Path, most: int) -> tuple[bytes, str]:
        return self._versions.read(path, most)

    def write_version(self, path: epath.Path, data: bytes, expected: str) -> str:
        return self._versions.write(path, data, expected)

    def remove_version(self, path: epath.Path, expected: str) -> None:
        self._versions.remove(path, expected)
