"""The index of a corpus: the blocks of every shard, found by reading the end of each, and cached for the next start.

The index has a few bytes per block, a few MB for 100 GB. It is in the user's cache folder and can be deleted at any time. A
shard whose size or version has changed is indexed again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Sequence

import numpy as np

from capibara.core.types import UserError
from capibara.data.shards.formats import ShardFormat
from capibara.storage import copies, outputs, stores
from capibara.storage.store import Entry

_THREADS = 32  # shards that are indexed at a time; the threads mostly wait


@dataclasses.dataclass(frozen=True)
class Index:
    """The blocks of a corpus.

    Attributes:
      shards: its files.
      blocks: [n, 3] int64: index of the shard, and the block's bounds in the units of the format.
    """

    shards: Sequence[Entry]
    blocks: np.ndarray

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(shard.size for shard in self.shards)

    def names(self) -> list[str]:
        """The shards' names without folders, which stay the same when they are moved."""
        return [os.path.basename(shard.url) for shard in self.shards]

    def digest(self) -> str:
        """A hash of the shards' names and sizes and of all bounds."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.blocks, np.int64).tobytes(), digest_size=8)
        for name, shard in zip(self.names(), self.shards, strict=True):
            digest.update(f"{name}\0{shard.size}\0".encode())
        return digest.hexdigest()


def listed(parameter: str, patterns: Sequence[str]) -> list[Entry]:
    """The files that paths, addresses and globs match, without duplicates; `parameter` names them in errors.

    Raises:
      UserError: a pattern matches no file, or the store refuses.
    """
    if isinstance(patterns, str):
        patterns = (patterns,)
    result: list[Entry] = []
    for pattern in patterns:
        entries = stores.of(pattern).matching(pattern)
        if not entries:
            raise UserError(f"{parameter} ({pattern!r}) matches no file")
        result += entries
    if not result:
        raise UserError(f"{parameter} is empty: name at least one file or glob")
    return list(dict.fromkeys(result))


def index_of(shards: Sequence[Entry], shard_format: ShardFormat) -> Index:
    """The index of a corpus; reads only shards that are new or have changed since the last time.

    Raises:
      UserError: a shard is cut short, has another format, or cannot be read.
    """
    path = _path(shards, shard_format)
    known = _load(path)
    missing = [shard for shard in shards if known.get(shard.url, (None,))[0] != [shard.size, shard.version]]
    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, max(1, len(missing)))) as pool:
        waiting = [pool.submit(shard_format.blocks, shard) for shard in missing]
        try:
            for shard, item in zip(missing, waiting, strict=True):
                known[shard.url] = ([shard.size, shard.version], item.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    tables = [known[shard.url][1] for shard in shards]
    if missing:
        _save(path, shards, tables)
    counts = [len(table) for table in tables]
    blocks = np.concatenate([np.repeat(np.arange(len(shards)), counts)[:, None], np.concatenate(tables)], axis=1)
    return Index(tuple(shards), blocks.astype(np.int64))


def _path(shards: Sequence[Entry], shard_format: ShardFormat) -> str:
    digest = hashlib.blake2b(repr(shard_format).encode(), digest_size=8)
    for shard in shards:
        digest.update(f"{stores.of(shard.url).absolute(shard.url)}\0".encode())
    return os.path.join(copies.cache_folder("indexes"), f"{digest.hexdigest()}.npz")


def _load(path: str) -> dict[str, tuple[list, np.ndarray]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            shards = json.loads(file["shards"].tobytes())
            tables = np.split(file["blocks"], np.cumsum([count for *_, count in shards])[:-1])
            return {
                url: ([size, version], table) for (url, size, version, _), table in zip(shards, tables, strict=True)
            }
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # missing or incomplete
        return {}


def _save(path: str, shards: Sequence[Entry], tables: Sequence[np.ndarray]) -> None:
    about = [[*shard, len(table)] for shard, table in zip(shards, tables, strict=True)]
    # Hosts may share the folder. If the disk is full, the next start indexes the shards again.
    with contextlib.suppress(OSError), outputs.replacing(path) as partial, open(partial, "wb") as file:
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(file, shards=text, blocks=np.concatenate(tables))
