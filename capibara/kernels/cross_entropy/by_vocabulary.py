"""The cross entropy by parts of the vocabulary: each part computes the logits of all tokens, twice.

A first pass computes the softmax's normaliser of each token, a second one the gradients. Only a part of the head's
gradient exists at a time: it is reduced at once to the devices that hold the head's shards. The
other form, `by_tokens`, keeps the whole float32 gradient, which every block reads and writes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.kernels.cross_entropy.layout import Layout, dot
from capibara.kernels.cross_entropy.terms import Softmax, Terms
from capibara.kernels.matmul.transposition import transposed

# Bytes of a part's float32 logits or of its gradient on a chip, whichever is larger; ids of a part of many tokens.
PART_BYTES, _FEWEST = 64 * 2**20, 1024
_PART_BYTES_OF = {"TPU v6 lite": 128 * 2**20}  # whose matrix units are four times as large
# What a part and the gradient of the hidden states may take together to stay in a chip's vector memory (128 MiB), and what
# the part may take of it: less is left in a whole train step than in the loss alone. A v6e gains nothing by it.
_ON_CHIP_BYTES = {"TPU v5 lite": 104 * 2**20}
_ON_CHIP_PART_BYTES, _FEWEST_ON_CHIP = 32 * 2**20, 512  # ids of a part, at least
LANES, _SUBLANES = 128, {"tpu": 8}  # a TPU's vector registers, in float32
_LOWEST = -1e30  # below every logit, and finite; a part whose ids are all unusable has -inf


class _Seen(NamedTuple):
    """Results over the ids that a pass has read, for each shard of the vocabulary and each token: [S, N], float32.

    Attributes:
      largest: the largest logit.
      total: the sum of exp(logit - largest).
      target: the target's logit; 0 if it has not been read yet.
      sum: the sum of the logits; None if unused.
    """

    largest: jax.Array
    total: jax.Array
    target: jax.Array
    sum: jax.Array | None


class _Tokens(NamedTuple):
    """hidden [N, D], targets [N], weights [N]."""

    hidden_ND: jax.Array
    targets_N: jax.Array
    weights_N: jax.Array


class _Parts(NamedTuple):
    """The head, and the parts that it is split into.

    Attributes:
      head_SPV: the head in the compute dtype. V: the ids of one of the S shards of the vocabulary; P: all of D, where
        zeros may fill the last rows of each shard of D.
      head_shards: the number of shards of D.
      own_D: the size of each of them.
      size: the ids of a part in each shard of the vocabulary; the last part can have fewer.
      softmax: how the logits become probabilities.
    """

    head_SPV: jax.Array
    head_shards: int
    own_D: int
    size: int
    softmax: Softmax

    def of(self, start: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array]:
        """The part from `start` on: its head [S, D, size] and its ids [S, 1, size]."""
        S, P, V = self.head_SPV.shape
        ids_SX = start + jnp.arange(size, dtype=jnp.int32) + V * jnp.arange(S, dtype=jnp.int32)[:, None]
        part_SPX = jax.lax.dynamic_slice_in_dim(self.head_SPV, start, size, axis=2)
        if P > self.head_shards * self.own_D:
            part_SPX = part_SPX.reshape(S, self.head_shards, -1, size)[:, :, : self.own_D].reshape(S, -1, size)
        return part_SPX, ids_SX[:, None]

    def logits(self, hidden_ND: jax.Array, head_SDX: jax.Array, ids_S1X: jax.Array) -> jax.Array:
        """The softmax's input, [S, N, X] in float32."""
        hidden_ND, head_SDX = _operands(hidden_ND, head_SDX)
        logits = jnp.einsum("ND,SDX->SNX", hidden_ND, head_SDX, preferred_element_type=jnp.float32)
        return self.softmax.inputs(logits, ids_S1X)


