"""Next-token losses as sums, so that micro-batches and hosts add up exactly; logits are never whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.kernels.matmul.transposition import transposed
from capibara.sharding import Rules

# Bytes of one block of float32 logits on a device: what stays in a CPU's cache, and little beside an HBM.
_BLOCK_BYTES = {"cpu": 16 * 2**20}
_DEFAULT_BLOCK_BYTES = 256 * 2**20
# A block is at most this part of all logits: next to those of a small batch the head's gradient is as large.
_FEWEST_BLOCKS = 4
# Bytes of the head's gradient that are reduced at once.
_REDUCED_BYTES = 64 * 2**20


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, float32 scalars.

    Attributes:
      nll: negative log-likelihood in nats.
      z: squared log of the softmax normaliser (the z-loss of PaLM, before its coefficient).
      correct: targets that no other token beats.
      weight: sum of the weights.
      smoothing: what label smoothing adds to `nll`; None without.
      tokens: real tokens, where the weights say something else; None: their sum.
    """

    nll: jax.Array
    z: jax.Array
    correct: jax.Array
    weight: jax.Array
    smoothing: jax.Array | None = None
    tokens: jax.Array | None = None


class Terms(NamedTuple):
    """What a loss has beside the cross entropy.

    Attributes:
      z_loss: coefficient of the squared log normaliser.
      smoothing: share of a target's probability that goes to all other ids in equal parts (Szegedy et al. 2016,
        arXiv:1512.00567); the entropy of that is taken away, so that the least loss is 0.
    """

    z_loss: float = 0.0
    smoothing: float = 0.0

    @property
    def columns(self) -> int:
        """How many sums there are."""
        return 5 if self.smoothing else 4

    def total(self, sums: jax.Array) -> jax.Array:
        """The loss."""
        loss = sums[0] + self.z_loss * sums[1]
        return loss + sums[4] if self.smoothing else loss

    def others(self, V: int) -> float:
        """The probability that each other id is wanted to have."""
        return self.smoothing / max(V - 1, 1)

    def entropy(self, V: int) -> float:
        """Of what the ids are wanted to have, in nats."""
        low = self.others(V)
        return -(1.0 - self.smoothing) * math.log1p(-self.smoothing) - (V - 1) * low * math.log(low + 1e-20)


def cross_entropy(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    trains_head: bool = True,
) -> tuple[jax.Array, LossSums]:
    """Cross entropy of softmax(hidden @ head.T) against the targets.

    Logits are made and used up in blocks of places. Where gradients are wanted they are made in the same pass, while a
    block's probabilities are at hand, so the logits are computed once. Each shard adds up its own head gradient over
    the blocks in float32; they are reduced once, right then, to where the head's shards lie: the whole gradient, for a
    large vocabulary one of the largest arrays there are, is gone before the layers' backward pass begins. Of few tokens
    the gradients by all logits, in the compute dtype, are smaller than that: then these are kept, and the head's
    gradient is made part after part as it is reduced.

    Args:
      hidden_BTD: final hidden states, in the compute dtype.
      head_VD: output projection, float32.
      targets_BT: wanted token ids.
      weights_BT: weight of each target; 0 leaves it out. No gradient.
      z_loss: coefficient of the squared log normaliser in the loss.
      label_smoothing: share of a target's probability that goes to the other ids.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap); None: they stay.
      trains_head: else the head has no gradient, and none is made.

    Returns:
      The loss, nll + z_loss * z + smoothing, to differentiate; and the sums, without gradient.
    """
    layout = _layout_of(targets_BT, head_VD, trains_head)
    terms = Terms(z_loss, label_smoothing)
    loss, sums = _loss(hidden_BTD, head_VD, targets_BT, weights_BT, layout, terms, _Softmax(soft_cap))
    return loss, LossSums(*jax.lax.stop_gradient(sums))


