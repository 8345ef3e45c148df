"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scaling to longer contexts."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.kernels import rotary
from capibara.kernels.rotary import Angles, Pairs

Length = TypeVar("Length", float, jax.Array)


class RopeScaling(enum.StrEnum):
    """How frequencies are changed for contexts longer than in pre-training.

    linear divides all of them (Chen et al. 2023, arXiv:2306.15595); llama3 only the low ones (Llama 3.1); yarn by how
    many turns each makes in the original length, and it scales attention (Peng et al. 2023, arXiv:2309.00071). Two
    depend on the row length: dynamic raises theta for rows longer than the original (NTK-aware); longrope divides each
    frequency by its own factor from one of two sets, and scales attention (Ding et al. 2024, arXiv:2402.13753; Phi-3).
    proportional turns the first `fraction` of a whole head's pairs, at that head's frequencies divided by the factor, and
    leaves the other pairs as they are (Gemma 4).
    """

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    DYNAMIC = "dynamic"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on the row length."""
        return self in (RopeScaling.DYNAMIC, RopeScaling.LONGROPE)


class YarnBounds(enum.StrEnum):
    """Whether YaRN rounds the bounds of its ramp outward to whole dimensions, or keeps them exact (gpt-oss)."""

    WHOLE = "whole"
    EXACT = "exact"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    Attributes:
      theta: base of the wavelengths.
      local_theta: theta of layers with a window, which are never scaled; None: the same theta.
      fraction: share of head_dim that is rotated, from its start (GPT-NeoX: 0.25); with proportional scaling of its pairs.
      local_fraction: that share in layers with a window, which have a local_theta; None: the same share.
      pairs: which of these dimensions are rotated together.
      scaling, factor: how frequencies are changed, and by what multiple the context grows.
      original_length: row length in pre-training; required by every scaling but linear and proportional.
      low_frequency_factor, high_frequency_factor: for llama3: wavelengths above original_length / low are divided by
        the factor, those below original_length / high are unchanged.
      beta_fast, beta_slow: for yarn: frequencies with more than beta_fast turns in the original length are unchanged,
        those with fewer than beta_slow turns are divided by the factor.
      yarn_bounds: for yarn: whether the bounds between the two are rounded to whole dimensions.
      attention_factor: for yarn and longrope: multiplies queries and keys; None: 0.1 * ln(factor) + 1 for yarn, sqrt(1
        + ln(factor) / ln(original_length)) for longrope.
      short_factors, long_factors: for longrope: the divisor of each frequency, in rows of up to original_length tokens
        and in longer ones.
      unscaled_tokens: for longrope: positions below it keep the frequencies of pre-training (the paper's n).
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    fraction: float = 1.0
    local_fraction: float | None = None
    pairs: Pairs = Pairs.HALVES
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    yarn_bounds: YarnBounds = YarnBounds.WHOLE
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    unscaled_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("theta", "local_theta", "factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                usual = 1.0 if name == "factor" else 10_000.0
                raise UserError(f"Rope.{name} is {value}, must be finite and above 0: try {usual}")
        for name in ("fraction", "local_fraction"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UserError(f"Rope.{name} is {value}, must be above 0 and at most 1")
        if self.local_fraction is not None and self.local_theta is None:
            raise UserError(
                f"Rope.local_fraction ({self.local_fraction}) is for layers with a local_theta, which is None: set it, too"
            )
        if self.scaling not in (RopeScaling.NONE, RopeScaling.PROPORTIONAL) and self.factor <= 1:
            raise UserError(f"Rope.factor ({self.factor}) must be above 1 with {self.scaling} scaling: try 8.0")
        unstretched = (RopeScaling.NONE, RopeScaling.LINEAR, RopeScaling.PROPORTIONAL)
        if self.scaling not in unstretched and not self.original_length:
            raise UserError(
                f"Rope.original_length is {self.original_length}, {self.scaling} scaling needs the row length of "
                "pre-training: try 8192"
            )
        # Llama 4 Scout and Kimi K2 have 1 for both: frequencies step from one to the other.
        for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
            if not 0 < getattr(self, low) <= getattr(self, high):
                raise UserError(
                    f"Rope.{low} ({getattr(self, low)}) must be above 0 and at most {high} ({getattr(self, high)})"
                )
        for name in ("short_factors", "long_factors"):
            if not all(0 < value < math.inf for value in getattr(self, name)):
                raise UserError(f"Rope.{name} are {getattr(self, name)}, must be finite and above 0")
        if self.unscaled_tokens < 0:
            raise UserError(f"Rope.unscaled_tokens is {self.unscaled_tokens}, must be at least 0")
        if self.unscaled_tokens and self.scaling is not RopeScaling.LONGROPE:
            raise UserError(
                f"Rope.unscaled_tokens ({self.unscaled_tokens}) is for longrope scaling, and scaling is {str(self.scaling)!r}: leave "
                "it out"
            )
        if self.yarn_bounds is not YarnBounds.WHOLE and self.scaling is not RopeScaling.YARN:
            raise UserError(f"Rope.yarn_bounds is for yarn scaling, and scaling is {str(self.scaling)!r}: leave it out")

    def check(self, head_dim: int) -> None:
        """Checks that longrope's factors fit the heads.

        Raises:
          UserError: their number is not the number of frequencies.
        """
        frequencies = self.rotated_dims(head_dim) // 2 if self.scaling is RopeScaling.LONGROPE else 0
        for name in ("short_factors", "long_factors"):
            if len(getattr(self, name)) != frequencies:
                of = (
                    f"one for each of {frequencies} frequencies"
                    if frequencies
                    else "are for longrope scaling only: leave them out"
                )
                raise UserError(
                    f"Rope.{name} has {len(getattr(self, name))} numbers, {'must be ' * bool(frequencies)}{of}"
                )

    def rotated_dims(self, head_dim: int, *, local: bool = False) -> int:
        """Number of a head's dimensions that are rotated; even. `local`: in layers with a window."""
        if local and self.local_fraction is not None:
            return int(head_dim * self.local_fraction) // 2 * 2
        if self.scaling is RopeScaling.PROPORTIONAL:
            return head_dim // 2 * 2
        return int(head_dim * self.fraction) // 2 * 2

    def frequencies(self, head_dim: int, *, local: bool = False, length: int | None = None) -> np.ndarray:
        """Radians per position, float32 [rotated_dims / 2].

        Args:
          head_dim: size of a head.
          local: whether for layers with a window.
          length: row length in tokens; None: at most original_length.
        """
        dims = self.rotated_dims(head_dim, local=local)
        base = self.unscaled(head_dim, local=local)
        long = self.original_length is not None and length is not None and length > self.original_length
        match self.scaling if self._scaled(local) else RopeScaling.NONE:
            case RopeScaling.LINEAR:
                base = base / self.factor
            case RopeScaling.PROPORTIONAL:
                turning = np.arange(dims // 2) < int(self.fraction * head_dim // 2)
                base = np.where(turning, base / self.factor, 0.0)
            case RopeScaling.LLAMA3:
                base = self._llama3(base)
            case RopeScaling.YARN:
                base = self._yarn(base, dims)
            case RopeScaling.DYNAMIC if length is not None and long:
                base = base * self._stretch(length) ** self._shares(dims)
            case RopeScaling.LONGROPE:
                base = base / np.array(self.long_factors if long else self.short_factors)
        return base.astype(np.float32)

    def unscaled(self, head_dim: int, *, local: bool = False) -> np.ndarray:
        """Radians per position without scaling, float64 [rotated_dims / 2]."""
        dims = self.rotated_dims(head_dim, local=local)
        theta = self.local_theta if local and self.local_theta is not None else self.theta
        return theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)

    def frequencies_of(self, longest_B: jax.Array, head_dim: int, *, local: bool = False) -> jax.Array:
        """Like `frequencies`, [B, rotated_dims / 2], for row lengths that are known only at run time."""
        short = jnp.asarray(self.frequencies(head_dim, local=local))
        if not self.scaling.by_length or not self._scaled(local):
            return short[None]
        original = self._original_length
        if self.scaling is RopeScaling.LONGROPE:
            long = jnp.asarray(self.frequencies(head_dim, local=local, length=original + 1))
            return jnp.where(longest_B[:, None] > original, long, short)
        stretch_B = self._stretch(jnp.maximum(longest_B, original).astype(jnp.float32))
        return short * stretch_B[:, None] ** jnp.asarray(self._shares(self.rotated_dims(head_dim)), jnp.float32)

    def magnitude(self, *, local: bool = False) -> float:
        """Factor of the sines and cosines; 1 except for yarn and longrope."""
        if self.scaling not in (RopeScaling.YARN, RopeScaling.LONGROPE) or not self._scaled(local):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.scaling is RopeScaling.LONGROPE:
            return math.sqrt(1 + math.log(self.factor) / math.log(self._original_length))
        return 0.1 * math.log(self.factor) + 1.0

    def _scaled(self, local: bool) -> bool:
        return self.local_theta is None or not local

    @property
    def _original_length(self) -> int:
        assert self.original_length is not None, "this scaling has it"
        return self.original_length

    def _stretch(self, length: Length) -> Length:
        """The factor by which dynamic scaling multiplies the longest wavelength in rows of this length."""
        return self.factor * length / self._original_length - (self.factor - 1)

    def _shares(self, dims: int) -> np.ndarray:
        """Each frequency's exponent of that factor."""
        return -np.arange(0, dims, 2, dtype=np.float64) / max(dims - 2, 1)

    def _llama3(self, base: np.ndarray) -> np.ndarray:
        turns = self._original_length * base / (2 * math.pi)
        # 0: divided by the full factor; 1: unchanged.
        between = self.high_frequency_factor - self.low_frequency_factor
        above = turns - self.low_frequency_factor
        share = np.clip(above / between, 0.0, 1.0) if between else np.heaviside(above, 0.0)
        return base / self.factor * (1 - share) + base * share

    def _yarn(self, base: np.ndarray, dims: int) -> np.ndarray:
        def dimension(turns: float) -> float:
            """The (fractional) index of the frequency that makes `turns` turns in the original length."""
            return dims * math.log(self._original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.yarn_bounds is YarnBounds.WHOLE:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        divided = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return base / self.factor * divided + base * (1 - divided)


class Trial(NamedTuple):
    """A scaling that is tried without compiling a program for it.

    Attributes:
      factors: [rotated_dims / 2] divisors of the frequencies.
      magnitude: of the sines and cosines.
      unscaled_tokens: positions below it keep their frequencies.
    """

    factors: jax.Array
    magnitude: jax.Array
    unscaled_tokens: jax.Array


_trial: contextvars.ContextVar[Trial | None] = contextvars.ContextVar("trial", default=None)


@contextlib.contextmanager
def tried(trial: Trial) -> Iterator[None]:
    """A context for tracing in which `angles` of layers that are scaled have this scaling on top of their own."""
    token = _trial.set(trial)
    try:
        yield
    finally:
        _trial.reset(token)


def angles(
    positions_BT: jax.Array, rope: Rope, head_dim: int, *, local: bool = False, length: int | None = None
) -> Angles:
    """Sines and cosines [B, T, 1, R / 2] for the R rotated dimensions of a head; computed once for all layers.

    Args:
      positions_BT: positions of the tokens.
      rope: the rotation's configuration.
      head_dim: size of a head.
      local: whether for layers with a window.
      length: length of all rows, if frequencies depend on it; None: each row's last position decides.
    """
    magnitude: float | jax.Array = rope.magnitude(local=local)
    unscaled_tokens: int | jax.Array = rope.unscaled_tokens if rope._scaled(local) else 0
    if rope.scaling.by_length and length is None:
        frequency = rope.frequencies_of(jnp.max(positions_BT, axis=1) + 1, head_dim, local=local)[:, None, None]
    else:
        frequency = jnp.asarray(rope.frequencies(head_dim, local=local, length=length))
    if (trial := _trial.get()) is not None and rope._scaled(local):
        frequency, magnitude, unscaled_tokens = frequency / trial.factors, trial.magnitude, trial.unscaled_tokens
    elif not unscaled_tokens:
        return rotary.sin_cos(positions_BT, frequency, magnitude)
    unscaled = jnp.asarray(rope.unscaled(head_dim, local=local), jnp.float32)
    is_first = (positions_BT < unscaled_tokens)[..., None, None]
    sin, cos = (
        jnp.where(is_first, first, rest)
        for first, rest in zip(
            rotary.sin_cos(positions_BT, unscaled, magnitude), rotary.sin_cos(positions_BT, frequency, magnitude)
        )
    )
    return sin, cos
