"""Splits texts by their source, so that no source, and no text that two sources share, is in two splits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from capibara.builders.preparation.near import NearDuplicates
from capibara.config import configurable
from capibara.core.types import UserError
from capibara.data.packing.shuffle import mix

NAMES = ("train", "validation", "test")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """The shares of the splits, by a hash of a text's source: a source keeps its split when others are added.

    Attributes:
      train, validation, test: shares of the sources; their sum is 1.
      min_sources: the fewest sources of a split whose share is not 0; 0: a split may be empty.
      link_words: sources that have an equal piece (code, message or paragraph) of at least so many words are in one split.
      near: so are sources that have similar texts of so many words; None: only equal ones.
      seed: chooses other sources.
    """

    train: float = 0.9
    validation: float = 0.05
    test: float = 0.05
    min_sources: int = 1
    link_words: int = 20
    near: NearDuplicates | None = NearDuplicates()
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (self.train, self.validation, self.test)
        if not all(0 <= share <= 1 for share in shares) or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise UserError(
                f"Splits.train, validation and test ({self.train}, {self.validation}, {self.test}) must be from 0 to 1 and sum "
                "to 1: try 0.9, 0.05 and 0.05"
            )
        if not self.train:
            raise UserError("Splits.train (0) must be positive: try 0.9")
        if self.min_sources < 0 or self.link_words < 1:
            raise UserError(
                f"Splits.min_sources ({self.min_sources}) must be at least 0, and link_words ({self.link_words}) at least 1: "
                "try 1 and 20"
            )

    @property
    def shares(self) -> tuple[float, float, float]:
        """By `NAMES`."""
        return self.train, self.validation, self.test

    def of(self, keys: np.ndarray) -> np.ndarray:
        """The split of each source, [n] uint8: a position in `NAMES`.

        Args:
          keys: [n] uint64, a hash of each source.
        """
        drawn = (seeded(keys, self.seed, 1) >> np.uint64(11)) * 2.0**-53
        edges = np.cumsum(self.shares)
        edges[np.flatnonzero(self.shares)[-1] :] = 1.0  # the sum may be just below
        return np.searchsorted(edges, drawn, side="right").astype(np.uint8)

    def check(self, sources: np.ndarray, linked: int) -> None:
        """Raises UserError if a split has too few sources.

        Args:
          sources: [3], the number of sources in each split.
          linked: how many of them share a split with another one since they share texts.
        """
        for name, share, count in zip(NAMES, self.shares, sources.tolist()):
            if share and count < self.min_sources:
                about = (
                    f"{linked} were linked by texts that they share, which Splits.link_words and near decide"
                    if linked
                    else "records without a session count as one source for each file"
                )
                raise UserError(
                    f"{name} has {count} of {sources.sum()} sources, must have at least {self.min_sources} "
                    f"(Splits.min_sources; {about}): add sources, or raise Splits.{name} ({share})"
                )


def seeded(keys: np.ndarray, *seeds: int) -> np.ndarray:
    """[n] uint64: the keys, mixed with the seeds."""
    for seed in seeds:
        offset = ((seed + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
        keys = mix(keys + np.array([offset], np.uint64))
    return keys
