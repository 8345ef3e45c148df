"""Messages with which the engine of process 0 has the engines of all other processes run the same steps.

A step depends only on its inputs: new requests, cancelled ones, and how many tokens a program may generate. If
parameters are sharded over several processes, each has an engine, and all of them must make every step. Only process 0
knows the clients and the time.
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
    """A request as passed to `Engine.submit`, with the prompt's token ids and the adapter's name."""

    ids: Sequence[int]
    sampling: Sampling
    ends: Sequence[int]
    likeliest: int
    adapter: str | None = None
    spelled: Sequence[int] = ()
    salt: str = ""


@dataclasses.dataclass(frozen=True)
class Orders:
    """The inputs of one step.

    Attributes:
      submitted: requests that arrived since the last step.
      cancelled: numbers of requests to drop.
      allowed: most tokens per row in a program.
      checksum: of all tokens from the devices so far: engines with other checksums have diverged.
    """

    submitted: Sequence[Submission]
    cancelled: Sequence[int]
    allowed: int
    checksum: int

    def packed(self) -> dict[str, Any]:
        """As JSON values."""
        submitted = [
            [
                list(map(int, s.ids)),
                changed(s.sampling),
                list(map(int, s.ends)),
                s.likeliest,
                s.adapter,
                list(s.spelled),
                s.salt,
            ]
            for s in self.submitted
        ]
        rest = {"cancelled": list(self.cancelled), "allowed": self.allowed, "checksum": self.checksum}
        return {"submitted": submitted} | rest

    @staticmethod
    def of(packed: Mapping[str, Any]) -> Orders:
        """The inverse of `packed`."""
        submitted = [Submission(ids, of_values(fields), *rest) for ids, fields, *rest in packed["submitted"]]
        return Orders(submitted, packed["cancelled"], packed["allowed"], packed["checksum"])

    def check(self, checksum: int) -> None:
        """Raises RuntimeError if the devices here returned other tokens than those of process 0."""
        if self.checksum != checksum:
            raise RuntimeError(
                "this process has seen other tokens than process 0: its devices, packages or files differ"
            )


class TokenChecksum:
    """A running checksum of the tokens from the devices; `value` tells whether two engines agree."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, tokens: np.ndarray | jax.Array) -> None:
        self.value = zlib.crc32(tokens.tobytes(), self.value)
