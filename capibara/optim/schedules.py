"""Learning-rate schedules: a warm-up followed by a shape, or T5X's products of factors."""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from capibara.config import configurable
from capibara.core.fields import did_you_mean, short
from capibara.core.types import UserError

StepFunction = Callable[[jax.typing.ArrayLike], jax.Array]  # updates done before -> a float32 scalar

MAX_LEARNING_RATE = 10.0  # no update rule here learns with more: a larger value is a typo


class ScheduleConfig(abc.ABC):
    """Configuration of a learning-rate schedule; for a new one see examples/extend/my_schedule.py."""

    @abc.abstractmethod
    def build(self, total_steps: int) -> StepFunction:
        """The learning rate as a function of the number of earlier updates (0 for the first).

        Args:
          total_steps: updates in the whole run.

        Returns:
          A function of an int or a traced int32 scalar to a float32 scalar.

        Raises:
          UserError: the schedule is longer than the run.
        """

    def learning_rates(self, total_steps: int) -> StepFunction:
        """What `build` returns, checked; arguments as there.

        Raises:
          UserError: it is no function of a step to a scalar.
        """
        name, rates = f"{type(self).__name__}.build", self.build(total_steps)
        if not callable(rates):
            raise UserError(
                f"{name} returned {short(rates)}, must return a function of the step: see docs/extending.md"
            )
        rate = jax.eval_shape(rates, jax.ShapeDtypeStruct((), jnp.int32))
        if getattr(rate, "shape", None) != ():
            result = f"the shape {rate.shape}" if hasattr(rate, "shape") else short(rate)
            raise UserError(
                f"the learning rate of {name} is {result} for a step, must be a scalar: see docs/extending.md"
            )
        return rates


