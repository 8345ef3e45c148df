"""Updates that are not worth making: numbers that are not finite, losses far above those before.

What is decided here is decided in the step, from the loss and the gradients' norm of the whole batch, which every device
holds alike: so all do the same, and the host waits for nothing.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import UserError

_LEAST_SPREAD = 1e-3  # of the mean: losses nearer to each other than this are as good as equal


class OnSpike(enum.StrEnum):
    """What becomes of an update whose loss is a spike.

    off: nothing is looked for. skip: it is left out. roll_back: it is left out, and as soon as the host sees it the run
    goes back to an earlier checkpoint and leaves out the batches that led there.
    """

    OFF = "off"
    SKIP = "skip"
    ROLL_BACK = "roll_back"


class LossWindow(NamedTuple):
    """The part of the train state that spikes are told by.

    Attributes:
      losses: [window] float32, a ring of the last losses that were neither spikes nor without a number.
      count: how many there have been, int32 scalar; the next one's place is count % window.
    """

    losses: jax.Array
    count: jax.Array  # type: ignore[assignment]  # checkpoints have it by this name; no window is asked for tuple.count


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Anomalies:
    """What to do about bad numbers.

    An update that is left out changes neither parameters nor moments nor their average. The step counts (its batch is
    used up), but not in the optimizer, whose schedule counts updates. Its documents are named in bad_batches.jsonl.

    Attributes:
      skip_nonfinite: leave out updates whose loss or gradients are not finite.
      most_in_a_row: updates left out one after the other after which the run ends. In float16 those whose gradients
        overflow while the loss scale can still fall do not count, and with `roll_back` spikes do not.
      on_spike: what becomes of an update whose loss is above the mean of those before it by `sigmas` of their standard
        deviations.
      window: losses that the mean is taken of; before there are as many, nothing is a spike.
      sigmas: the deviations.
      roll_back_steps: steps before the spike to which it goes back at least (PaLM, Chowdhery et al. 2022, section 5.1:
        about 100); where no checkpoint is as old, to the oldest one.
      skip_batches: batches left out, counted from the step that it goes back to (PaLM: 200 to 500).
      most_roll_backs: times it goes back to one step; the next spike after that ends the run.
    """

    skip_nonfinite: bool = True
    most_in_a_row: int = 10
    on_spike: OnSpike = OnSpike.OFF
    window: int = 128
    sigmas: float = 6.0
    roll_back_steps: int = 100
    skip_batches: int = 200
    most_roll_backs: int = 3

    def __post_init__(self) -> None:
        least_values = {"most_in_a_row": 1, "window": 2, "roll_back_steps": 1, "skip_batches": 1, "most_roll_backs": 1}
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise UserError(f"Anomalies.{name} is {getattr(self, name)}, must be at least {least}")
        if not 0 < self.sigmas < float("inf"):
            raise UserError(f"Anomalies.sigmas is {self.sigmas}, must be above 0: try 6")

    @property
    def keep_losses(self) -> bool:
        """Whether the state has a window of losses."""
        return self.on_spike is not OnSpike.OFF

    def start(self) -> LossWindow | None:
        """Of a new run; None where no spikes are looked for."""
        if not self.keep_losses:
            return None
        return LossWindow(jnp.zeros(self.window, jnp.float32), jnp.zeros((), jnp.int32))

    def spike(self, window: LossWindow, loss: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Whether a loss is a spike (bool scalar; one without a number is none), and the metrics that tell why."""
        known = jnp.minimum(window.count, self.window)
        mean = jnp.sum(window.losses) / jnp.maximum(known, 1)  # what is not known yet is 0
        squares = jnp.where(jnp.arange(self.window) < known, jnp.square(window.losses - mean), 0.0)
        spread = jnp.sqrt(jnp.sum(squares) / jnp.maximum(known, 1))
        spread = jnp.maximum(spread, _LEAST_SPREAD * jnp.abs(mean))
        spike = (known == self.window) & jnp.isfinite(loss) & (loss > mean + self.sigmas * spread)
        return spike, {"loss_spikes": spike.astype(jnp.float32), "window_mean": mean, "window_spread": spread}

    def after(self, window: LossWindow, loss: jax.Array, good: jax.Array) -> LossWindow:
        """The next step's, with the loss where it is `good` (bool scalar)."""
        pushed = window.losses.at[window.count % self.window].set(loss)
        return LossWindow(jnp.where(good, pushed, window.losses), window.count + good.astype(jnp.int32))
