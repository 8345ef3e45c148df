"""What one engine of several processes hands the others before each step, so that all of them do the same.

An engine's step depends on nothing but what it was handed: requests, which of them are cancelled, how many tokens a program
may give. Where its parameters lie on the chips of several processes, each of them has an engine, and every step is made by
all of them. Process 0 alone knows who asks and what time it is.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from capibara.inference.sampling.sampling import Sampling, changed, of_values


@dataclasses.dataclass(frozen=True)
class Submission:
    """A request, as `Engine.submit` takes it; `ids` of its prompt, the name of its adapter."""

    ids: Sequence[int]
    sampling: Sampling
    ends: Sequence[int]
    likeliest: int
    adapter: str | None = None


@dataclasses.dataclass(frozen=True)
class Orders:
    """Of one step.

    Attributes:
      submitted: requests that have come since the step before.
      cancelled: numbers of requests that nobody wants any more.
      allowed: tokens that a program may give each row.
      checksum: of all tokens that came of the devices so far: who has another one has gone another way.
    """

    submitted: Sequence[Submission]
    cancelled: Sequence[int]
    allowed: int
    checksum: int

    def packed(self) -> dict[str, Any]:
        """As JSON values."""
        submitted = [
            [list(map(int, s.ids)), changed(s.sampling), list(map(int, s.ends)), s.likeliest, s.adapter]
            for s in self.submitted
        ]
        rest = {"cancelled": list(self.cancelled), "allowed": self.allowed, "checksum": self.checksum}
        return {"submitted": submitted} | rest

    @staticmethod
    def of(packed: Mapping[str, Any]) -> Orders:
        """What `packed` gave."""
        submitted = [Submission(ids, of_values(fields), *rest) for ids, fields, *rest in packed["submitted"]]
        return Orders(submitted, packed["cancelled"], packed["allowed"], packed["checksum"])

    def check(self, checksum: int) -> None:
        """Raises RuntimeError where other tokens have come of the devices here than of those of process 0."""
        if self.checksum != checksum:
            raise RuntimeError(
                "this process has seen other tokens than process 0: its devices, packages or files are not the same"
            )


class TokenChecksum:
    """Of the tokens that came of the devices, in their order; `value` tells whether two engines have had the same."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, tokens: np.ndarray | jax.Array) -> None:
        self.value = zlib.crc32(tokens.tobytes(), self.value)
