"""What an aggregation says of its nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The nodes as an aggregation saw them; arrays, so that a compiled program can return it.

    Attributes:
      is_masked: bool [N], masked nodes: a value was not finite, or was too far away to measure.
      spare_faults: int32, how many more nodes may be faulty: those that were assumed less those that were masked. Below 0
        there were more than the rule withstands, and nothing is promised of the result but that it is finite.
      distances: float32 [N], of the nodes from the result; infinite for masked ones.
      weights: float32 [N], of the nodes in the result; None for rules that look at each coordinate by itself.
    """

    is_masked: jax.Array
    spare_faults: jax.Array
    distances: jax.Array
    weights: jax.Array | None

    @property
    def masked(self) -> tuple[int, ...]:
        """Indices of the masked nodes. It waits for the devices."""
        return tuple(int(index) for index in np.flatnonzero(np.asarray(self.is_masked)))

    def describe(self, names: Sequence[str] | None = None) -> str:
        """One line: which nodes were masked, and whether the result can be trusted. It waits for the devices.

        Args:
          names: of the nodes; None: node 0, node 1, ...
        """
        masked, nodes, spare = self.masked, self.is_masked.size, int(self.spare_faults)
        if not masked:
            return f"{nodes} nodes, none masked, at most {spare} faulty"
        shown = ", ".join(names[index] if names else f"node {index}" for index in masked)
        result = f"{len(masked)} of {nodes} nodes masked, not finite or too far away: {shown}"
        if len(masked) == nodes:
            return f"{result}; no node is left, the result is zero"
        if spare < 0:
            return f"{result}; {-spare} more than were assumed faulty, the result is not to be trusted"
        return f"{result}; at most {spare} of the others faulty"
