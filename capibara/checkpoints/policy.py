"""Configures when to save, what to keep and what to verify."""

from __future__ import annotations

import dataclasses
import enum

from capibara.checkpoints.encryption import Encryption
from capibara.config import configurable
from capibara.core.types import UserError
from capibara.storage.store import Store


class Verify(enum.StrEnum):
    """When the files of the step that a run resumes from are compared with its manifest.

    before: before anything is restored.
    background: during training; corruption stops the run at its next checkpoint, and the step is quarantined.
    off: never.
    """

    BEFORE = "before"
    BACKGROUND = "background"
    OFF = "off"


class Compression(enum.StrEnum):
    """Compression of arrays. zstd shrinks trained weights little, and makes saves a few times slower."""

    NONE = "none"
    ZSTD = "zstd"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """When to save and what to keep. The newest intact step is never removed.

    Attributes:
      every: steps between saves; 0: only at the end and when interrupted.
      keep: number of newest steps to keep.
      keep_every: keep steps that are multiples of it forever; None: none.
      keep_best: number of steps with the lowest validation loss to keep in addition; 0: none.
      milestones: steps to keep forever.
      verify: when a step's files are compared with its manifest.
      cast: whether to convert arrays that were saved in another floating-point dtype when resuming; else they are an
        error.
      incremental: whether to skip arrays that have not changed since the previous step (frozen ones, as with LoRA): a
        step then refers to the older one that holds them, which is kept as long as it is needed.
      compression: of arrays.
      encryption: the key with which to encrypt all files except manifest and layouts; None: no encryption.
      store: reads, writes, lists and locks the files; None: the store of MODEL_DIR's address, a disk or a bucket.
    """

    every: int = 1000
    keep: int = 3
    keep_every: int | None = None
    keep_best: int = 0
    milestones: tuple[int, ...] = ()
    verify: Verify = Verify.BEFORE
    cast: bool = False
    incremental: bool = False
    compression: Compression = Compression.NONE
    encryption: Encryption | None = None
    store: Store | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError(f"Checkpointing.every is {self.every}, must be at least 0 (0: only at the end): try 1000")
        if self.keep < 1:
            raise UserError(f"Checkpointing.keep is {self.keep}, must be at least 1: try 3")
        if self.keep_every is not None and self.keep_every < 1:
            raise UserError(f"Checkpointing.keep_every is {self.keep_every}, must be at least 1, or None")
        if self.keep_best < 0:
            raise UserError(f"Checkpointing.keep_best is {self.keep_best}, must be at least 0 (0: none)")
        if any(step < 1 for step in self.milestones):
            raise UserError(f"Checkpointing.milestones {self.milestones} must be steps, from 1")