def token_log_probabilities(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    *,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    usable: int | None = None,
    trains_head: bool = True,
) -> jax.Array:
    """Log-probability of each target under softmax(hidden @ head.T / temperature), float32 [B, T], to differentiate.

    For losses that are no sum over tokens. What each of them weighs is known only when all are there, so the logits are
    made again, block by block, in the backward pass, which is that of `cross_entropy` with these weights.

    Args:
      hidden_BTD, head_VD, targets_BT, soft_cap, trains_head: as for `cross_entropy`.
      temperature: divides the logits, after the cap.
      usable: only so many first ids can be; None: all.
    """
    layout = _layout_of(targets_BT, head_VD, trains_head)
    usable = None if usable is None or usable >= len(head_VD) else usable
    return _log_probabilities(hidden_BTD, head_VD, targets_BT, layout, _Softmax(soft_cap, temperature, usable))


class _Softmax(NamedTuple):
    """What is made of logits in front of a softmax; arguments as of `token_log_probabilities`."""

    soft_cap: float | None = None
    temperature: float = 1.0
    usable: int | None = None

    def inputs(self, logits: jax.Array) -> jax.Array:
        """What the softmax is of, [places, V]."""
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return logits if self.usable is None else jnp.where(self._can_be(logits), logits, -jnp.inf)

    def gradient(self, inputs: jax.Array, dinputs: jax.Array) -> jax.Array:
        """By the logits, of that by the softmax's inputs."""
        if self.usable is not None:
            inputs = jnp.where(self._can_be(inputs), inputs, 0.0)  # their gradient is 0 already
        if self.temperature != 1.0:
            inputs, dinputs = inputs * self.temperature, dinputs / self.temperature
        return dinputs if self.soft_cap is None else dinputs * (1.0 - jnp.square(inputs / self.soft_cap))

    def _can_be(self, logits: jax.Array) -> jax.Array:
        return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < self.usable


class _Layout(NamedTuple):
    """Which mesh axes share out the rows, the places, and the head's D; without any of the first two all is local.

    `trains_head`: whether the head has a gradient.
    """

    mesh: Mesh | None
    row_axes: tuple[str, ...]
    time_axes: tuple[str, ...]
    head_axes: tuple[str, ...]
    trains_head: bool

    @property
    def axes(self) -> tuple[str, ...]:
        return self.row_axes + self.time_axes


def _layout_of(targets_BT: jax.Array, head_VD: jax.Array, trains_head: bool) -> _Layout:
    """On the active mesh."""
    row_axes, time_axes = _loss_axes(*targets_BT.shape)
    mesh, rules = sharding.active() or (None, None)
    head_axes = _head_axes(mesh, rules, row_axes + time_axes, head_VD.shape[1])
    return _Layout(mesh, row_axes, time_axes, head_axes, trains_head)


