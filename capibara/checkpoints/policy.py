"""When to save, what to keep, what to verify."""

from __future__ import annotations

import dataclasses
import enum

from capibara.checkpoints.encryption import Encryption
from capibara.config import configurable
from capibara.core.types import UserError


class Verify(enum.StrEnum):
    """When the files of the step that a run resumes from are compared with its manifest.

    before: anything is restored. background: while training goes on; what has changed since it was saved stops the run
    at its next checkpoint, and is quarantined. off: never.
    """

    BEFORE = "before"
    BACKGROUND = "background"
    OFF = "off"


class Compression(enum.StrEnum):
    """Of the arrays' files. zstd makes trained weights little smaller and the save a few times as long."""

    NONE = "none"
    ZSTD = "zstd"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """When to save and what to keep. The newest step that is what was saved is never removed.

    Attributes:
      every: steps between saves; 0: only at the end and when interrupted.
      keep: newest steps that are kept.
      keep_every: steps that are multiples of it are kept for ever; None: none.
      keep_best: how many of those with the lowest validation loss are kept besides; 0: none.
      milestones: steps that are kept for ever.
      verify: when a step's files are compared with its manifest.
      cast: arrays that were saved in another floating-point dtype are converted where a run resumes; else refused.
      incremental: arrays that have not changed since the step before (frozen ones, those beside LoRA) are not written
        again: a step refers to the older one that holds them, which stays as long as it is needed.
      compression: of the arrays' files.
      encryption: where the key is that all files but the manifest and layouts are encrypted with; None: they are not encrypted.
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

    def __post_init__(self):
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
