"""Sends tokens to their experts and combines the experts' outputs, on one device or over an expert axis of the mesh.

These functions run on a device's own tokens, inside shard_map if there is a mesh. Shape letters: N tokens of the
device, k experts per token; M rows of expert inputs; G experts of the device, E of all devices; C rows per expert
(capacity).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.core import projections
from capibara.kernels import ragged_exchange
from capibara.kernels.grouped_matmul.dispatch import grouped_matmul, padded_rows, row_tile, weighs_inputs
from capibara.kernels.grouped_matmul.kernel import Transposed
from capibara.models.adapters.lora_experts import Factors, Rows, Weight, batched_matmul
from capibara.models.layers import layers
from capibara.models.layers.layers import ClampedSwiglu, Gating

# up, gate [G, D, F], down [G, F, D], up_bias, gate_bias [G, F] in the compute dtype; up_lora and so on: their adapters. As
# `for_gathering` lays them out: gate_up [G, D, 2F] in place of up and gate, with gate_up_bias [G, 2F].
Weights = Mapping[str, Weight | Transposed | Factors]


@dataclasses.dataclass(frozen=True)
class Axes:
    """The manual mesh axes over which tokens and weights are sharded; empty if not sharded.

    Attributes:
      batch, time: axes of the tokens.
      experts: axes of the experts. If these are also axes of the tokens, tokens are exchanged; else every device along
        them has all tokens.
      hidden: axes of the experts' hidden width.
    """

    batch: tuple[str, ...] = ()
    time: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def tokens_travel(self) -> bool:
        return bool(self.experts) and set(self.experts) <= set(self.batch)

    @property
    def partial(self) -> tuple[str, ...]:
        """Axes over which the devices' outputs must be summed."""
        return self.hidden if self.tokens_travel else (*self.experts, *self.hidden)


class Layout(NamedTuple):
    """Which expert row holds which choice.

    Attributes:
      choice: [M] the choice (token * k + rank) in each row; N * k: empty.
      row: [N, k] the row of each choice; M: none.
    """

    choice: jax.Array
    row: jax.Array