def _head_axes(mesh: Mesh | None, rules: Rules | None, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Of the axes that share out the loss, those along which the head's D lies too."""
    kept = tuple(axis for axis in rules.embed if axis in axes) if mesh else ()
    return kept if size % math.prod(mesh.shape[axis] for axis in kept) == 0 else ()


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _loss(hidden_BTD, head_VD, targets_BT, weights_BT, layout: _Layout, terms: Terms, softmax: _Softmax):
    """The loss and the first LossSums [4 or 5]."""

    def local(hidden_BTD, head_VD, targets_BT, weights_BT):
        head = _gathered(head_VD, hidden_BTD.dtype, layout)

        def add(sums, block):
            return sums + _block(block, head, terms, softmax)[0], None

        return _over_blocks(add, jnp.zeros(terms.columns), (hidden_BTD, targets_BT, weights_BT), len(head_VD))[0][None]

    places, head, per_shard = _specs(layout)
    sums = _on_shards(local, layout, (places, head, places, places), per_shard)(
        hidden_BTD, head_VD, targets_BT, weights_BT
    )
    sums = jnp.sum(sums, 0)
    return terms.total(sums), sums


def _loss_forward(hidden_BTD, head_VD, targets_BT, weights_BT, layout, terms, softmax):
    def local(hidden_BTD, head_VD, targets_BT, weights_BT):
        head = _gathered(head_VD, hidden_BTD.dtype, layout)
        (B, T, D), V = hidden_BTD.shape, len(head_VD)
        # What is kept of the blocks for the head's gradient: their sum, or what it is made of where that is smaller.
        kept_whole = bool(layout.head_axes) and B * T * hidden_BTD.dtype.itemsize < 4 * D

        def add(carry, block):
            sums, dhead_DV = carry
            block_sums, dlogits = _block(block, head, terms, softmax)
            hidden = block[0]
            dhidden = head.gradient(dlogits).astype(hidden.dtype)
            if not layout.trains_head:
                return (sums + block_sums, dhead_DV), (dhidden,)
            if kept_whole:
                return (sums + block_sums, dhead_DV), (dhidden, hidden, dlogits)
            return (sums + block_sums, dhead_DV + _dot(hidden, dlogits, 0, 0)), (dhidden,)

        # The head's gradient adds up as [D, V]: hidden.T @ dlogits is the order that XLA's CPU matmul runs fastest.
        start = (
            jnp.zeros(terms.columns),
            jnp.zeros((D, V) if layout.trains_head and not kept_whole else (0,), jnp.float32),
        )
        (sums, dhead_DV), (dhidden, *factors) = _over_blocks(add, start, (hidden_BTD, targets_BT, weights_BT), V)
        dhidden_BTD = jnp.moveaxis(dhidden.reshape(-1, B, T // dhidden.shape[0], D), 0, 1).reshape(B, T, D)
        if not layout.trains_head:
            return sums[None], dhidden_BTD, None
        if kept_whole:
            hidden_ND, dlogits_NV = (x.reshape(B * T, -1) for x in factors)
            dhead_DV = functools.partial(_product_part, hidden_ND, dlogits_NV)
        else:
            dhead_DV = functools.partial(_sum_part, dhead_DV)
        return sums[None], dhidden_BTD, transposed(_reduced(dhead_DV, D, V, layout))

    places, head, per_shard = _specs(layout)
    sums, dhidden_BTD, dhead_VD = _on_shards(
        local, layout, (places, head, places, places), (per_shard, places, head if layout.trains_head else None)
    )(hidden_BTD, head_VD, targets_BT, weights_BT)
    sums = jnp.sum(sums, 0)
    if (
        layout.trains_head and sharding.platform() == "tpu"
    ):  # whose scheduler would reduce the head's gradient last and keep it whole
        dhidden_BTD, dhead_VD = jax.lax.optimization_barrier((dhidden_BTD, dhead_VD))
    return (terms.total(sums), sums), (dhidden_BTD, dhead_VD, jnp.zeros(0, head_VD.dtype))


def _loss_backward(layout, terms, softmax, gradients, upstream):
    del layout, terms, softmax
    dloss, _ = upstream  # the sums have no gradient
    dhidden_BTD, dhead_VD, like_head = gradients
    # In float32, and rounded only then: dloss is a float16 run's loss scale.
    dhidden = (dhidden_BTD.astype(dloss.dtype) * dloss).astype(dhidden_BTD.dtype)
    dhead = None if dhead_VD is None else (dhead_VD.astype(dloss.dtype) * dloss).astype(like_head.dtype)
    return dhidden, dhead, None, None


_loss.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _log_probabilities(hidden_BTD, head_VD, targets_BT, layout: _Layout, softmax: _Softmax) -> jax.Array:
    def local(hidden_BTD, head_VD, targets_BT):
        head, (B, T) = _gathered(head_VD, hidden_BTD.dtype, layout), targets_BT.shape

        def add(carry, block):
            return carry, _log_probabilities_of_block(block, head, softmax)

        _, found = _over_blocks(add, (), (hidden_BTD, targets_BT), len(head_VD))
        return jnp.moveaxis(found.reshape(-1, B, T // len(found)), 0, 1).reshape(B, T)

    places, head, _ = _specs(layout)
    return _on_shards(local, layout, (places, head, places), places)(hidden_BTD, head_VD, targets_BT)


def _log_probabilities_forward(hidden_BTD, head_VD, targets_BT, layout, softmax):
    kept = hidden_BTD, head_VD, targets_BT
    return _log_probabilities(*kept, layout, softmax), kept


def _log_probabilities_backward(layout, softmax, kept, upstream_BT):
    _, (dhidden_BTD, dhead_VD, _) = _loss_forward(*kept, -upstream_BT, layout, Terms(), softmax)
    return dhidden_BTD, None if dhead_VD is None else dhead_VD.astype(kept[1].dtype), None


_log_probabilities.defvjp(_log_probabilities_forward, _log_probabilities_backward)


def _specs(layout: _Layout) -> tuple[P, P, P]:
    """Of arrays [B, T, ...], of the head [V, D], and of results with one row for each shard."""
    return P(layout.row_axes or None, layout.time_axes or None), P(None, layout.head_axes or None), P(layout.axes)


def _on_shards(local: Callable, layout: _Layout, in_specs: tuple[P, ...], out_specs: Any) -> Callable:
    """`local` on each shard of the loss; vocabulary axes stay with the partitioner."""
    if not layout.axes:
        return local
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(layout.axes),
        check_vma=False,
    )


def _sum_part(dhead_DV: jax.Array, shards: int, start: jax.Array | int, size: int) -> jax.Array:
    """Of each of `shards` parts of D the rows from `start` on: [shards, size, V]."""
    dhead_SXV = dhead_DV.reshape(shards, -1, dhead_DV.shape[1])
    return jax.lax.dynamic_slice_in_dim(dhead_SXV, start, size, axis=1)


def _product_part(
    hidden_ND: jax.Array, dlogits_NV: jax.Array, shards: int, start: jax.Array | int, size: int
) -> jax.Array:
    """The same of hidden.T @ dlogits."""
    hidden_NSX = hidden_ND.reshape(len(hidden_ND), shards, -1)
    return _dot(jax.lax.dynamic_slice_in_dim(hidden_NSX, start, size, axis=2), dlogits_NV, 0, 0)


def _reduced(part: Callable[..., jax.Array], D: int, V: int, layout: _Layout) -> jax.Array:
    """The sum of all shards' head gradients, each device's part of D; a large one part after part.

    A TPU reduces into a second buffer and takes its part from that, so it is kept small.

    Args:
      part: (shards of D, start, size) -> these rows of each of the shards of this device's gradient [D, V].
      D, V: sizes of the gradient.
      layout: where it goes.
    """
    others = tuple(axis for axis in layout.axes if axis not in layout.head_axes)

    def over_others(x):
        return jax.lax.psum(x, others) if others else x

    if not layout.head_axes:
        return over_others(part(1, 0, D)[0])
    shards = math.prod(layout.mesh.shape[axis] for axis in layout.head_axes)
    wanted = min(-(-D * V * 4 // _REDUCED_BYTES), D // shards)
    pieces = next(n for n in range(wanted, D // shards + 1) if D // shards % n == 0)
    size = D // shards // pieces

    def piece(index: jax.Array | int) -> jax.Array:
        mine = over_others(part(shards, index * size, size))
        return jax.lax.psum_scatter(mine, layout.head_axes, scatter_dimension=0, tiled=True)[0]

    return jax.lax.map(piece, jnp.arange(pieces)).reshape(D // shards, V) if pieces > 1 else piece(0)


class _Head(NamedTuple):
    """The whole head in the compute dtype, [V, D] or [D, V]; `vocabulary` is the axis of V."""

    matrix: jax.Array
    vocabulary: int

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[places, D] -> [places, V], float32."""
        return _dot(hidden, self.matrix, 1, 1 - self.vocabulary)

    def gradient(self, dlogits: jax.Array) -> jax.Array:
        """By the hidden states: [places, V] -> [places, D], float32."""
        return _dot(dlogits, self.matrix, 1, self.vocabulary)


def _gathered(head_VD: jax.Array, dtype: jnp.dtype, layout: _Layout) -> _Head:
    """Cast before it is sent.

    A TPU puts the gathered dimension outermost: of a head [V, D] that loops over blocks it would make a second copy. A
    CPU would make one of a transposed head.
    """
    head, vocabulary = head_VD.astype(dtype), 0
    if sharding.platform() != "cpu":
        head, vocabulary = head.T, 1
    if layout.head_axes:
        head = jax.lax.all_gather(head, layout.head_axes, axis=1 - vocabulary, tiled=True)
    return _Head(head, vocabulary)


def _block(block, head: _Head, terms: Terms, softmax: _Softmax) -> tuple[jax.Array, jax.Array]:
    """Sums [4 or 5] of a block of places, and the loss's gradient by its logits [places, V]."""
    hidden, targets, weights = block
    logits = softmax.inputs(head.logits(hidden))
    largest = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    log_z = (jnp.log(total) + largest)[:, 0]
    target = _of_targets(logits, targets)
    correct = (target >= largest[:, 0]).astype(jnp.float32)
    columns = [log_z - target, jnp.square(log_z), correct, jnp.ones_like(weights)]
    V, wanted = logits.shape[1], weights[:, None]
    if terms.smoothing:
        low = terms.others(V)
        less = terms.smoothing + low  # of the target's probability, where every id has `low`
        columns.append(less * target - low * jnp.sum(logits, axis=-1) - terms.entropy(V))
        wanted = (1.0 - less) * wanted
    sums = jnp.stack([jnp.sum(column * weights) for column in columns])
    scale = (weights * (1.0 + 2.0 * terms.z_loss * log_z))[:, None]
    dlogits = exponentials * (scale / total) - jnp.where(_is_target(logits, targets), wanted, 0.0)
    if terms.smoothing:
        dlogits = dlogits - low * weights[:, None]
    return sums, softmax.gradient(logits, dlogits).astype(hidden.dtype)


def _log_probabilities_of_block(block, head: _Head, softmax: _Softmax) -> jax.Array:
    """Of the targets of a block of places, [places]."""
    hidden, targets = block
    logits = softmax.inputs(head.logits(hidden))
    return _of_targets(logits, targets) - jax.nn.logsumexp(logits, axis=-1)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """[places, V] bool."""
    return targets[:, None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)


def _of_targets(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logit of each place's target, [places]; some number where that is no id: its weight is 0."""
    if sharding.platform() == "cpu" and not sharding.active():
        return jnp.take_along_axis(logits, targets[:, None], axis=-1, mode="clip")[:, 0]
    # Comparing with the ids keeps a vocabulary that is sharded where it is; XLA's CPU back end makes two passes of it.
    return jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)


def _over_blocks(body, carry, arrays, V: int):
    """Scans `body` over blocks of places; arrays [B, T, ...] become [blocks, B * T / blocks, ...]."""
    B, T = arrays[1].shape
    size = B * T * V * 4
    limit = _BLOCK_BYTES.get(sharding.platform()) or min(_DEFAULT_BLOCK_BYTES, -(-size // _FEWEST_BLOCKS))
    wanted = -(-size // limit)
    blocks = next(n for n in range(min(wanted, T), T + 1) if T % n == 0)

    def split(x):
        x = jnp.moveaxis(x.reshape(B, blocks, T // blocks, *x.shape[2:]), 1, 0)
        return x.reshape(blocks, B * T // blocks, *x.shape[3:])

    split_arrays = tuple(split(x) for x in arrays)
    if blocks > 1:
        return jax.lax.scan(body, carry, split_arrays)
    carry, out = body(carry, tuple(x[0] for x in split_arrays))
    return carry, jax.tree.map(lambda x: x[None], out)


def _dot(a, b, contract_a: int, contract_b: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)
