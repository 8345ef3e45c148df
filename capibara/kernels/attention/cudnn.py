"""Attention on NVIDIA GPUs by cuDNN's fused flash attention, through JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.attention.signature import AttentionInputs, cut_rows, plain_alone
from capibara.kernels.attention.spec import AttentionSpec

# cuDNN takes heads to 256 on Hopper and later, to 128 on any GPU with flash attention (compute capability 8.0).
_WIDEST_HEAD = 128


def objection(inputs: AttentionInputs, spec: AttentionSpec) -> str | None:
    """As signature.AttentionKernel says: 16-bit floats, heads that are multiples of 8, no cap, no bias of scores.

    The mask of the segments makes lengths even; a window needs a causal mask.
    """
    if found := plain_alone(inputs) or cut_rows(inputs):
        return found
    if inputs.sinks_N is not None:
        return "has no attention sinks"
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
    takes = "16-bit floats, head_dim up to 128 in eights, even lengths, as many keys as queries if causal"
    takes = f"{takes}, windows only if causal, no soft cap and no relative positions"
    return f"takes {takes}, not {inputs.described(spec)}"


def attend(inputs: AttentionInputs, spec: AttentionSpec, implementation: str = "cudnn") -> jax.Array:
    """As signature.AttentionKernel says.

    cuDNN skips what the causal mask and the window hide. Segments go in as a mask [B, 1, T, S], which it reads as a bias.
    `implementation` is jax.nn.dot_product_attention's: "xla" runs the same call anywhere.
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
