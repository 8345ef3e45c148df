"""Attention on NVIDIA GPUs by cuDNN's fused flash attention, called through JAX."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from capibara.kernels.attention.signature import AttentionInputs, needs_whole_rows, reference_only
from capibara.kernels.attention.spec import AttentionSpec

# cuDNN supports head sizes up to 256 on Hopper and later, up to 128 from compute capability 8.0 on.
_WIDEST_HEAD = 128


def unsupported_reason(inputs: AttentionInputs, spec: AttentionSpec) -> str | None:
    """See signature.AttentionKernel: it needs 16-bit floats and head sizes in multiples of 8, without cap and bias.

    The segment mask requires even lengths; a window requires a causal mask.
    """
    if result := reference_only(inputs) or needs_whole_rows(inputs):
        return result
    if inputs.sinks_N is not None:
        return "does not support attention sinks"
    T, S, H = inputs.q_BTNH.shape[1], inputs.k_BSKH.shape[1], inputs.q_BTNH.shape[-1]
    if (
        inputs.q_BTNH.dtype in (jnp.bfloat16, jnp.float16)
        and H % 8 == 0
        and H <= _WIDEST_HEAD
        and T % 2 == 0
        and S % 2 == 0
        and (T == S or not spec.causal)
        and (spec.causal or spec.window is None)
        and spec.soft_cap is None
        and inputs.bias_NTS is None
    ):
        return None
    takes = "16-bit floats, head_dim up to 128 in multiples of 8, even lengths, as many keys as queries if causal"
    takes = f"{takes}, windows only if causal, no soft cap and no relative positions"
    return f"takes {takes}, not {inputs.described(spec)}"


def attend(
    inputs: AttentionInputs, spec: AttentionSpec, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> jax.Array:
    """See signature.AttentionKernel.

    cuDNN skips blocks hidden by the causal mask and the window. Segments are passed as a mask [B, 1, T, S], which it
    reads as a bias. `implementation` is that of jax.nn.dot_product_attention: "xla" runs the same call on any platform.
    """
    return jax.nn.dot_product_attention(
        inputs.q_BTNH,
        inputs.k_BSKH,
        inputs.v_BSKH,
        mask=(inputs.q_segments_BT[:, :, None] == inputs.kv_segments_BS[:, None, :])[:, None],
        scale=spec.scale,
        is_causal=spec.causal,
        local_window_size=None if spec.window is None else (spec.window - 1, 0),
        implementation=implementation,
    )
