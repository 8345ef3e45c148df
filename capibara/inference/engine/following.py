"""What one engine of several processes hands the others before each step, so that all of them do the same.

An engine's step depends on nothing but what it was handed: requests, which of them are cancelled, how many tokens a program
may give. Where its parameters lie on the chips of several processes, each of them has an engine, and every step is made by
all of them. Process 0 alone knows who asks and what time it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.inference.sampling.sampling import Sampling, changed, of_values


@dataclasses.dataclass(frozen=True)
class Asked:
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
      asked: requests that have come since the step before.
      cancelled: numbers of requests that nobody wants any more.
      most: tokens that a program may give each row.
      seen: a sum of all tokens that came of the devices so far: who has another one has gone another way.
    """

    asked: Sequence[Asked]
    cancelled: Sequence[int]
    most: int
    seen: int

    def packed(self) -> dict[str, Any]:
        """As JSON values."""
        asked = [
            [list(map(int, a.ids)), changed(a.sampling), list(map(int, a.ends)), a.likeliest, a.adapter]
            for a in self.asked
        ]
        return {"asked": asked, "cancelled": list(self.cancelled), "most": self.most, "seen": self.seen}

    @staticmethod
    def of(packed: Mapping[str, Any]) -> Orders:
        """What `packed` gave."""
        asked = [Asked(ids, of_values(fields), *rest) for ids, fields, *rest in packed["asked"]]
        return Orders(asked, packed["cancelled"], packed["most"], packed["seen"])
