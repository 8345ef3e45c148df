"""A schedule: a cosine that starts again several times in a run (SGDR, Loshchilov and Hutter 2017, arXiv:1608.03983).

cd examples/extend && python -m capibara.train --gin_file=my_schedule.gin --emulate=2
"""

import dataclasses

import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.optim import ScheduleConfig


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmRestarts(ScheduleConfig):
    """Half a cosine from `learning_rate` to 0, `cycles` times in a run.

    Attributes:
      learning_rate: where each cycle starts.
      cycles: how many there are.
    """

    learning_rate: float = 1e-3
    cycles: int = 4

    def __post_init__(self):
        if self.cycles < 1:
            raise UserError(f"WarmRestarts.cycles is {self.cycles}, must be at least 1: try 4")

    def build(self, total_steps):
        length = total_steps / self.cycles
        # `step` is the number of updates done before, traced: jnp, no Python branches.
        return lambda step: self.learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * (step % length) / length))