class ScheduleKind(enum.StrEnum):
    """The shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"
    WSD = "wsd"
    RSQRT = "rsqrt"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(ScheduleConfig):
    """A linear warm-up to the peak, followed by the shape `kind`.

    constant stays at the peak. cosine and linear fall to `final_fraction` of it. wsd (warm-up, stable, decay; Hu et
    al. 2024, arXiv:2404.06395) stays at the peak and falls linearly over the last steps of the run. rsqrt falls as
    sqrt(warm-up / step) without end (T5).

    Attributes:
      kind: the shape after the warm-up.
      learning_rate: the peak, at most 10.
      warmup_steps: updates until the peak: update i (from 0) of the warm-up has (i + 1) / warmup_steps of it.
      warmup_fraction: the warm-up as a share of the run, for files whose number of steps varies; used where
        warmup_steps is 0.
      decay_steps: cosine, linear: updates from the end of the warm-up to the final learning rate (None: until the
        end of the run). wsd: length of the last decay (None: decay_fraction of the run).
      decay_fraction: wsd without decay_steps: the last decay as a share of the run.
      final_fraction: cosine, linear, wsd: the final learning rate over the peak.
    """

    kind: ScheduleKind = ScheduleKind.COSINE
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    warmup_fraction: float = 0.0
    decay_steps: int | None = None
    decay_fraction: float = 0.2
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate <= MAX_LEARNING_RATE:
            limits = f"above 0 and at most {MAX_LEARNING_RATE:g}"
            raise UserError(f"Schedule.learning_rate is {self.learning_rate}, must be {limits}: try 3e-4")
        if self.warmup_steps < 0:
            raise UserError(f"Schedule.warmup_steps is {self.warmup_steps}, must not be negative: 0 is no warm-up")
        for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"Schedule.{name} is {getattr(self, name)}, must be from 0 to 1")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise UserError(f"Schedule.decay_steps is {self.decay_steps}, must be at least 1, or None for the default")
        shares = self.warmup_fraction + self.decay_fraction
        by_shares = self.kind == ScheduleKind.WSD and not self.warmup_steps and self.decay_steps is None
        if by_shares and shares > 1 + 1e-9:
            raise UserError(
                f"Schedule.warmup_fraction ({self.warmup_fraction}) and decay_fraction ({self.decay_fraction}) must be "
                f"at most 1 together: try decay_fraction = {max(0.0, 1 - self.warmup_fraction):.3g}"
            )

    def build(self, total_steps: int) -> StepFunction:
        """The learning rate as a function of the number of earlier updates (0 for the first).

        Args:
          total_steps: updates in the whole run.

        Returns:
          A function of an int or a traced int32 scalar to a float32 scalar; constant after the end of its decay.

        Raises:
          UserError: the warm-up, or the warm-up and wsd's decay together, are longer than the run.
        """
        warmup, decay = self._lengths(total_steps)
        final = self.final_fraction

        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            step = jnp.asarray(step, jnp.float32)
            after = step - warmup
            match self.kind:
                case ScheduleKind.CONSTANT:
                    scale = jnp.ones_like(step)
                case ScheduleKind.RSQRT:
                    scale = jnp.sqrt(max(warmup, 1) / jnp.maximum(step, max(warmup, 1)))
                case ScheduleKind.COSINE:
                    scale = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(after / decay, 0, 1)))
                case ScheduleKind.LINEAR:
                    scale = 1 - (1 - final) * jnp.clip(after / decay, 0, 1)
                case ScheduleKind.WSD:
                    scale = 1 - (1 - final) * jnp.clip((step - (total_steps - decay)) / decay, 0, 1)
            rise = jnp.minimum(1, (step + 1) / warmup) if warmup else 1.0
            return self.learning_rate * rise * scale

        return learning_rate

    def _lengths(self, total_steps: int) -> tuple[int, int]:
        """Updates of the warm-up and of the decay in a run of `total_steps`."""
        if total_steps < 1:
            raise UserError(f"total_steps is {total_steps}, must be at least 1")
        warmup = self.warmup_steps or round(self.warmup_fraction * total_steps)
        if warmup > total_steps:
            raise UserError(
                f"Schedule.warmup_steps ({warmup}) must not exceed the run's {total_steps} steps: "
                f"try {max(1, total_steps // 10)}, or Schedule.warmup_fraction = 0.1"
            )
        if self.kind != ScheduleKind.WSD:
            return warmup, self.decay_steps or max(1, total_steps - warmup)
        decay = self.decay_steps or max(1, round(self.decay_fraction * total_steps))
        if not self.warmup_steps and self.decay_steps is None:
            return warmup, min(decay, max(1, total_steps - warmup))  # rounding may make the two too long together
        if warmup + decay > total_steps:
            first = "warmup_steps" if self.warmup_steps else f"warmup_fraction = {self.warmup_fraction}"
            last = "decay_steps" if self.decay_steps else f"decay_fraction = {self.decay_fraction}"
            raise UserError(
                f"Schedule's warm-up ({first}: {warmup}) and decay ({last}: {decay}) must not exceed the run's "
                f"{total_steps} steps together: try decay_steps = {max(1, (total_steps - warmup) // 5)}"
            )
        return warmup, decay


class Factor(enum.StrEnum):
    """The factors of a `FactorSchedule`, with T5X's names."""

    CONSTANT = "constant"
    LINEAR_WARMUP = "linear_warmup"
    LINEAR_DECAY = "linear_decay"
    RSQRT_DECAY = "rsqrt_decay"
    RSQRT_NORMALIZED_DECAY = "rsqrt_normalized_decay"
    DECAY_EVERY = "decay_every"
    COSINE_DECAY = "cosine_decay"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorSchedule(ScheduleConfig):
    """The learning rate of T5X's `create_learning_rate_scheduler`: a product of factors.

    constant: base_learning_rate.
    linear_warmup: step / warmup_steps, up to 1.
    linear_decay: base_learning_rate * min(step / warmup_steps, 1 - decay_factor * (step - warmup_steps)); use it without
      the two factors above.
    rsqrt_decay: 1 / sqrt(max(step, warmup_steps)): flat during the warm-up, as in T5.
    rsqrt_normalized_decay: the same times sqrt(warmup_steps), so 1 during the warm-up.
    decay_every: decay_factor ** (step // steps_per_decay).
    cosine_decay: half a cosine from 1 to 0 in every steps_per_cycle after warmup_steps.

    T5's own pre-training is "constant * rsqrt_decay" with a base of 1.0 and 10,000 steps of warm-up; its fine-tuning is
    "constant" with 0.001.

    Attributes:
      factors: names with `*` between them.
      base_learning_rate: used by constant and linear_decay.
      warmup_steps, decay_factor, steps_per_decay, steps_per_cycle: used by the factors above that mention them.
      step_offset: subtracted from the step.
      min_learning_rate: lower bound of the result.
    """

    factors: str = "constant * linear_warmup * rsqrt_decay"
    base_learning_rate: float = 0.5
    warmup_steps: int = 1000
    decay_factor: float = 0.5
    steps_per_decay: int = 20_000
    steps_per_cycle: int = 100_000
    step_offset: int = 0
    min_learning_rate: float = 1e-8

    def __post_init__(self) -> None:
        for name in self._names():
            if name not in list(Factor):
                raise UserError(
                    f"FactorSchedule.factors has {name!r}, which is no factor{did_you_mean(name, map(str, Factor))}"
                )
        for name in ("base_learning_rate", "decay_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"FactorSchedule.{name} is {getattr(self, name)}, must be finite and above 0")
        for name in ("warmup_steps", "steps_per_decay", "steps_per_cycle"):
            if getattr(self, name) < 1:
                raise UserError(f"FactorSchedule.{name} is {getattr(self, name)}, must be at least 1")
        if self.step_offset < 0:
            raise UserError(f"FactorSchedule.step_offset is {self.step_offset}, must not be negative")
        if not 0 <= self.min_learning_rate <= MAX_LEARNING_RATE:
            raise UserError(
                f"FactorSchedule.min_learning_rate is {self.min_learning_rate}, must be from 0 to {MAX_LEARNING_RATE:g}"
            )

    def build(self, total_steps: int) -> StepFunction:
        """The learning rate as a function of the number of earlier updates (0 for the first).

        Args:
          total_steps: updates in the whole run, at least 1; the learning rate does not depend on it.

        Returns:
          A function of an int or a traced int32 scalar to a float32 scalar.
        """
        if total_steps < 1:
            raise UserError(f"total_steps is {total_steps}, must be at least 1")

        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            step = jnp.maximum(jnp.asarray(step) - self.step_offset, 0)
            product = jnp.ones((), jnp.float32)
            for name in self._names():
                product = product * self._factor(Factor(name), step)
            return jnp.maximum(product, self.min_learning_rate).astype(jnp.float32)

        return learning_rate

    def _names(self) -> list[str]:
        return [name.strip() for name in self.factors.split("*")]

    def _factor(self, name: Factor, step: jax.Array) -> jax.Array | float:
        warmup = self.warmup_steps
        x = step.astype(jnp.float32)
        match name:
            case Factor.CONSTANT:
                return self.base_learning_rate
            case Factor.LINEAR_WARMUP:
                return jnp.minimum(1.0, x / warmup)
            case Factor.LINEAR_DECAY:
                return self.base_learning_rate * jnp.minimum(x / warmup, 1.0 + self.decay_factor * (warmup - x))
            case Factor.RSQRT_DECAY:
                return 1.0 / jnp.sqrt(jnp.maximum(x, warmup))
            case Factor.RSQRT_NORMALIZED_DECAY:
                return math.sqrt(warmup) / jnp.sqrt(jnp.maximum(x, warmup))
            case Factor.DECAY_EVERY:
                return self.decay_factor ** (step // self.steps_per_decay)
            case Factor.COSINE_DECAY:
                progress = jnp.maximum(0.0, (x - warmup) / self.steps_per_cycle)
                return jnp.maximum(0.0, 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))))
