"""What a source has read of its input, in numbers that add up: for the lines that a user sees, and for the run's manifest."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

_TOGETHER = ("files", "bytes", "documents", "blocks")  # None: unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What a source has read for a split; None: it cannot know without reading all.

    What is in the split, held out, trained on and skipped are together all records of the files.

    Attributes:
      files: files that are read.
      bytes: of these files, as they are stored.
      documents: of the split.
      blocks: of the split, for a source whose documents are counted as they are read.
      held_out: documents (or blocks) of these files that are for validation, and not for this split.
      trained_on: those of them that are for training, and not for this split.
      skipped: records that are no documents, by reason.
      files_left_out: files without a byte, and what a folder has besides the files that are read.
    """

    files: int | None = None
    bytes: int | None = None
    documents: int | None = None
    blocks: int | None = None
    held_out: int = 0
    trained_on: int = 0
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    files_left_out: int = 0

    def __str__(self) -> str:
        parts = [f"{value:,} {name}" for name in _TOGETHER if (value := getattr(self, name)) is not None]
        parts += [f"{self.held_out:,} held out"] if self.held_out else []
        parts += [f"{self.trained_on:,} for training"] if self.trained_on else []
        parts += [f"{count:,} {reason} skipped" for reason, count in self.skipped.items()]
        parts += [f"{self.files_left_out:,} files left out"] if self.files_left_out else []
        return ", ".join(parts) or "what is read is not counted"

    def as_json(self) -> dict[str, Any]:
        """A JSON value, without what is unknown."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def of_split(split: str, chosen: int, total: int, *, noun: str = "documents") -> dict[str, Any]:
    """The numbers of a split that has `chosen` of all documents (or blocks)."""
    return {noun: chosen, "held_out" if split == "train" else "trained_on": total - chosen}


def total(parts: Sequence[Counts]) -> Counts:
    """The counts of several sources; what one does not know is unknown."""
    skipped: collections.Counter[str] = collections.Counter()
    for part in parts:
        skipped.update(part.skipped)
    values = {name: [getattr(part, name) for part in parts] for name in _TOGETHER}
    return Counts(
        **{name: None if None in of_parts else sum(of_parts) for name, of_parts in values.items()},
        held_out=sum(part.held_out for part in parts),
        trained_on=sum(part.trained_on for part in parts),
        skipped=dict(skipped),
        files_left_out=sum(part.files_left_out for part in parts),
    )
