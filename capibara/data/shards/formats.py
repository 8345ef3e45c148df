"""The interface of shard formats: the blocks of a file, each of which can be read on its own, and their records."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.storage import stores
from capibara.storage.store import Entry

SLACK_BYTES = 1 << 16  # read after a block's end, for the record that extends beyond it
Record = bytes | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFormat(abc.ABC):
    """A file format of records.

    A record belongs to the block in which it begins. The unit of a block's bounds depends on the format.

    Attributes:
      block_bytes: size of a block in bytes, approximately, if the format allows a choice.
    """

    block_bytes: int

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in ShardedSource.format."""

    @abc.abstractmethod
    def blocks(self, shard: Entry) -> np.ndarray:
        """The bounds of the blocks of a shard, [n, 2] int64; reads only the end of the file.

        Raises:
          UserError: the shard is cut short, or has another format.
        """

    @abc.abstractmethod
    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        """The records of a block, each with its position in the shard.

        Raises:
          UserError: they cannot be read.
        """

    def byte_blocks(self, shard: Entry) -> np.ndarray:
        """Blocks of equal bytes."""
        starts = np.arange(0, shard.size, self.block_bytes, dtype=np.int64)
        return np.stack([starts, np.minimum(starts + self.block_bytes, shard.size)], axis=1)


def read(shard: Entry, start: int, stop: int) -> bytes:
    """The bytes of a shard from `start` to `stop`.

    Raises:
      UserError: it is shorter than when it was listed, or cannot be read.
    """
    return stores.of(shard.url).read_range(shard.url, start, stop)
