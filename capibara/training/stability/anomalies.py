"""Skips harmful updates: those with numbers that are not finite, and loss spikes.

The step itself decides, from the loss and the gradients' norm of the whole batch, which are replicated: so all devices
decide the same, and the host does not wait.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.types import UserError

_LEAST_SPREAD = 1e-3  # smallest standard deviation, as a fraction of the mean


class OnSpike(enum.StrEnum):
    """What to do with an update whose loss is a spike.

    off: spikes are not detected. skip: the update is skipped. roll_back: the update is skipped, and as soon as the host sees
    it, the run rolls back to an earlier checkpoint and skips the batches that led to the spike.
    """

    OFF = "off"
    SKIP = "skip"
    ROLL_BACK = "roll_back"


class LossWindow(NamedTuple):
    """The part of the train state by which spikes are detected.

    Attributes:
      losses: [window] float32, a ring buffer of the last losses that were finite and no spikes.
      count: number of losses so far, int32 scalar; the next one is written at index count % window.
    """

    losses: jax.Array
    count: jax.Array  # type: ignore[assignment]  # checkpoints have it by this name; no window is asked for tuple.count


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Anomalies:
    """Options for numbers that are not finite, and for loss spikes.

    A skipped update changes neither parameters nor moments nor the moving average. The step counts (its batch is consumed),
    but not for the optimizer, whose schedule counts updates. Its documents are listed in bad_batches.jsonl.

    Attributes:
      skip_nonfinite: skip updates whose loss or gradients are not finite.
      most_in_a_row: the run ends after so many skipped updates in a row. Overflows in float16 while the loss scale can
        still fall do not count, nor do spikes with `roll_back`.
      on_spike: what to do with an update whose loss exceeds the mean of the previous losses by `sigmas` standard
        deviations.
      window: number of losses of which the mean is taken; until there are so many, nothing is a spike.
      sigmas: number of standard deviations.
      roll_back_steps: the run rolls back at least so many steps before the spike (PaLM, Chowdhery et al. 2022, section
        5.1: about 100), or to the oldest checkpoint.
      skip_batches: number of batches that are skipped from the restored step on (PaLM: 200 to 500).
      most_roll_backs: the largest number of roll-backs to the same step; the next spike ends the run.
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
        """The window of a new run; None: spikes are not detected."""
        if not self.keep_losses:
            return None
        return LossWindow(jnp.zeros(self.window, jnp.float32), jnp.zeros((), jnp.int32))

    def spike(self, window: LossWindow, loss: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Whether a loss is a spike (bool scalar; False for NaN), and metrics that explain it."""
        known = jnp.minimum(window.count, self.window)
        mean = jnp.sum(window.losses) / jnp.maximum(known, 1)  # unused entries are 0
        squares = jnp.where(jnp.arange(self.window) < known, jnp.square(window.losses - mean), 0.0)
        spread = jnp.sqrt(jnp.sum(squares) / jnp.maximum(known, 1))
        spread = jnp.maximum(spread, _LEAST_SPREAD * jnp.abs(mean))
        spike = (known == self.window) & jnp.isfinite(loss) & (loss > mean + self.sigmas * spread)
        return spike, {"loss_spikes": spike.astype(jnp.float32), "window_mean": mean, "window_spread": spread}

    def after(self, window: LossWindow, loss: jax.Array, good: jax.Array) -> LossWindow:
        """The next step's window: with this loss if it is `good` (bool scalar)."""
        pushed = window.losses.at[window.count % self.window].set(loss)
        return LossWindow(jnp.where(good, pushed, window.losses), window.count + good.astype(jnp.int32))
