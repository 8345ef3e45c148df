"""Chooses how to multiply activations by weights."""

from __future__ import annotations

import jax

from capibara import sharding
from capibara.kernels.matmul import cpu, reference
from capibara.kernels.matmul.quantized import Quantization, quantized_matmul


def matmul(x: jax.Array, weight: jax.Array, in_dims: int, quantization: Quantization) -> jax.Array:
    """Contracts the last `in_dims` dimensions of x with the first ones of the weight.

    Args:
      x: [B, T, in ...].
      weight: [in ..., out ...].
      in_dims: number of dimensions in `in ...`.
      quantization: 8-bit operands, or none.

    Returns:
      [B, T, out ...] in x's dtype.
    """
    if quantization is not Quantization.NONE:
        return quantized_matmul(x, weight, quantization, in_dims)
    way = cpu.as_matrices if _as_matrices() else reference.contracted
    return way(x, weight, in_dims)


def _as_matrices() -> bool:
    """Whether to merge batch and time into one dimension for a product.

    A weight gradient that contracts two dimensions makes XLA's CPU back end copy the output gradient transposed and use
    its slower matmul. But the partitioner cannot merge dimensions if the second one is sharded: it would gather every
    activation.
    """
    if sharding.platform() != "cpu" or (active := sharding.active()) is None:
        return sharding.platform() == "cpu"
    mesh, rules = active
    return all(mesh.shape[axis] == 1 for axis in rules.act_residual)


def logits(hidden_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """`hidden @ head.T` [B, T, V] in float32; both operands have the same dtype."""
    if hidden_BTD.shape[1] == 1 and sharding.platform() == "cpu":
        return cpu.logits_of_one(hidden_BTD, head_VD)
    return reference.logits(hidden_BTD, head_VD)
