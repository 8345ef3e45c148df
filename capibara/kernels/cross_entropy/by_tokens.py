"""The cross entropy by blocks of tokens: each block computes its logits over the whole vocabulary, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.core.types import PyTree
from capibara.kernels.cross_entropy.layout import Head, Layout, dot, gathered
from capibara.kernels.cross_entropy.terms import Softmax, Terms
from capibara.kernels.matmul.transposition import transposed

_Arrays = tuple[jax.Array, ...]
_Carry = TypeVar("_Carry")

# Bytes of one block of float32 logits on a device: they fit in a CPU's cache and are small next to an HBM.
BLOCK_BYTES = {"cpu": 16 * 2**20}
_DEFAULT_BLOCK_BYTES = 256 * 2**20
# A block has at most this share of all logits: in a small batch the head's gradient is as large as a block.
_FEWEST_BLOCKS = 4
# Bytes of the head's gradient that are reduced at once.
REDUCED_BYTES = 64 * 2**20


def loss_sums(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    layout: Layout,
    terms: Terms,
    softmax: Softmax,
) -> jax.Array:
    """One shard's first LossSums [4 or 5], without gradients."""
    head = gathered(head_VD, hidden_BTD.dtype, layout)

    def add(sums: jax.Array, block: _Arrays) -> tuple[jax.Array, None]:
        return sums + _block(block, head, terms, softmax)[0], None

    return _over_blocks(add, jnp.zeros(terms.columns), (hidden_BTD, targets_BT, weights_BT), len(head_VD))[0]


