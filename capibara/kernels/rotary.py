"""Rotary position embedding: sines and cosines for all layers, and the rotation of heads."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from capibara import sharding

Angles = tuple[jax.Array, jax.Array]


class Pairs(enum.StrEnum):
    """Which dimensions of a head are rotated together.

    halves: the first half of the rotated dimensions with the second half (GPT-NeoX, Llama). adjacent: each even one with
    the next (RoFormer, GPT-J, Cohere). swapped: the second half with the first one, which turns the other way (nanochat).
    """

    HALVES = "halves"
    ADJACENT = "adjacent"
    SWAPPED = "swapped"


def sin_cos(positions_BT: jax.Array, frequency: jax.Array, magnitude: float) -> Angles:
    """Sines and cosines [B, T, 1, R / 2] of R rotated dimensions, in float32.

    Args:
      positions_BT: positions of the tokens.
      frequency: radians per position, [R / 2], or [B, 1, 1, R / 2] if rows differ.
      magnitude: factor of both.
    """
    if sharding.platform() != "cpu" or frequency.shape[-1] % 2:
        return reference(positions_BT, frequency, magnitude)
    # XLA's CPU back end would recompute sines and cosines in the fusions of every unrolled layer; it keeps the results
    # of a loop (an optimization_barrier is removed before fusion).
    halves = jnp.stack(jnp.split(frequency, 2, axis=-1))
    sin, cos = jax.lax.map(lambda half: reference(positions_BT, half, magnitude), halves)
    return jnp.concatenate([sin[0], sin[1]], axis=-1), jnp.concatenate([cos[0], cos[1]], axis=-1)


def reference(positions_BT: jax.Array, frequency: jax.Array, magnitude: float) -> Angles:
    """The reference of `sin_cos`."""
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency
    return jnp.sin(angle) * magnitude, jnp.cos(angle) * magnitude


def rotate(x_BTNH: jax.Array, angles: Angles, pairs: Pairs = Pairs.HALVES) -> jax.Array:
    """Rotates the first R dimensions of each head by their angles, in pairs."""
    sin, cos = angles
    turning = 2 * sin.shape[-1]
    x, rest = x_BTNH[..., :turning].astype(jnp.float32), x_BTNH[..., turning:]
    if pairs is Pairs.ADJACENT:
        first, second = x[..., ::2], x[..., 1::2]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
    else:
        first, second = jnp.split(x, 2, axis=-1)
        if pairs is Pairs.SWAPPED:
            rotated = jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
        else:
            rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x_BTNH.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
