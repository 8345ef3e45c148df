"""What every shard format gives: blocks that can be read by themselves, and the records in one."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.storage import outputs, remote
from capibara.storage.remote import Entry

SLACK_BYTES = 1 << 16  # read beyond a block, for the record that it ends in
Record = bytes | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFormat(abc.ABC):
    """A way in which files hold records.

    A record belongs to the block in which it begins. What a format calls a block's bounds is its own affair.

    Attributes:
      block_bytes: a block has about so many bytes, where the format leaves a choice.
    """

    block_bytes: int

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """As in ShardedSource.format."""

    @abc.abstractmethod
    def blocks(self, shard: Entry) -> np.ndarray:
        """[n, 2] int64, the bounds of the blocks of a shard; reads its end alone.

        Raises:
          UserError: the shard is cut short, or of another format.
        """

    @abc.abstractmethod
    def records(self, shard: Entry, start: int, stop: int) -> list[tuple[int, Record]]:
        """The records of a block, each with where it is in the shard.

        Raises:
          UserError: they cannot be read.
        """

    def byte_blocks(self, shard: Entry) -> np.ndarray:
        """Blocks of equal bytes."""
        starts = np.arange(0, shard.size, self.block_bytes, dtype=np.int64)
        return np.stack([starts, np.minimum(starts + self.block_bytes, shard.size)], axis=1)


def read(shard: Entry, start: int, stop: int) -> bytes:
    """Bytes of a shard, as many of them as there should be.

    Raises:
      UserError: it is shorter than it was when it was listed, or cannot be read.
    """
    if outputs.is_remote(shard.url):
        return remote.read(shard.url, start, stop)
    try:
        with open(shard.url, "rb") as file:
            content = os.pread(file.fileno(), stop - start, start)
    except OSError as error:
        raise UserError(f"{shard.url} cannot be read ({error.strerror}): copy it again") from None
    if len(content) != stop - start:
        raise UserError(
            f"{shard.url} is cut short ({len(content):,} of {stop - start:,} bytes at {start:,}): copy it again"
        )
    return content
