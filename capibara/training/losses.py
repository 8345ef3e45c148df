"""Next-token losses as sums, so that micro-batches and hosts add up exactly; logits are never whole."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from capibara import sharding

# Bytes of one block of float32 logits on a device: what stays in a CPU's cache, and little beside an HBM.
_BLOCK_BYTES = {"cpu": 8 * 2**20}
_DEFAULT_BLOCK_BYTES = 256 * 2**20


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, float32 scalars.

    Attributes:
      nll: negative log-likelihood in nats.
      z: squared log of the softmax normaliser (the z-loss of PaLM, before its coefficient).
      correct: targets that no other token beats.
      weight: sum of the weights.
    """

    nll: jax.Array
    z: jax.Array
    correct: jax.Array
    weight: jax.Array


def cross_entropy(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> tuple[jax.Array, LossSums]:
    """Cross entropy of softmax(hidden @ head.T) against the targets.

    Logits are made and used up in blocks of places. Where gradients are wanted they are made in the same pass, while a
    block's probabilities are at hand, so the logits are computed once. Each batch shard adds up its own head gradient
    over the blocks; they are reduced once.

    Args:
      hidden_BTD: final hidden states, in the compute dtype.
      head_VD: output projection, float32.
      targets_BT: wanted token ids.
      weights_BT: weight of each target; 0 leaves it out. No gradient.
      z_loss: coefficient of the squared log normaliser in the loss.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap); None: they stay.

    Returns:
      The loss, nll + z_loss * z, to differentiate; and the sums, without gradient.
    """

    def shard_loss(hidden_BTD, head_VD, targets_BT, weights_BT):
        # The cast is in here so that the shards' head gradients are summed in float32.
        head_VD = head_VD.astype(hidden_BTD.dtype)
        return _blocked_loss(hidden_BTD, head_VD, targets_BT, weights_BT, z_loss, soft_cap)

    row_axes, time_axes = _loss_axes(*targets_BT.shape)
    if not row_axes + time_axes:
        return _totals(shard_loss(hidden_BTD, head_VD, targets_BT, weights_BT))
    places = P(row_axes or None, time_axes or None)
    local = jax.shard_map(
        lambda *args: jax.tree.map(lambda x: x[None], shard_loss(*args)),
        mesh=sharding.active()[0],
        in_specs=(places, P(), places, places),
        out_specs=P(row_axes + time_axes),
        axis_names=set(row_axes + time_axes),
        check_vma=False,
    )
    return _totals(jax.tree.map(lambda x: jnp.sum(x, 0), local(hidden_BTD, head_VD, targets_BT, weights_BT)))


def _loss_axes(rows: int, length: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes that share out the rows and the places of the loss.

    Stages have done their work on all rows by then, so they share them too, where the rows divide. Axes of one device
    are left out: the partitioner cannot do with a manual one beside a tensor axis.
    """
    mesh, rules = sharding.active() or (None, None)
    if mesh is None:
        return (), ()
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    row_axes = tuple(axis for axis in rules.batch if axis in sizes)
    stages = tuple(axis for axis in rules.act_stage if axis in sizes)
    if rows % math.prod(sizes[axis] for axis in row_axes + stages) == 0:
        row_axes += stages
    time_axes = tuple(axis for axis in rules.act_time if axis in sizes)
    return row_axes, time_axes if length % math.prod(sizes[axis] for axis in time_axes) == 0 else ()


def _totals(loss_and_sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, LossSums]:
    loss, sums = loss_and_sums
    return loss, LossSums(*jax.lax.stop_gradient(sums))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blocked_loss(
    hidden_BTD, head_VD, targets_BT, weights_BT, z_loss: float, soft_cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """The loss and the four LossSums [4] of one batch shard."""

    def add(sums, block):
        return sums + _block(block, head_VD, z_loss, soft_cap)[0], None

    sums, _ = _over_blocks(add, jnp.zeros(4), (hidden_BTD, targets_BT, weights_BT), head_VD)
    return sums[0] + z_loss * sums[1], sums


def _blocked_loss_forward(hidden_BTD, head_VD, targets_BT, weights_BT, z_loss, soft_cap):
    def add(carry, block):
        sums, dhead_DV = carry
        block_sums, dlogits = _block(block, head_VD, z_loss, soft_cap)
        hidden = block[0]
        dhidden = _dot(dlogits, head_VD, 1, 0).astype(hidden.dtype)
        return (sums + block_sums, dhead_DV + _dot(hidden, dlogits, 0, 0)), dhidden

    # The head's gradient adds up as [D, V]: hidden.T @ dlogits is the order that XLA's CPU matmul runs fastest.
    start = (jnp.zeros(4), jnp.zeros(head_VD.shape[::-1], jnp.float32))
    (sums, dhead_DV), dhidden = _over_blocks(add, start, (hidden_BTD, targets_BT, weights_BT), head_VD)
    B, T, D = hidden_BTD.shape
    dhidden_BTD = jnp.moveaxis(dhidden.reshape(-1, B, T // dhidden.shape[0], D), 0, 1).reshape(B, T, D)
    return (sums[0] + z_loss * sums[1], sums), (dhidden_BTD, dhead_DV.T)


def _blocked_loss_backward(z_loss, soft_cap, gradients, upstream):
    del z_loss, soft_cap
    dloss, _ = upstream  # the sums have no gradient
    dhidden_BTD, _ = gradients
    # The head's gradient is rounded after dloss: summed over many tokens it may be more than float16 holds.
    return tuple((d * dloss).astype(dhidden_BTD.dtype) for d in gradients) + (None, None)


_blocked_loss.defvjp(_blocked_loss_forward, _blocked_loss_backward)


def _block(block, head_VD, z_loss: float, soft_cap: float | None) -> tuple[jax.Array, jax.Array]:
    """Sums [4] of a block of places, and the loss's gradient by its logits [places, V]."""
    hidden, targets, weights = block
    logits = _dot(hidden, head_VD, 1, 1)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    log_z = (jnp.log(total) + largest)[:, 0]
    # Comparing with the ids, not indexing, keeps a vocabulary that is sharded where it is.
    is_target = targets[:, None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    correct = (target >= largest[:, 0]).astype(jnp.float32)
    columns = (log_z - target, jnp.square(log_z), correct, jnp.ones_like(weights))
    sums = jnp.stack([jnp.sum(column * weights) for column in columns])
    scale = (weights * (1.0 + 2.0 * z_loss * log_z))[:, None]
    dlogits = exponentials * (scale / total) - jnp.where(is_target, weights[:, None], 0.0)
    if soft_cap is not None:
        dlogits = dlogits * (1.0 - jnp.square(logits / soft_cap))
    return sums, dlogits.astype(hidden.dtype)


def _over_blocks(body, carry, arrays, head_VD):
    """Scans `body` over blocks of places; arrays [B, T, ...] become [blocks, B * T / blocks, ...]."""
    B, T = arrays[1].shape
    limit = _BLOCK_BYTES.get(sharding.platform(), _DEFAULT_BLOCK_BYTES)
    wanted = -(-B * T * head_VD.shape[0] * 4 // limit)
    blocks = next(n for n in range(min(wanted, T), T + 1) if T % n == 0)

    def split(x):
        x = jnp.moveaxis(x.reshape(B, blocks, T // blocks, *x.shape[2:]), 1, 0)
        return x.reshape(blocks, B * T // blocks, *x.shape[3:])

    split_arrays = tuple(split(x) for x in arrays)
    if blocks > 1:
        return jax.lax.scan(body, carry, split_arrays)
    carry, out = body(carry, tuple(x[0] for x in split_arrays))
    return carry, None if out is None else out[None]


def _dot(a, b, contract_a: int, contract_b: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)
