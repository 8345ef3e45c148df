"""Attention on TPU by JAX's Pallas kernel "splash" (sparse flash attention), on one device or under a mesh.

The kernel does not load blocks of keys that are masked for a whole block of queries. Scores stay in the chip's vector
memory; the backward pass recomputes them from the normalisers (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.kernels.attention.signature import AttentionInputs, reference_only
from capibara.kernels.attention.spec import AttentionSpec

Kernel = kernel_lib.SplashAttentionKernel
# A multiple of the 128 lanes of a vector register; rows are padded to it.
_LANES = 128
# No token has this segment id: padding sees only padding, so that its softmax has a finite sum too.
_PADDING_SEGMENT = -1
# Largest blocks, in tokens: with 512 the kernels fit the 16 MiB of scoped vector memory of a v5e, with 1024 the 32 MiB
# of a v6e, at head_dim 256 in float32 too (tests/kernels/attention/test_splash.py compiles them).
_BLOCK = {"TPU v5 lite": 512, "TPU v5e": 512}
_DEFAULT_BLOCK = 1024
_COMPUTE_BLOCK = 512
_WIDEST_HEAD = 256
# The name by which a checkpoint policy can save the kernel's output and normalisers.
_RESIDUALS = "attention"


def unsupported_reason(inputs: AttentionInputs, spec: AttentionSpec) -> str | None:
    """See signature.AttentionKernel: no bias, a head size that fits the kernel, and a visible key for every query.

    A causal row with fewer keys than queries (S < T) would have an empty softmax.
    """
    if result := reference_only(inputs):
        return result
    (T, H), S = inputs.q_BTNH.shape[1::2], inputs.k_BSKH.shape[1]
    positional = spec.causal or spec.window is not None
    if inputs.bias_NTS is None and H <= _WIDEST_HEAD and T > 0 and (T == S or not positional):
        return None
    takes = "head_dim up to 256, no relative positions, as many keys as queries if causal or windowed"
    return f"takes {takes}, not {inputs.described(spec)}"


def attend(inputs: AttentionInputs, spec: AttentionSpec, interpret: bool = False) -> jax.Array:
    """See signature.AttentionKernel. Takes global arrays, sharded over the mesh of `sharding.active()` if there is one.

    Rows are sharded as the rules for "batch" say, heads and sinks along "act_heads", queries along "act_time"; each
    context shard gathers all keys and values. Row positions that are traced arrays are assumed to be those of
    sharding.balanced; others are read at trace time. `interpret` runs the kernel in Pallas's interpreter, on any
    platform.
    """
    if (active := sharding.active()) is None:
        return _on_one_device(inputs, spec, interpret)
    return _on_mesh(*active, inputs, spec, interpret)


def _on_one_device(inputs: AttentionInputs, spec: AttentionSpec, interpret: bool) -> jax.Array:
    q_BTNH, *of_keys = inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH, inputs.kv_segments_BS
    if inputs.kv_row_positions_S is not None:
        of_keys = [in_order(x, np.asarray(inputs.kv_row_positions_S)) for x in of_keys]
    k_BSKH, v_BSKH, kv_segments_BS = of_keys
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    row_positions_T = np.arange(T) if inputs.q_row_positions_T is None else np.asarray(inputs.q_row_positions_T)
    kernel = _kernel(spec, row_positions_T, S, q_BTNH.shape[2], shards=1, interpret=interpret)
    return _run(kernel, spec, q_BTNH, k_BSKH, v_BSKH, inputs.q_segments_BT, kv_segments_BS, inputs.sinks_N)


def _on_mesh(
    mesh: sharding.ActiveMesh, rules: sharding.Rules, inputs: AttentionInputs, spec: AttentionSpec, interpret: bool
) -> jax.Array:
    q_BTNH, k_BSKH, v_BSKH = inputs[:3]
    (T, N), (S, K) = q_BTNH.shape[1:3], k_BSKH.shape[1:3]
    time_axes, head_axes = _axes(mesh, rules.act_time), _axes(mesh, rules.act_heads, N)
    time_shards, head_shards = _size(mesh, time_axes), _size(mesh, head_axes)
    q_row_positions_T, kv_row_positions_S = (
        _static(inputs.q_row_positions_T, T, time_shards),
        _static(inputs.kv_row_positions_S, S, time_shards),
    )
    if copies := head_shards // math.gcd(K, head_shards) - 1:
        # With fewer key/value heads than shards, each shard gets the heads that its queries use.
        k_BSKH, v_BSKH = (jnp.repeat(x, copies + 1, axis=2) for x in (k_BSKH, v_BSKH))
    if T % (time_shards * _LANES) or S % time_shards:
        time_axes, time_shards = (), 1  # padding would have to be inserted between the shards
    row_positions_T = np.arange(T) if q_row_positions_T is None else q_row_positions_T
    parts = 1 if _sees_all(spec, T, S) else time_shards
    kernel = _kernel(
        spec, row_positions_T[: T * parts // time_shards], S, N // head_shards, shards=parts, interpret=interpret
    )

    def local(
        kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array,
        sinks: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        if time_axes:
            k, v, kv_segments = (jax.lax.all_gather(x, time_axes, axis=1, tiled=True) for x in (k, v, kv_segments))
        if kv_row_positions_S is not None:
            k, v, kv_segments = (in_order(x, kv_row_positions_S) for x in (k, v, kv_segments))
        return _run(kernel, spec, q, k, v, q_segments, kv_segments, sinks)

    batch_axes = _axes(mesh, rules.batch, q_BTNH.shape[0])
    rows, heads = P(batch_axes, time_axes), P(batch_axes, time_axes, head_axes)
    # Inside another shard_map (of a pipeline), the mesh has manual axes already.
    outer = jax.sharding.get_abstract_mesh()
    on = outer if outer.manual_axes else mesh
    # Of the masks only the shards' shapes matter, which a mesh with manual axes cannot tell.
    plain = AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.axis_names))
    masks = kernel.manual_sharding_spec(NamedSharding(plain, P(None, time_axes if parts > 1 else ())))
    sharded = jax.shard_map(
        local,
        mesh=on,
        in_specs=(masks, heads, heads, heads, rows, rows, P(head_axes)),
        out_specs=heads,
        # All axes, those of size one too: the compiler cannot partition a kernel.
        axis_names=set(mesh.axis_names) - set(outer.manual_axes),
        check_vma=False,
    )
    return sharded(kernel, q_BTNH, k_BSKH, v_BSKH, inputs.q_segments_BT, inputs.kv_segments_BS, inputs.sinks_N)


def in_order(x_BS: jax.Array, row_positions_S: np.ndarray) -> jax.Array:
    """Puts columns (the second dimension) back in order, by slicing runs of consecutive columns instead of a gather."""
    starts = np.flatnonzero(np.diff(row_positions_S, prepend=row_positions_S[0] - 2) != 1)
    ends = np.append(starts[1:], len(row_positions_S))
    runs = sorted(zip(row_positions_S[starts], starts, ends))
    return jnp.concatenate([x_BS[:, start:end] for _, start, end in runs], axis=1) if len(runs) > 1 else x_BS


def block_sizes(T: int, S: int) -> kernel_lib.BlockSizes:
    """Block sizes for T queries and S keys (multiples of 128) on the target chip."""
    largest = _BLOCK.get(sharding.device_kind(), _DEFAULT_BLOCK)
    block_q, block_kv = _divisor(T, largest), _divisor(S, largest)
    compute = _divisor(block_kv, _COMPUTE_BLOCK)
    return kernel_lib.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=compute,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )


def _run(
    kernel: Kernel,
    spec: AttentionSpec,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    q_segments_BT: jax.Array,
    kv_segments_BS: jax.Array,
    sinks_N: jax.Array | None,
) -> jax.Array:
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    q_BTNH = (q_BTNH.astype(jnp.float32) * spec.scale).astype(q_BTNH.dtype)  # the kernel does not scale
    q, k, v = (_padded(jnp.swapaxes(x, 1, 2), 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    segments = kernel_lib.SegmentIds(*(_padded(x, 1, _PADDING_SEGMENT) for x in (q_segments_BT, kv_segments_BS)))
    y_BNTH = _with_early_normalisers(kernel, q, k, v, segments, sinks_N)
    return jnp.swapaxes(y_BNTH, 1, 2)[:, :T, :, :H]


@jax.custom_vjp
def _with_early_normalisers(
    kernel: Kernel,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    segments: kernel_lib.SegmentIds,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """Runs the kernel on each row, and reduces its saved normalisers right away.

    The kernel returns each normaliser 128 times, together as large as the queries in float32, and XLA would keep them
    until the backward pass. Tying one copy to the output makes XLA select it at once.
    """
    return _of_rows(kernel, segments, sinks_N)(q_BNTH, k_BKSH, v_BKSH)


def _of_rows(kernel: Kernel, segments: kernel_lib.SegmentIds, sinks_N: jax.Array | None) -> Callable[..., Any]:
    """The kernel, mapped over rows: a function of queries, keys and values that gives the output alone."""
    if sinks_N is None:
        return lambda q, k, v: jax.vmap(kernel)(q, k, v, segments)
    return lambda q, k, v: jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, segments, sinks_N)


def _early_forward(
    kernel: Kernel,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    segments: kernel_lib.SegmentIds,
    sinks_N: jax.Array | None,
) -> tuple[jax.Array, Any]:
    y_BNTH, pull = jax.vjp(_of_rows(kernel, segments, sinks_N), q_BNTH, k_BKSH, v_BKSH)
    leaves, tree = jax.tree.flatten(pull)
    indices = [n for n, x in enumerate(leaves) if x.dtype == jnp.float32 and x.shape == y_BNTH.shape[:3]]
    y_BNTH, *tied = jax.lax.optimization_barrier((y_BNTH, *(leaves[n] for n in indices)))
    for n, x in zip(indices, tied):
        leaves[n] = x
    of_sinks = None if sinks_N is None else (sinks_N, y_BNTH, tied[0])
    return y_BNTH, (jax.tree.unflatten(tree, leaves), of_sinks)


def _early_backward(saved: Any, dy_BNTH: jax.Array) -> tuple[jax.Array | None, ...]:
    pull, of_sinks = saved
    dsinks_N = None
    if of_sinks is not None:
        sinks_N, y_BNTH, log_z_BNT = of_sinks
        dsinks_N = _sinks_gradient(sinks_N, y_BNTH, log_z_BNT, dy_BNTH)
    return None, *pull(dy_BNTH), None, dsinks_N


def _sinks_gradient(sinks_N: jax.Array, y_BNTH: jax.Array, log_z_BNT: jax.Array, dy_BNTH: jax.Array) -> jax.Array:
    """In float32; the kernel would accumulate it in the queries' dtype."""
    inner_BNT = jnp.sum(y_BNTH.astype(jnp.float32) * dy_BNTH.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.exp(sinks_N[:, None] - log_z_BNT) * inner_BNT, axis=(0, 2))


