"""A model from which a run goes on in the place of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from capibara.core.types import Params


@dataclasses.dataclass(frozen=True)
class Adopted:
    """A model from which a run goes on in the place of its own, such as the one of its group.

    Attributes:
      step: the run's step with that model; above the one that it was at if the others are ahead of the run.
      params: the trained parameters, on the mesh.
      line: what the round did, for people.
    """

    step: int
    params: Params
    line: str


Score = Callable[[Params], float]  # trained parameters -> the loss on the run's validation data; raises Interrupted
