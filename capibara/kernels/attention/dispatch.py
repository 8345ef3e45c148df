"""Chooses the attention back end by platform and shape, or uses the one that the user set."""

from __future__ import annotations

import enum

import jax
from jax.ad_checkpoint import checkpoint_name

from capibara import sharding
from capibara.core.types import UserError
from capibara.kernels.attention import blockwise, cudnn, reference, streaming
from capibara.kernels.attention.signature import AttentionInputs, AttentionKernel
from capibara.kernels.attention.spec import AttentionSpec


class AttentionBackend(enum.StrEnum):
    """Back ends of attention; their results agree.

    auto: splash on TPU, cudnn on GPU, blockwise on CPU, each if it supports the layer, else xla. splash: the Pallas
    kernel; cudnn: NVIDIA's fused kernel; blockwise: by blocks of queries, saves no [T, T] array; xla: the reference.
    """

    AUTO = "auto"
    SPLASH = "splash"
    CUDNN = "cudnn"
    BLOCKWISE = "blockwise"
    XLA = "xla"


# The fastest back end of each platform; and the only platform of those that run on one.
_BEST = {
    "tpu": AttentionBackend.SPLASH,
    "gpu": AttentionBackend.CUDNN,
    "cpu": AttentionBackend.BLOCKWISE,
}
_PLATFORM = {AttentionBackend.SPLASH: "tpu", AttentionBackend.CUDNN: "gpu"}


def attend(
    inputs: AttentionInputs, spec: AttentionSpec, backend: AttentionBackend = AttentionBackend.AUTO
) -> jax.Array:
    """`softmax(scores) v` by the fastest back end for the platform and shape; softmax in float32.

    Args:
      inputs: queries, keys, values and masks.
      spec: mask, scale and soft cap of the scores.
      backend: which back end to use.

    Returns:
      [B, T, N, H] in the queries' dtype; named "attention" for checkpoint policies, as is what the kernel saves.

    Raises:
      UserError: the back end that the user set cannot compute this on this platform.
    """
    if spec.sink_tokens and backend is not AttentionBackend.XLA:  # the fused kernels have no sink tokens
        way = reference if streaming.unsupported_reason(inputs, spec) else streaming
        return checkpoint_name(way.attend(inputs, spec), "attention")
    chosen = _chosen(inputs, spec, backend)
    y_BTNH = _kernel(chosen).attend(inputs, spec)
    # Splash names its own output, in the kernel's layout: naming this one would save both.
    return y_BTNH if chosen is AttentionBackend.SPLASH else checkpoint_name(y_BTNH, "attention")


def _chosen(inputs: AttentionInputs, spec: AttentionSpec, backend: AttentionBackend) -> AttentionBackend:
    """The back end for AUTO; any other is only checked, so that none runs what it does not support."""
    platform = sharding.platform()
    best = _BEST.get(platform, AttentionBackend.BLOCKWISE)
    if inputs.sinks_N is not None and best is AttentionBackend.CUDNN:
        best = AttentionBackend.BLOCKWISE
    chosen = best if backend is AttentionBackend.AUTO else backend
    if _PLATFORM.get(chosen, platform) != platform:
        unsupported_reason: str | None = f"runs on {_PLATFORM[chosen].upper()} only, not on {platform.upper()}"
    else:
        unsupported_reason = _kernel(chosen).unsupported_reason(inputs, spec)
    if unsupported_reason is None:
        return chosen
    if backend is AttentionBackend.AUTO:
        return AttentionBackend.XLA
    raise UserError(f"attention is {str(backend)!r}, which {unsupported_reason}: set 'auto'")


def _kernel(backend: AttentionBackend) -> AttentionKernel:
    match backend:
        case AttentionBackend.SPLASH:
            from capibara.kernels.attention import splash  # importing Pallas takes a second

            return splash
        case AttentionBackend.CUDNN:
            return cudnn
        case AttentionBackend.BLOCKWISE:
            return blockwise
    return reference
