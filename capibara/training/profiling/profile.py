"""Which steps of a run are traced."""

from __future__ import annotations

import dataclasses

from capibara.config import configurable
from capibara.core.types import UserError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Which steps are traced, into `profile` in the run folder.

    Attributes:
      start: the first step, counted from 1. A run that starts later traces from its first step.
      stop: the last step; a run that ends earlier traces up to its own last step.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.stop:
            raise UserError(f"Profile.start ({self.start}) must be from 1 to Profile.stop ({self.stop}): try 10 and 12")
        if self.stop - self.start >= 1000:
            raise UserError(
                f"Profile.start ({self.start}) and Profile.stop ({self.stop}) are {self.stop - self.start + 1} steps, must be "
                f"at most 1000, since a trace of more cannot be opened: try {self.start} and {self.start + 2}"
            )
