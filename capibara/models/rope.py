"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the ways to stretch it to longer texts."""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp
import numpy as np

from capibara import sharding
from capibara.config import configurable
from capibara.types import UserError

Angles = tuple[jax.Array, jax.Array]


class RopeScaling(enum.StrEnum):
    """How frequencies change for texts longer than those of pre-training.

    linear divides all of them (Chen et al. 2023, arXiv:2306.15595); llama3 only the low ones (Llama 3.1); yarn by
    how often each turns in the original length, and sharpens attention (Peng et al. 2023, arXiv:2309.00071).
    """

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    Attributes:
      theta: base of the wavelengths.
      local_theta: that of layers with a window, which are never scaled; None: as the others.
      fraction: share of head_dim that turns, from its beginning (GPT-NeoX: 0.25).
      scaling, factor: how frequencies are changed, and for how many times the original length.
      original_length: tokens of a row in pre-training; llama3 and yarn need it.
      low_frequency_factor, high_frequency_factor: of llama3: wavelengths above original_length / low are divided by
        the factor, those below original_length / high stay.
      beta_fast, beta_slow: of yarn: frequencies that turn more than beta_fast times in the original length stay, those
        that turn less than beta_slow times are divided.
      attention_factor: of yarn: multiplies queries and keys; None: 0.1 * ln(factor) + 1.
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    fraction: float = 1.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self):
        for name in ("theta", "local_theta", "factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                usual = 1.0 if name == "factor" else 10_000.0
                raise UserError(f"Rope.{name} is {value}, must be finite and above 0: try {usual}")
        if not 0 < self.fraction <= 1:
            raise UserError(f"Rope.fraction is {self.fraction}, must be above 0 and at most 1")
        if self.scaling is not RopeScaling.NONE and self.factor <= 1:
            raise UserError(f"Rope.factor ({self.factor}) must be above 1 with {self.scaling} scaling: try 8.0")
        if self.scaling in (RopeScaling.LLAMA3, RopeScaling.YARN) and not self.original_length:
            raise UserError(
                f"Rope.original_length is {self.original_length}, {self.scaling} scaling needs the row length of "
                "pre-training: try 8192"
            )
        for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
            if not 0 < getattr(self, low) < getattr(self, high):
                raise UserError(
                    f"Rope.{low} ({getattr(self, low)}) must be above 0 and below {high} ({getattr(self, high)})"
                )

    def rotated_dims(self, head_dim: int) -> int:
        """How many of a head's dimensions turn; even."""
        return int(head_dim * self.fraction) // 2 * 2

    def frequencies(self, head_dim: int, *, local: bool = False) -> np.ndarray:
        """Radians a place, float32 [rotated_dims / 2], of the layers with a window (`local`) or the others."""
        dims = self.rotated_dims(head_dim)
        theta = self.local_theta if local and self.local_theta is not None else self.theta
        base = theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
        scaled = self.local_theta is None or not local
        match self.scaling if scaled else RopeScaling.NONE:
            case RopeScaling.LINEAR:
                base = base / self.factor
            case RopeScaling.LLAMA3:
                base = self._llama3(base)
            case RopeScaling.YARN:
                base = self._yarn(base, dims)
        return base.astype(np.float32)

    def magnitude(self, *, local: bool = False) -> float:
        """What sines and cosines are multiplied by; 1 but for yarn."""
        if self.scaling is not RopeScaling.YARN or (local and self.local_theta is not None):
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor

    def _llama3(self, base: np.ndarray) -> np.ndarray:
        turns = self.original_length * base / (2 * math.pi)
        # 0: as slow as the factor makes it, 1: as it was.
        share = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        share = np.clip(share, 0.0, 1.0)
        return base / self.factor * (1 - share) + base * share

    def _yarn(self, base: np.ndarray, dims: int) -> np.ndarray:
        def dimension(turns: float) -> float:
            """Where in the head the frequency turns so often in the original length."""
            return dims * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(dimension(self.beta_fast)), 0)
        high = min(math.ceil(dimension(self.beta_slow)), dims - 1)
        divided = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return base / self.factor * divided + base * (1 - divided)


def angles(positions_BT: jax.Array, rope: Rope, head_dim: int, *, local: bool = False) -> Angles:
    """Sines and cosines [B, T, 1, R / 2] for the R dimensions of a head that turn; once for all layers."""
    frequency = jnp.asarray(rope.frequencies(head_dim, local=local))
    magnitude = rope.magnitude(local=local)

    def sin_cos(frequency: jax.Array) -> Angles:
        angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency
        return jnp.sin(angle) * magnitude, jnp.cos(angle) * magnitude

    if sharding.platform() != "cpu" or frequency.size % 2:
        return sin_cos(frequency)
    # XLA's CPU back end would compute sines and cosines anew in the fusions of every unrolled layer; what a loop has
    # computed it keeps (an optimization_barrier is removed before fusion).
    halves = jax.lax.map(sin_cos, frequency.reshape(2, -1))
    return tuple(jnp.concatenate([x[0], x[1]], axis=-1) for x in halves)


def rotate(x_BTNH: jax.Array, angles: Angles) -> jax.Array:
    """Turns the first half of the R turning dimensions against the second, as Llama checkpoints expect."""
    sin, cos = angles
    turning = 2 * sin.shape[-1]
    x, rest = x_BTNH[..., :turning].astype(jnp.float32), x_BTNH[..., turning:]
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x_BTNH.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