@jax.custom_vjp
def to_rows(x_ND: jax.Array, layout: Layout) -> jax.Array:
    """Gathers the token of each row, [M, D]; of empty rows any token."""
    return _take(x_ND, layout.choice // layout.row.shape[1])


def _to_rows_forward(x_ND: jax.Array, layout: Layout) -> tuple[jax.Array, Layout]:
    return to_rows(x_ND, layout), layout


def _to_rows_backward(layout: Layout, dx_MD: jax.Array) -> tuple[jax.Array, None]:
    # Both directions gather: XLA scatters a row at a time on CPU, and on TPU it sorts first.
    return from_rows(dx_MD, layout), None


to_rows.defvjp(_to_rows_forward, _to_rows_backward)


@jax.custom_vjp
def from_rows(y_MD: jax.Array, layout: Layout) -> jax.Array:
    """Sums each token's rows, [N, D]; empty rows are never read."""
    return jnp.sum(_of_choices(y_MD, layout), axis=1).astype(y_MD.dtype)


def _from_rows_forward(y_MD: jax.Array, layout: Layout) -> tuple[jax.Array, Layout]:
    return from_rows(y_MD, layout), layout


def _from_rows_backward(layout: Layout, dy_ND: jax.Array) -> tuple[jax.Array, None]:
    return to_rows(dy_ND, layout), None


from_rows.defvjp(_from_rows_forward, _from_rows_backward)


def gates_of_rows(gates_Nk: jax.Array, layout: Layout) -> jax.Array:
    """The gate of each row, [M, 1]; 0 in empty rows, which then get no gradient."""
    gates_M1 = to_rows(gates_Nk.reshape(-1, 1), Layout(layout.choice, layout.row.reshape(-1, 1)))
    return jnp.where((layout.choice < gates_Nk.size)[:, None], gates_M1, 0.0)


def _of_choices(y_MD: jax.Array, layout: Layout) -> jax.Array:
    """The row of each choice, [N, k, D] in float32; 0 where it has none."""
    y_NkD = _take(y_MD, layout.row).astype(jnp.float32)
    # A selection, not a factor: rows after the last group are undefined, and 0 times infinity is not 0.
    return jnp.where((layout.row < len(y_MD))[..., None], y_NkD, 0.0)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], or the last one where the index is past the end; on TPU a gather that fills is another pass."""
    return x.at[index].get(mode="clip")


def _take_or_0(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], or 0 where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def sorted_by_expert(experts_Nk: jax.Array, num_experts: int, rows: int) -> tuple[Layout, jax.Array]:
    """The layout that groups rows by expert, and the number of rows of each expert [num_experts].

    Args:
      experts_Nk: the chosen experts; num_experts or more: none.
      num_experts: number of groups.
      rows: M, at least the number of choices that have an expert.
    """
    flat = experts_Nk.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row = jnp.argsort(order).astype(jnp.int32)
    sizes = jnp.sum((flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)).astype(jnp.int32), axis=0)
    filled = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(sizes)
    order = jnp.pad(order, (0, max(0, rows - len(order))))[:rows]
    choice = jnp.where(filled, order, len(flat))
    return Layout(choice, jnp.where(flat < num_experts, row, rows).reshape(experts_Nk.shape)), sizes


def for_gathering(weights: Weights) -> dict[str, Weight | Transposed | Factors]:
    """The weights as a TPU gathers them along D, and multiplies rows by them; frozen ones and those with adapters as they are.

    Gate and up lie side by side: one product reads the rows, and their gradient is no sum of two. Down lies with its outputs
    first: what is gathered along the last dimension is copied once more. Compiled for Qwen3 30B-A3B on v6e-64.
    """
    up, gate, down = (weights.get(item.name) for item in projections.EXPERTS)
    if any(isinstance(weight, Factors) for weight in weights.values()) or not isinstance(down, jax.Array):
        return dict(weights)
    result: dict[str, Weight | Transposed | Factors] = {**weights, "down": Transposed(jnp.swapaxes(down, 1, 2))}
    if isinstance(gate, jax.Array) and isinstance(up, jax.Array):
        del result["gate"], result["up"]
        result["gate_up"] = jnp.concatenate([gate, up], axis=2)
        if isinstance(up_bias := result.pop("up_bias", None), jax.Array):
            gate_bias = result.pop("gate_bias", jnp.zeros_like(up_bias))  # only MoeBias.ALL has one
            assert isinstance(gate_bias, jax.Array)
            result["gate_up_bias"] = jnp.concatenate([gate_bias, up_bias], axis=1)
    return result


def mlp(x: jax.Array, gates: jax.Array, weights: Weights, activation: Gating, rows: Rows, axes: Axes) -> jax.Array:
    """Runs the experts' MLPs, weighted.

    On TPU the gates are factors of the hidden units, in a pass that is there anyway: their gradients do not need the results,
    so that a recomputed layer has a product less. A CPU takes longer for the wider rows: there they are factors of the results.

    Args:
      x: rows of all experts.
      gates: float32, the gate of each row.
      weights: of the experts.
      activation: of the hidden layer.
      rows: how to multiply the rows.
      axes: of the mesh.
    """

    def dense(name: str, x: jax.Array) -> jax.Array:
        weight, adapter = weights[name], weights.get(f"{name}_lora")
        assert not isinstance(weight, Factors)
        y = rows.product(x, weight)
        if adapter is None:
            return y
        assert isinstance(adapter, Factors)
        shared = name == "down" and axes.hidden
        start = x.shape[-1] * jax.lax.axis_index(axes.hidden).astype(jnp.int32) if shared else 0
        return adapter(x, y, rows, start)

    def biased(name: str, x: jax.Array) -> jax.Array:
        y, bias = dense(name, x), weights.get(f"{name}_bias")
        if bias is None:
            return y
        assert isinstance(bias, jax.Array)
        return y + rows.of_experts(bias)

    if "gate_up" in weights:
        # One product makes both: what saves one of them saves both.
        gate_up = layers.named(layers.named(biased("gate_up", x), projections.EXPERT_GATE), projections.EXPERT_UP)
        return layers.named(dense("down", _weighted_gated(activation, gate_up, gates)), projections.EXPERT_DOWN)
    h = layers.named(biased("up", x), projections.EXPERT_UP)
    if isinstance(activation, ClampedSwiglu) or activation.gated:
        h = activation.gate(layers.named(biased("gate", x), projections.EXPERT_GATE), h)
    else:
        h = activation(h)
    weighted = lambda rows: (rows.astype(jnp.float32) * gates).astype(rows.dtype)  # noqa: E731
    of_hidden = weighs_inputs()
    y = layers.named(dense("down", weighted(h) if of_hidden else h), projections.EXPERT_DOWN)
    return y if of_hidden else weighted(y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_gated(activation: Gating, gate_up: jax.Array, gates: jax.Array) -> jax.Array:
    """The hidden units [M, F] of gate and up side by side [M, 2F], weighted by the gates [M, 1] of the rows."""
    h = activation.gate(*jnp.split(gate_up, 2, axis=-1))
    return (h.astype(jnp.float32) * gates).astype(h.dtype)


def _weighted_gated_forward(
    activation: Gating, gate_up: jax.Array, gates: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _weighted_gated(activation, gate_up, gates), (gate_up, gates)


def _weighted_gated_backward(
    activation: Gating, residuals: tuple[jax.Array, jax.Array], upstream: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # In float32 until both gradients lie side by side: of narrower ones XLA stores each, and a copy of both (Mixtral's units, libtpu
    # 0.0.50.1: 0.71 of the cycles and of the bytes).
    gate_up, gates = residuals
    gate, up = (half.astype(jnp.float32) for half in jnp.split(gate_up, 2, axis=-1))

    def weighted(gate: jax.Array, up: jax.Array, gates: jax.Array) -> jax.Array:
        h = activation.gate(gate, up) if isinstance(activation, ClampedSwiglu) else activation(gate) * up
        return h * gates

    of_gate, of_up, of_gates = jax.vjp(weighted, gate, up, gates)[1](upstream.astype(jnp.float32))
    return jnp.concatenate([of_gate, of_up], axis=-1).astype(gate_up.dtype), of_gates


_weighted_gated.defvjp(_weighted_gated_forward, _weighted_gated_backward)


def _grouped_mlp(
    x_MD: jax.Array, gates_M1: jax.Array, tokens_M1: jax.Array | None, sizes_G: jax.Array, tile: int,
    weights: Weights, activation: Gating, axes: Axes,
) -> jax.Array:  # fmt: skip
    ends, row = jnp.cumsum(sizes_G), jnp.arange(len(x_MD), dtype=jnp.int32)[:, None]

    def of_experts(values_GN: jax.Array) -> jax.Array:
        # A product, not a lookup, so that its gradient is a product too.
        return ((row >= ends - sizes_G) & (row < ends)).astype(values_GN.dtype) @ values_GN

    product = lambda x, w: grouped_matmul(x, w, sizes_G, tile)  # noqa: E731
    return mlp(x_MD, gates_M1, weights, activation, Rows(product, of_experts, row < ends[-1], tokens_M1), axes)


def _count(weights: Weights) -> int:
    """G."""
    return jax.tree.leaves(weights["down"])[0].shape[0]


def dropless(
    x_ND: jax.Array, experts_Nk: jax.Array, gates_Nk: jax.Array,
    weights: Weights, activation: Gating, axes: Axes, tokens_N1: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Sends every token to all of its experts, without a capacity.

    Over an expert axis there are two ways with equal results: a ragged all-to-all exchanges the tokens (k rows per
    token), or all devices of the axis gather all tokens and sum their experts' outputs (one row per token and device).

    Args:
      x_ND: tokens of this device.
      experts_Nk: chosen experts, of E; E: none.
      gates_Nk: float32.
      weights: of this device's experts; E is their number times the size of the expert axis.
      activation: of the experts.
      axes: of the mesh.
      tokens_N1: int32, the tokens' numbers among those of all devices; None: adapters have no dropout.

    Returns:
      [N, D], to be summed over `axes.partial`.
    """
    G, k = _count(weights), experts_Nk.shape[1]
    parts = jax.lax.axis_size(axes.experts) if axes.experts else 1
    if axes.tokens_travel and k < parts and ragged_exchange.supported():
        return _exchanged(x_ND, experts_Nk, gates_Nk, weights, activation, axes, tokens_N1)
    if axes.tokens_travel:
        x_ND, experts_Nk, gates_Nk, tokens_N1 = jax.tree.map(
            lambda a: jax.lax.all_gather(a, axes.experts, tiled=True), (x_ND, experts_Nk, gates_Nk, tokens_N1)
        )
    if axes.experts:
        experts_Nk = experts_Nk - G * jax.lax.axis_index(axes.experts).astype(jnp.int32)
        experts_Nk = jnp.where((experts_Nk >= 0) & (experts_Nk < G), experts_Nk, G)
    N = len(x_ND)
    tile = row_tile(N * k // parts, G)
    layout, sizes_G = sorted_by_expert(experts_Nk, G, padded_rows(N * min(k, G), tile))
    tokens_M1 = None if tokens_N1 is None else _take(tokens_N1, layout.choice // k)
    x_MD, gates_M1 = to_rows(x_ND, layout), gates_of_rows(gates_Nk, layout)
    y_MD = _grouped_mlp(x_MD, gates_M1, tokens_M1, sizes_G, tile, weights, activation, axes)
    y_ND = from_rows(y_MD, layout)
    return jax.lax.psum_scatter(y_ND, axes.experts, tiled=True) if axes.tokens_travel else y_ND


def _exchanged(
    x_ND: jax.Array, experts_Nk: jax.Array, gates_Nk: jax.Array,
    weights: Weights, activation: Gating, axes: Axes, tokens_N1: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """`dropless` by ragged all-to-all: sends rows, sorted by expert, to the experts' devices and outputs back."""
    (N, k), G, axis = experts_Nk.shape, _count(weights), axes.experts
    parts, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    layout, sizes_E = sorted_by_expert(experts_Nk, parts * G, N * k)
    sizes_SPG = jax.lax.all_gather(sizes_E, axis).reshape(parts, parts, G)  # sender, receiver, expert
    sizes_SP = jnp.sum(sizes_SPG, axis=-1)
    before_SP = jnp.cumsum(sizes_SP, axis=0) - sizes_SP  # offset of a sender's rows at the receiver
    starts_SP = jnp.cumsum(sizes_SP, axis=1) - sizes_SP  # offset of a receiver's rows at the sender
    tile = row_tile(N * k, G)
    R = padded_rows(parts * N * min(k, G), tile)

    def sent(rows: jax.Array) -> jax.Array:
        return ragged_exchange.exchanged(rows, R, starts_SP[me], sizes_SP[me], before_SP[me], sizes_SP[:, me], axis)

    received_RD, sent_gates_R1 = sent(to_rows(x_ND, layout)), sent(gates_of_rows(gates_Nk, layout))
    # Received rows are sorted by sender, then by expert; group them by expert.
    ends = jnp.cumsum(sizes_SPG[:, me].reshape(-1))
    piece_R = jnp.sum((jnp.arange(R, dtype=jnp.int32)[:, None] >= ends).astype(jnp.int32), axis=1)
    expert_R = jnp.where(piece_R < parts * G, piece_R % G, G)
    by_expert, sizes_G = sorted_by_expert(expert_R[:, None], G, R)
    tokens_R1 = None if tokens_N1 is None else _take(sent(_take(tokens_N1, layout.choice // k)), by_expert.choice)
    x_RD, gates_R1 = to_rows(received_RD, by_expert), to_rows(sent_gates_R1, by_expert)
    y_RD = _grouped_mlp(x_RD, gates_R1, tokens_R1, sizes_G, tile, weights, activation, axes)
    back = Layout(by_expert.row[:, 0], by_expert.choice[:, None])
    y_MD = ragged_exchange.exchanged(
        to_rows(y_RD, back), N * k, before_SP[:, me], sizes_SP[:, me], starts_SP[:, me], sizes_SP[me], axis
    )
    return from_rows(y_MD, layout)


def with_capacity(
    x_BTD: jax.Array, experts_BTk: jax.Array, positions_BTk: jax.Array, gates_BTk: jax.Array,
    weights: Weights, activation: Gating, capacity: int, axes: Axes, tokens_BT1: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Sends tokens to those of their experts that have capacity left.

    Args:
      x_BTD: tokens of this device.
      experts_BTk: chosen experts, of E; E: none.
      positions_BTk: position of each choice among those of the same expert and row on all devices; choices at
        `capacity` or later are dropped.
      gates_BTk: float32.
      weights, activation, axes: as in `dropless`.
      capacity: C.
      tokens_BT1: as in `dropless`.

    Returns:
      [B, T, D], to be summed over `axes.partial`.
    """
    B, T, k = experts_BTk.shape
    E, C = _buffer(weights, capacity, axes)
    M = B * E * C
    first_B11 = jnp.arange(B, dtype=jnp.int32)[:, None, None] * (E * C)
    retained = (experts_BTk < E) & (positions_BTk < capacity)
    row = jnp.where(retained, first_B11 + experts_BTk * C + positions_BTk, M).reshape(-1, k)
    every = jnp.arange(B * T * k, dtype=jnp.int32)
    choice = jnp.full(M, B * T * k, jnp.int32).at[row.reshape(-1)].set(every, mode="drop")
    layout = Layout(choice, row)
    # Along time axes the devices' rows are summed, and so are the gradients of their results.
    ours = lambda rows_MD: jnp.where((choice < B * T * k)[:, None], rows_MD, 0) if axes.time else rows_MD  # noqa: E731
    x_MD = ours(to_rows(x_BTD.reshape(B * T, -1), layout))
    tokens_M1 = None if tokens_BT1 is None else _take_or_0(tokens_BT1.reshape(-1, 1), choice // k)
    gates_M1 = gates_of_rows(gates_BTk.reshape(-1, k), layout)
    y_MD = _buffered((x_MD, gates_M1, tokens_M1), (B, E, C), weights, activation, axes).reshape(M, -1)
    return from_rows(ours(y_MD), layout).reshape(x_BTD.shape)


def by_expert_choice(
    x_BTD: jax.Array, tokens_BEC: jax.Array, gates_BEC: jax.Array,
    weights: Weights, activation: Gating, axes: Axes, tokens_BT1: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Sends each expert the tokens that it chose.

    Args:
      x_BTD: tokens of this device.
      tokens_BEC: positions of the chosen tokens in the rows of all devices; T or more: none.
      gates_BEC: float32.
      weights, activation, axes, tokens_BT1: as in `dropless`.

    Returns:
      [B, T, D], to be summed over `axes.partial`.
    """
    B, T, D = x_BTD.shape
    E, C = _buffer(weights, tokens_BEC.shape[2], axes)
    missing = [(0, 0), (0, 0), (0, C - tokens_BEC.shape[2])]
    if axes.time:
        tokens_BEC = tokens_BEC - T * jax.lax.axis_index(axes.time).astype(jnp.int32)
    here = (tokens_BEC >= 0) & (tokens_BEC < T)
    tokens_BEC = jnp.where(here, tokens_BEC + T * jnp.arange(B, dtype=jnp.int32)[:, None, None], B * T)
    tokens_M = jnp.pad(tokens_BEC, missing, constant_values=B * T).reshape(-1)
    x_MD = _take_or_0(x_BTD.reshape(-1, D), tokens_M)
    numbers_M1 = None if tokens_BT1 is None else _take_or_0(tokens_BT1.reshape(-1, 1), tokens_M)
    gates_M1 = jnp.pad(jnp.where(here, gates_BEC, 0.0), missing).reshape(-1, 1)
    y_MD = _buffered((x_MD, gates_M1, numbers_M1), (B, E, C), weights, activation, axes).reshape(-1, D)
    y_ND = jnp.zeros((B * T, D), jnp.float32).at[tokens_M].add(y_MD.astype(jnp.float32), mode="drop")
    return y_ND.astype(x_BTD.dtype).reshape(x_BTD.shape)


def _buffer(weights: Weights, capacity: int, axes: Axes) -> tuple[int, int]:
    """E, and the capacity rounded up to a multiple of the size of the time axes."""
    E = _count(weights) * (jax.lax.axis_size(axes.experts) if axes.experts else 1)
    shards = jax.lax.axis_size(axes.time) if axes.time else 1
    return E, -(-capacity // shards) * shards


def _buffered(
    rows: tuple[jax.Array, jax.Array, jax.Array | None], shape: tuple[int, int, int],
    weights: Weights, activation: Gating, axes: Axes,
) -> jax.Array:  # fmt: skip
    """Runs buffered rows through their experts; returns those of the device's own tokens.

    Args:
      rows: [M, D], [M, 1] their gates, and [M, 1] the tokens' numbers or None.
      shape: [B, E, C] of the buffer.
      weights, activation, axes: as in `dropless`.
    """
    (B, E, C), G = shape, _count(weights)

    def to_experts(x_MD: jax.Array) -> jax.Array:
        x_BECD = x_MD.reshape(B, E, C, -1)
        if axes.time:  # each device has some of a row's tokens, and takes a part of the buffer
            x_BECD = jax.lax.psum_scatter(x_BECD, axes.time, scatter_dimension=2, tiled=True)
        if axes.tokens_travel:
            x_BECD = jax.lax.all_to_all(x_BECD, axes.experts, split_axis=1, concat_axis=0, tiled=True)
        elif axes.experts:
            x_BECD = jax.lax.dynamic_slice_in_dim(x_BECD, G * jax.lax.axis_index(axes.experts), G, axis=1)
        return jnp.swapaxes(x_BECD, 0, 1).reshape(G, -1, x_BECD.shape[-1])

    x_GMD, gates_GM1, tokens_GM1 = jax.tree.map(to_experts, rows)

    def product(x_GMD: jax.Array, w_GDF: Weight | Transposed) -> jax.Array:
        assert not isinstance(w_GDF, Transposed), "weights are laid out for grouped products alone"
        if not isinstance(w_GDF, jax.Array):
            return batched_matmul(x_GMD, w_GDF)
        return jnp.einsum("GMD,GDF->GMF", x_GMD, w_GDF)

    of_experts = lambda values_GN: values_GN[:, None]  # noqa: E731
    y_GMD = mlp(x_GMD, gates_GM1, weights, activation, Rows(product, of_experts, True, tokens_GM1), axes)
    here = C // (jax.lax.axis_size(axes.time) if axes.time else 1)
    y_BECD = jnp.swapaxes(y_GMD.reshape(G, -1, here, y_GMD.shape[-1]), 0, 1)
    if axes.tokens_travel:
        y_BECD = jax.lax.all_to_all(y_BECD, axes.experts, split_axis=0, concat_axis=1, tiled=True)
    elif axes.experts:
        others = jnp.zeros((len(y_BECD), E, here, y_BECD.shape[-1]), y_BECD.dtype)
        y_BECD = jax.lax.dynamic_update_slice_in_dim(others, y_BECD, G * jax.lax.axis_index(axes.experts), axis=1)
    return jax.lax.all_gather(y_BECD, axes.time, axis=2, tiled=True) if axes.time else y_BECD
