"""A training method: updates are made of the signs of the gradient (signSGD, Bernstein et al. 2018, arXiv:1802.04434).

cd examples/extend && python -m capibara.train --gin_file=my_method.gin --emulate=2
"""

import dataclasses

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.training.methods.hooks import Hooks
from capibara.training.methods.method import Method


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SignDescent(Method):
    """The optimizer gets the signs of the gradient; the run ends when it has had so many of them.

    Attributes:
      most_steps: with signs.
    """

    most_steps: int = 1000

    def unsupported(self, options):
        return {"Trainer.ema_decay": options.ema_decay is not None}  # an option, and whether the run sets it

    def gradient(self, parts):
        mean = super().gradient(parts)

        def gradient(trained, frozen, batch, step, scale):
            grads, sums, stats, metrics = mean(trained, frozen, batch, step, scale)
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
            return jax.tree.map(jnp.sign, grads), sums, stats, metrics | {"norm_before_signs": norm}

        return gradient

    def hooks(self, options, trained, status):
        return SignHooks(options, self.most_steps)


class SignHooks(Hooks):
    """What the method does around the steps of a run."""

    def __init__(self, options, most_steps):
        super().__init__(options)
        self.most_steps = most_steps

    @property
    def last_step(self):
        return min(self.options.steps, self.most_steps)

    @property
    def reason(self):
        return "signs_spent" if self.last_step < self.options.steps else super().reason

    def ended(self, step):
        return f"the signs are spent at step {step}: raise SignDescent.most_steps to continue"
