"""An optimizer: the sign of the gradients' moving average (Signum, Bernstein et al. 2018, arXiv:1802.04434).

cd examples/extend && python -m capibara.train --gin_file=my_optimizer.gin --emulate=2
"""

import dataclasses

import optax

from capibara.config import configurable
from capibara.optim import StandardOptimizer


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Signum(StandardOptimizer):
    """Every weight moves by the learning rate, in the direction of its averaged gradient.

    Clipping, weight decay, the schedule and how moments are stored are those of every StandardOptimizer; derive from
    capibara.optim.OptimizerConfig to decide these yourself.

    Attributes:
      decay: of the moving average.
    """

    decay: float = 0.9

    def rule(self, axes):
        # The average is a tree like the parameters: it is sharded as they are, and the planner counts it.
        return optax.chain(optax.ema(self.decay, debias=False), optax.scale_by_sign())
