"""Attention on NVIDIA GPUs by cuDNN's fused flash attention, through JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.attention.spec import AttentionSpec

# cuDNN takes heads to 256 on Hopper and later, to 128 on any GPU with flash attention (compute capability 8.0).
_WIDEST_HEAD = 128


def supported(q_BTNH: jax.Array, k_BSKH: jax.Array, *, kind: AttentionSpec, bias_NTS: jax.Array | None = None) -> bool:
    """Whether cuDNN computes this attention: 16-bit floats, heads that are multiples of 8, no cap, no bias of scores.

    The mask of the segments makes lengths even; a window needs a causal mask.
    """
    T, S, H = q_BTNH.shape[1], k_BSKH.shape[1], q_BTNH.shape[-1]
    return (
        q_BTNH.dtype in (jnp.bfloat16, jnp.float16)
        and H % 8 == 0
        and H <= _WIDEST_HEAD
        and T % 2 == 0
        and S % 2 == 0
        and (T == S or not kind.causal)
        and (kind.causal or kind.window is None)
        and kind.soft_cap is None
        and bias_NTS is None
    )


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    kind: AttentionSpec,
    q_segments_BT: jax.Array,
    kv_segments_BS: jax.Array,
    implementation: str = "cudnn",
) -> jax.Array:
    """softmax(scores) v of rows in their own order; the arguments are those of attention.attend.

    cuDNN skips what the causal mask and the window hide. Segments go in as a mask [B, 1, T, S], which it reads as a bias.

    Args:
      q_BTNH, k_BSKH, v_BSKH: queries, keys and values; `supported` tells which.
      kind: mask and scale.
      q_segments_BT, kv_segments_BS: document numbers; a query sees only keys of its own number.
      implementation: jax.nn.dot_product_attention's; "xla" runs the same call anywhere.

    Returns:
      [B, T, N, H] in the dtype of the queries.
    """
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=(q_segments_BT[:, :, None] == kv_segments_BS[:, None, :])[:, None],
        scale=kind.scale,
        is_causal=kind.causal,
        local_window_size=None if kind.window is None else (kind.window - 1, 0),
        implementation=implementation,
    )