def loss_and_gradients(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    layout: Layout,
    terms: Terms,
    softmax: Softmax,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """One shard's loss and gradients, from its tokens and its part of the head's D.

    The gradients are computed in the same pass, while a block's probabilities exist, so the logits are computed once.
    Each shard adds up its own head gradient over the blocks in float32. The gradients are reduced once, right after the
    pass, to the devices that hold the head's shards, so the whole gradient is freed before the layers' backward pass
    begins. With few tokens the gradients with respect to all logits, in the compute dtype, are smaller than the head's
    gradient: then these are kept, and the head's gradient is computed part by part as it is reduced.

    Returns:
      The first LossSums of the shard [1, 4 or 5]; the gradient of the hidden states [B, T, D] in their dtype; and the
      gradient of the shard's part of the head, summed over shards, in float32 (None if the head has none).
    """
    head = gathered(head_VD, hidden_BTD.dtype, layout)
    (B, T, D), V = hidden_BTD.shape, len(head_VD)
    # For the head's gradient the blocks keep its sum, or the logits' gradients where those are smaller.
    kept_whole = bool(layout.head_axes) and B * T * hidden_BTD.dtype.itemsize < 4 * D

    def add(carry: _Arrays, block: _Arrays) -> tuple[_Arrays, _Arrays]:
        sums, dhead_DV = carry
        block_sums, dlogits = _block(block, head, terms, softmax)
        hidden = block[0]
        dhidden = head.gradient(dlogits).astype(hidden.dtype)
        if not layout.trains_head:
            return (sums + block_sums, dhead_DV), (dhidden,)
        if kept_whole:
            return (sums + block_sums, dhead_DV), (dhidden, hidden, dlogits)
        return (sums + block_sums, dhead_DV + dot(hidden, dlogits, 0, 0)), (dhidden,)

    # The head's gradient adds up as [D, V]: hidden.T @ dlogits is the order that XLA's CPU matmul runs fastest.
    start: _Arrays = (
        jnp.zeros(terms.columns),
        jnp.zeros((D, V) if layout.trains_head and not kept_whole else (0,), jnp.float32),
    )
    (sums, dhead_DV), (dhidden, *factors) = _over_blocks(add, start, (hidden_BTD, targets_BT, weights_BT), V)
    dhidden_BTD = jnp.moveaxis(dhidden.reshape(-1, B, T // dhidden.shape[0], D), 0, 1).reshape(B, T, D)
    if not layout.trains_head:
        return sums[None], dhidden_BTD, None
    part = functools.partial(_sum_part, dhead_DV)
    if kept_whole:
        hidden_ND, dlogits_NV = (x.reshape(B * T, -1) for x in factors)
        part = functools.partial(_product_part, hidden_ND, dlogits_NV)
    return sums[None], dhidden_BTD, transposed(_reduced(part, D, V, layout))


def token_log_probabilities(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, layout: Layout, softmax: Softmax
) -> jax.Array:
    """Log-probabilities of one shard's targets [B, T], without gradients."""
    head, (B, T) = gathered(head_VD, hidden_BTD.dtype, layout), targets_BT.shape

    def add(carry: tuple[()], block: _Arrays) -> tuple[tuple[()], jax.Array]:
        return carry, _log_probabilities_of_block(block, head, softmax)

    _, result = _over_blocks(add, (), (hidden_BTD, targets_BT), len(head_VD))
    return jnp.moveaxis(result.reshape(-1, B, T // len(result)), 0, 1).reshape(B, T)


def _sum_part(dhead_DV: jax.Array, shards: int, start: jax.Array | int, size: int) -> jax.Array:
    """The rows from `start` on of each of `shards` parts of D: [shards, size, V]."""
    dhead_SXV = dhead_DV.reshape(shards, -1, dhead_DV.shape[1])
    return jax.lax.dynamic_slice_in_dim(dhead_SXV, start, size, axis=1)


def _product_part(
    hidden_ND: jax.Array, dlogits_NV: jax.Array, shards: int, start: jax.Array | int, size: int
) -> jax.Array:
    """`_sum_part` of hidden.T @ dlogits."""
    hidden_NSX = hidden_ND.reshape(len(hidden_ND), shards, -1)
    return dot(jax.lax.dynamic_slice_in_dim(hidden_NSX, start, size, axis=2), dlogits_NV, 0, 0)


def _reduced(part: Callable[..., jax.Array], D: int, V: int, layout: Layout) -> jax.Array:
    """The sum of all shards' head gradients, each device's part of D; a large one is reduced part by part.

    A TPU reduces into a second buffer and copies its part from there, so small parts keep that buffer small.

    Args:
      part: (shards of D, start, size) -> these rows of each of the shards of this device's gradient [D, V].
      D, V: sizes of the gradient.
      layout: the devices that receive each part.
    """
    if not layout.head_axes:
        return layout.reduced(part(1, 0, D))
    shards = layout.head_shards
    fewest = min(-(-D * V * 4 // REDUCED_BYTES), D // shards)
    pieces = next(n for n in range(fewest, D // shards + 1) if D // shards % n == 0)
    size = D // shards // pieces

    def piece(index: jax.Array | int) -> jax.Array:
        return layout.reduced(part(shards, index * size, size))

    return jax.lax.map(piece, jnp.arange(pieces)).reshape(D // shards, V) if pieces > 1 else piece(0)


def _block(block: _Arrays, head: Head, terms: Terms, softmax: Softmax) -> tuple[jax.Array, jax.Array]:
    """Sums [4 or 5] of a block of N positions, and the loss's gradient with respect to its logits [N, V]."""
    hidden, targets, weights = block
    logits = softmax.inputs(head.logits(hidden))
    largest = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    log_z = (jnp.log(total) + largest)[:, 0]
    target = _of_targets(logits, targets)
    correct = (target >= largest[:, 0]).astype(jnp.float32)
    columns = [log_z - target, jnp.square(log_z), correct, jnp.ones_like(weights)]
    V, share = logits.shape[1], weights[:, None]
    if terms.smoothing:
        low = terms.others(V)
        less = terms.smoothing + low  # the target loses this probability; every id gets `low`
        columns.append(less * target - low * jnp.sum(logits, axis=-1) - terms.entropy(V))
        share = (1.0 - less) * share
    sums = jnp.stack([jnp.sum(column * weights) for column in columns])
    scale = (weights * (1.0 + 2.0 * terms.z_loss * log_z))[:, None]
    dlogits = exponentials * (scale / total) - jnp.where(_is_target(logits, targets), share, 0.0)
    if terms.smoothing:
        dlogits = dlogits - low * weights[:, None]
    return sums, softmax.gradient(logits, dlogits).astype(hidden.dtype)


def _log_probabilities_of_block(block: _Arrays, head: Head, softmax: Softmax) -> jax.Array:
    """Log-probabilities of the targets of a block of N positions, [N]."""
    hidden, targets = block
    logits = softmax.inputs(head.logits(hidden))
    return _of_targets(logits, targets) - jax.nn.logsumexp(logits, axis=-1)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Whether an id is its position's target, bool [N, V]."""
    return targets[:, None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)


def _of_targets(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logit of each position's target, [N]; any number where the target is no valid id: its weight is 0."""
    if sharding.platform() == "cpu" and not sharding.active():
        return jnp.take_along_axis(logits, targets[:, None], axis=-1, mode="clip")[:, 0]
    # Comparing with the ids keeps a sharded vocabulary sharded; XLA's CPU back end makes two passes of it.
    return jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)


def _over_blocks(
    body: Callable[[_Carry, _Arrays], tuple[_Carry, PyTree]], carry: _Carry, arrays: _Arrays, V: int
) -> tuple[_Carry, PyTree]:
    """Scans `body` over blocks of positions; arrays [B, T, ...] become [blocks, B * T / blocks, ...]."""
    B, T = arrays[1].shape
    size = B * T * V * 4
    limit = BLOCK_BYTES.get(sharding.platform()) or min(_DEFAULT_BLOCK_BYTES, -(-size // _FEWEST_BLOCKS))
    fewest = -(-size // limit)
    blocks = next(n for n in range(min(fewest, T), T + 1) if T % n == 0)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(B, blocks, T // blocks, *x.shape[2:]), 1, 0)
        return x.reshape(blocks, B * T // blocks, *x.shape[3:])

    split_arrays = tuple(split(x) for x in arrays)
    if blocks > 1:
        return jax.lax.scan(body, carry, split_arrays)
    carry, out = body(carry, tuple(x[0] for x in split_arrays))
    return carry, jax.tree.map(lambda x: x[None], out)