def loss_and_gradients(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    layout: Layout,
    terms: Terms,
    softmax: Softmax,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`by_tokens.loss_and_gradients`, for a head that has a gradient."""
    (V, D), S = head_VD.shape, layout.vocab_shards
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    size = _part_size(V // S, part_ids(len(hidden_ND), D, sharding.device_kind()))
    parts = _Parts(_gathered(head_VD, hidden_BTD.dtype, layout), layout.head_shards, D, size, softmax)
    tokens = _Tokens(hidden_ND, targets_BT.reshape(-1).astype(jnp.int32), weights_BT.reshape(-1))
    sums, log_z_N = _sums(_look(tokens, parts, terms), tokens, V, terms, softmax.ceiling)
    dhidden_ND, dhead_DSV = _gradients(tokens, parts, log_z_N, layout, terms)
    return sums[None], dhidden_ND.reshape(hidden_BTD.shape), transposed(dhead_DSV.reshape(D, V))


def _look(tokens: _Tokens, parts: _Parts, terms: Terms) -> _Seen:
    """The first pass: the normaliser, and the targets' logits."""
    ceiling = parts.softmax.ceiling

    def look(seen: _Seen, start: jax.Array | int, size: int) -> _Seen:
        head_SDX, ids_S1X = parts.of(start, size)
        logits_SNX = parts.logits(tokens.hidden_ND, head_SDX, ids_S1X)
        targets_SNX = jnp.where(tokens.targets_N[:, None] == ids_S1X, logits_SNX, 0.0)
        summed = [targets_SNX, logits_SNX] if terms.smoothing else [targets_SNX]
        if ceiling is not None:
            summed = [*summed, jnp.exp(logits_SNX - ceiling)]
            largest, target, *sum_, total = _largest_and_sums(logits_SNX, *summed)
            largest, total = jnp.maximum(seen.largest, largest), seen.total + total
        else:
            largest, total, target, *sum_ = _softmax_and_sums(logits_SNX, *summed)
            largest, total = _either((seen.largest, seen.total), (largest, total))
        return _Seen(largest, total, seen.target + target, None if seen.sum is None else seen.sum + sum_[0])

    V = parts.head_SPV.shape[2]
    none = jnp.zeros((len(parts.head_SPV), len(tokens.hidden_ND)))
    seen = _Seen(none + _LOWEST, none, none, none if terms.smoothing else None)
    pieces = V // parts.size
    seen = jax.lax.fori_loop(0, pieces, lambda i, seen: look(seen, i * parts.size, parts.size), seen)
    rest = V - pieces * parts.size
    return look(seen, V - rest, rest) if rest else seen


def _largest_and_sums(x: jax.Array, *summed: jax.Array) -> tuple[jax.Array, ...]:
    """The largest of x along its last dimension, and the sums of other arrays, in one operation.

    A TPU fuses only one operation with a product as it leaves the matrix unit; with several, the first writes the whole
    product to memory for the others.
    """

    def both(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return jnp.maximum(a[0], b[0]), *(item + other for item, other in zip(a[1:], b[1:], strict=True))

    start = (jnp.float32(_LOWEST), *(jnp.float32(0.0) for _ in summed))
    return tuple(jax.lax.reduce((x, *summed), start, both, (x.ndim - 1,)))


def _softmax_and_sums(x: jax.Array, *summed: jax.Array) -> tuple[jax.Array, ...]:
    """Like `_largest_and_sums`; the second result is the sum of exp(x - largest)."""

    def both(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return *_either((a[0], a[1]), (b[0], b[1])), *(item + other for item, other in zip(a[2:], b[2:], strict=True))

    start = (jnp.float32(_LOWEST), *(jnp.float32(0.0) for _ in summed), jnp.float32(0.0))
    return tuple(jax.lax.reduce((x, jnp.ones_like(x), *summed), start, both, (x.ndim - 1,)))


def _either(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The largest value and the sum of exp(value - largest) of two sets of values together."""
    largest = jnp.maximum(a[0], b[0])
    return largest, a[1] * jnp.exp(a[0] - largest) + b[1] * jnp.exp(b[0] - largest)


def _sums(seen: _Seen, tokens: _Tokens, V: int, terms: Terms, ceiling: float | None) -> tuple[jax.Array, jax.Array]:
    """The first LossSums [4 or 5], and the log of each token's normaliser [N]."""
    largest = jnp.max(seen.largest, axis=0)
    if ceiling is None:
        log_z = jnp.log(jnp.sum(seen.total * jnp.exp(seen.largest - largest), axis=0)) + largest
    else:
        log_z = jnp.log(jnp.sum(seen.total, axis=0)) + ceiling
    target = jnp.sum(seen.target, axis=0)
    columns = [
        log_z - target,
        jnp.square(log_z),
        (target >= largest).astype(jnp.float32),
        jnp.ones_like(tokens.weights_N),
    ]
    if seen.sum is not None:
        low = terms.others(V)
        less = terms.smoothing + low  # the target loses this probability; every id gets `low`
        columns.append(less * target - low * jnp.sum(seen.sum, axis=0) - terms.entropy(V))
    return jnp.stack([jnp.sum(column * tokens.weights_N) for column in columns]), log_z


def _gradients(
    tokens: _Tokens, parts: _Parts, log_z_N: jax.Array, layout: Layout, terms: Terms
) -> tuple[jax.Array, jax.Array]:
    """The second pass: gradients of the hidden states [N, all of D] and of the shard's part of the head [D, S, V]."""
    (S, _, V), (hidden_ND, targets_N, weights_N) = parts.head_SPV.shape, tokens
    G, D = parts.head_shards, parts.own_D
    low = terms.others(S * V) if terms.smoothing else 0.0
    wanted_N1 = ((1.0 - terms.smoothing - low if terms.smoothing else 1.0) * weights_N)[:, None]
    scale_N1 = (weights_N * (1.0 + 2.0 * terms.z_loss * log_z_N))[:, None]

    def add(dhidden_SND: jax.Array, start: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array]:
        head_SDX, ids_S1X = parts.of(start, size)
        logits_SNX = parts.logits(hidden_ND, head_SDX, ids_S1X)
        dlogits_SNX = jnp.exp(logits_SNX - log_z_N[:, None]) * scale_N1
        dlogits_SNX = dlogits_SNX - jnp.where(targets_N[:, None] == ids_S1X, wanted_N1, 0.0)
        if terms.smoothing:
            dlogits_SNX = dlogits_SNX - low * weights_N[:, None]
        dlogits_SNX = parts.softmax.gradient(logits_SNX, dlogits_SNX, ids_S1X).astype(hidden_ND.dtype)
        dlogits_SNX, head_SDX, hidden = _operands(dlogits_SNX, head_SDX, hidden_ND)
        more_SND = jnp.einsum("SNX,SDX->SND", dlogits_SNX, head_SDX, preferred_element_type=jnp.float32)
        dhead_SDX = jax.vmap(lambda of_shard: dot(hidden, of_shard, 0, 0))(dlogits_SNX)
        dhead_GDSX = jnp.moveaxis(dhead_SDX.reshape(S, G, D, size), 0, 2)
        return dhidden_SND + more_SND, layout.reduced(dhead_GDSX)

    # Separate for each shard of the vocabulary, so that their sum is sent once, not for every part.
    dhidden_SND, pieces = jnp.zeros((S, *hidden_ND.shape)), V // parts.size
    dhidden_SND, found_PDSX = jax.lax.scan(
        lambda dhidden, index: add(dhidden, index * parts.size, parts.size), dhidden_SND, jnp.arange(pieces)
    )
    found_DSV = [jnp.moveaxis(found_PDSX, 0, 2).reshape(D, S, pieces * parts.size)]
    if rest := V - pieces * parts.size:
        dhidden_SND, last = add(dhidden_SND, V - rest, rest)
        found_DSV.append(last)
    return jnp.sum(dhidden_SND, axis=0).astype(hidden_ND.dtype), jnp.concatenate(found_DSV, axis=2)


def _operands(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The operands of a product in float32; XLA's CPU back end has no such batched product of bfloat16."""
    return tuple(x.astype(jnp.float32) for x in arrays) if sharding.platform() == "cpu" else arrays


def _gathered(head_VD: jax.Array, dtype: jnp.dtype, layout: Layout) -> jax.Array:
    """The whole head [S, P, V], as in `_Parts`.

    Zeros fill each shard of D up to whole rows of a TPU's registers: without them concatenating the shards would copy
    the whole head. Each part drops the zeros when it is sliced.
    """
    (V, D), S = head_VD.shape, layout.vocab_shards
    missing = -D % _SUBLANES.get(sharding.platform(), 1) if layout.head_axes else 0
    head_PV = jnp.pad(head_VD.astype(dtype).T, ((0, missing), (0, 0)))
    if layout.head_axes:
        head_PV = jax.lax.all_gather(head_PV, layout.head_axes, tiled=True)
    return jnp.moveaxis(head_PV.reshape(-1, S, V // S), 1, 0)


def part_ids(N: int, D: int, device_kind: str) -> int:
    """The most ids of a part, for N tokens of width D, on a kind of device as sharding.device_kind() returns it.

    Parts that leave the float32 gradient of the hidden states, which every part adds to, on the chip take fewer cycles
    than larger ones, unless they are too small to keep the matrix unit busy. Compiled losses, in ms, by MiB of a part
    (libtpu 0.0.42.1, 29 November 2026):

    | chip | vocabulary, width, tokens | 32 | 64 | 128 | 256 |
    |---|---|---|---|---|---|
    | v5e | 49,152, 576, 32,768 | 82.9 | 58.6 | 58.1 | 52.7 |
    | v5e | 128,256, 2048, 16,384 | | 216 | 258 | 255 |
    | v5e | 151,936, 1024, 16,384 | 141 | | 135 | 142 |
    | v6e | 128,256, 4096, 16,384 | 237 | 144 | 151 | 132 |
    | v6e | 151,936, 1024, 16,384 | 55.4 | 42.9 | 39.4 | |
    | v6e | 151,936, 2048, 16,384 | | 77.2 | 76.3 | 86.4 |
    | v6e | 151,936, 4096, 4,096 | 45.2 | 38.1 | 39.3 | |
    | v6e | 262,144, 1152, 16,384 | 112 | 82.0 | 73.7 | 81.1 |
    """
    most = _PART_BYTES_OF.get(device_kind, PART_BYTES) // (4 * max(N, D))
    return on_chip_ids(N, D, device_kind) or max(most, _FEWEST)


def on_chip_ids(N: int, D: int, device_kind: str) -> int:
    """As `part_ids`, of parts that leave the gradient of the hidden states on the chip; 0: it goes through HBM for each part."""
    id_bytes = 4 * max(N, D)
    left = min(_ON_CHIP_PART_BYTES, _ON_CHIP_BYTES.get(device_kind, 0) - 4 * N * D)
    return left // id_bytes if left >= max(_ON_CHIP_PART_BYTES // 2, _FEWEST_ON_CHIP * id_bytes) else 0


def _part_size(ids: int, most: int) -> int:
    """The number of ids in a part: a multiple of a register's lanes, which divides all ids where one nearly fits."""
    if ids <= most:
        return ids
    lanes = max(1, most // LANES)
    whole = ids // LANES if ids % LANES == 0 else 0
    fitting = next((n for n in range(lanes, lanes // 2, -1) if whole % n == 0), lanes) if whole else lanes
    return min(ids, fitting * LANES)