_with_early_normalisers.defvjp(_early_forward, _early_backward)


def _padded(x: jax.Array, axis: int, value: int = 0) -> jax.Array:
    missing = -x.shape[axis] % _LANES
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=value)


def _kernel(
    spec: AttentionSpec, row_positions_T: np.ndarray, S: int, heads: int, *, shards: int, interpret: bool
) -> Kernel:
    """The kernel for `heads` query heads; its mask is split along the queries into `shards` parts."""
    T = len(row_positions_T)
    padded_T, padded_S = (-(-n // _LANES) * _LANES for n in (T, S))
    # Padding repeats the last position, so that the mask leaves it a visible key.
    row_positions_T = np.concatenate([row_positions_T, np.arange(T, padded_T)]).astype(np.int32)
    mask = _mask(spec, row_positions_T, padded_S)
    blocks = block_sizes(padded_T // shards, padded_S)
    return kernel_lib.make_splash_mha(
        mask=mask_lib.MultiHeadMask([mask] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=shards,
        attn_logits_soft_cap=spec.soft_cap,
        residual_checkpoint_name=_RESIDUALS,
        interpret=interpret,
    )


def _sees_all(spec: AttentionSpec, T: int, S: int) -> bool:
    """Whether nothing is masked: shards then share one mask, since JAX cannot split one without partial blocks."""
    return not spec.causal and (spec.window is None or spec.window >= max(T, S))


def _mask(spec: AttentionSpec, row_positions_T: np.ndarray, S: int) -> mask_lib.Mask:
    shape = (len(row_positions_T), S)
    if _sees_all(spec, len(row_positions_T), S):
        return mask_lib.FullMask(shape)
    if spec.window is not None:
        back = spec.window - 1
        mask: mask_lib.LocalMask | mask_lib.CausalMask = mask_lib.LocalMask(
            shape, window_size=(back, 0 if spec.causal else back), offset=0
        )
    else:
        mask = mask_lib.CausalMask(shape)
    mask.q_sequence = row_positions_T
    return mask


def _divisor(length: int, largest: int) -> int:
    """The largest multiple of 128 up to `largest` that divides the length."""
    return next(size for size in range(largest, 0, -_LANES) if length % size == 0)


def _static(row_positions: jax.Array | np.ndarray | None, length: int, shards: int) -> np.ndarray | None:
    """The row positions as a numpy array; those of a traced array are sharding.balanced's."""
    if row_positions is None:
        return None
    return sharding.zigzag(length, shards) if isinstance(row_positions, jax.core.Tracer) else np.asarray(row_positions)


def _axes(mesh: sharding.ActiveMesh, axes: tuple[str, ...], size: int | None = None) -> tuple[str, ...]:
    """The axes with more than one device; none if together they do not divide `size`."""
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return axes if size is None or size % _size(mesh, axes) == 0 else ()


def _size(mesh: sharding.ActiveMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
