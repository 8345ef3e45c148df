"""AWQ (Lin et al. 2023, arXiv:2306.00978): scales large inputs down, and their weights up, before rounding."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core import projections
from capibara.interop.quantize.grid import Grid
from capibara.models.api import DecoderConfig

Layer = Mapping[str, Mapping[str, np.ndarray]]
"""The parameters of one layer on the host: part of the block -> name of the weight -> array."""

_STEPS = 20  # number of exponents to try, from 0 to below 1
_LEAST = 1e-4


def channel_scales(
    weights: Sequence[np.ndarray], hessian_II: np.ndarray, means_I: np.ndarray, grid: Grid, channels: np.ndarray
) -> np.ndarray:
    """The divisors of the inputs, by which the weights are multiplied: a power of the inputs' mean magnitudes.

    The exponent is the one for which the rounded weights' products are closest to the exact ones.

    Args:
      weights: all weights [O, I] that share these inputs.
      hessian_II: sum of x x^T over the calibration tokens.
      means_I: mean of |x|.
      grid: the quantization grid.
      channels: [I] numbers; inputs with the same number must have the same scale.
    """
    hessian, stacked = jnp.asarray(hessian_II, jnp.float32), jnp.asarray(np.concatenate(weights))
    means = (np.bincount(channels, means_I) / np.bincount(channels))[channels]
    best, result = np.inf, np.ones_like(means)
    for power in np.arange(_STEPS) / _STEPS:
        scales = np.maximum(means**power, _LEAST).astype(np.float32)
        scales /= np.sqrt(scales.max() * scales.min())
        loss = float(_loss(grid, stacked, jnp.asarray(scales), hessian))
        if loss < best:
            best, result = loss, scales
    return result


@functools.partial(jax.jit, static_argnums=0)
def _loss(grid: Grid, weight_OI: jax.Array, scales_I: jax.Array, hessian_II: jax.Array) -> jax.Array:
    """Squared error of the products with scaled inputs and the scaled, rounded weight."""
    error = grid.nearest_values(weight_OI * scales_I) / scales_I - weight_OI
    return jnp.sum((error @ hessian_II) * error)


def fold(layer: Layer, config: DecoderConfig, name: str, scales_I: np.ndarray) -> Layer:
    """Scales a weight's inputs down where they are computed, and the weights that read them up.

    Args:
      layer: parameters of one layer.
      config: of the model.
      name: "attention/query", "attention/out", "mlp/up" or "mlp/down": a weight with these inputs.
      scales_I: of the inputs; those of "attention/out" are equal for heads that share a value head.
    """
    part, _, last = name.partition("/")
    weights = dict(layer[part])
    if name in (projections.QUERY.path, projections.UP.path):
        for reader in projections.readers(name):
            if reader in weights:
                weights[reader] = weights[reader] * scales_I.reshape(-1, *[1] * (weights[reader].ndim - 1))
        offset = 1.0 if str(config.norm_scale) == "offset" else 0.0
        norm = dict(layer[f"{part}_norm"])
        norm["scale"] = (norm["scale"] + offset) / scales_I - offset
        if "bias" in norm:
            norm["bias"] = norm["bias"] / scales_I
        return {**layer, part: weights, f"{part}_norm": norm}
    if last == "out":
        shape = weights["out"].shape[:2]  # heads, and their dimensions
        by_head = scales_I.reshape(shape)
        maker, divisor = "value", by_head[:: shape[0] // config.kv_heads]
        weights["out"] = weights["out"] * by_head[..., None]
    else:
        maker, divisor = "up", scales_I
        weights["down"] = weights["down"] * scales_I[:, None]
    weights[maker] = weights[maker] / divisor
    if f"{maker}_bias" in weights:
        weights[f"{maker}_bias"] = weights[f"{maker}_bias"] / divisor
    return {**layer, part: weights}


def foldable(config: DecoderConfig, layer: Layer) -> dict[str, Any]:
    """The names that `fold` accepts for a layer -> channels, as in `channel_scales`.

    The output of an activation without a gate cannot be scaled in advance.
    """
    heads, size, embed = config.num_heads, config.value_size, np.arange(config.embed_dim)
    values = np.arange(config.kv_heads * size).reshape(config.kv_heads, size)
    result = {"attention/query": embed, "mlp/up": embed} if _has_pre_norm(config) else {}
    normed = str(config.inner_norm) != "none"  # between what makes these inputs and what reads them
    if not normed and config.attention_clip is None:
        result["attention/out"] = np.repeat(values, heads // config.kv_heads, 0).reshape(-1)
    if "gate" in layer["mlp"] and not normed:
        result["mlp/down"] = np.arange(config.mlp_dim)
    return result


def _has_pre_norm(config: DecoderConfig) -> bool:
    """Whether each branch has a norm of its inputs, with a scale, that no other branch reads."""
    is_separate = str(config.norm_placement) in ("pre", "sandwich") and str(config.residual) != "shared"
    return is_separate and str(config.norm_scale) != "none"
