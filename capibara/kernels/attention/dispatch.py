"""Who computes attention: the choice by platform and shape, or the back end that the user named."""

from __future__ import annotations

import enum

import jax
from jax.ad_checkpoint import checkpoint_name

from capibara import sharding
from capibara.core.types import UserError
from capibara.kernels.attention.signature import AttentionInputs, AttentionKernel
from capibara.kernels.attention.spec import AttentionSpec


class AttentionBackend(enum.StrEnum):
    """Who computes attention; the numbers agree.

    auto: splash on TPU, cudnn on GPU, blockwise on CPU, each where it supports the layer, else xla. splash: the Pallas
    kernel; cudnn: NVIDIA's fused kernel; blockwise: blocks of queries, nothing [T, T] kept; xla: the plain formula.
    """

    AUTO = "auto"
    SPLASH = "splash"
    CUDNN = "cudnn"
    BLOCKWISE = "blockwise"
    XLA = "xla"


# What is fastest where; and where else it does not run.
_BEST = {
    "tpu": AttentionBackend.SPLASH,
    "gpu": AttentionBackend.CUDNN,
    "cpu": AttentionBackend.BLOCKWISE,
}
_PLATFORM = {AttentionBackend.SPLASH: "tpu", AttentionBackend.CUDNN: "gpu"}


def attend(
    inputs: AttentionInputs, spec: AttentionSpec, backend: AttentionBackend = AttentionBackend.AUTO
) -> jax.Array:
    """`softmax(scores) v` by the way that is fastest for the platform and the shape; softmax in float32.

    Args:
      inputs: queries, keys, values and what hides some of them.
      spec: mask, scale and cap of the scores.
      backend: who computes it.

    Returns:
      [B, T, N, H] in the dtype of the queries; a checkpoint knows it, or what the kernel keeps of it, as "attention".

    Raises:
      UserError: the named back end cannot compute this on this platform.
    """
    chosen = _chosen(inputs, spec, backend)
    y_BTNH = _kernel(chosen).attend(inputs, spec)
    # Splash names its own output, in the kernel's layout: this one would be kept beside that.
    return y_BTNH if chosen is AttentionBackend.SPLASH else checkpoint_name(y_BTNH, "attention")


def _chosen(inputs: AttentionInputs, spec: AttentionSpec, backend: AttentionBackend) -> AttentionBackend:
    """The back end for AUTO; one that the user named is only checked, so that none computes what it cannot."""
    platform = sharding.platform()
    best = _BEST.get(platform, AttentionBackend.BLOCKWISE)
    if inputs.sinks_N is not None and best is AttentionBackend.CUDNN:
        best = AttentionBackend.BLOCKWISE
    chosen = best if backend is AttentionBackend.AUTO else backend
    if _PLATFORM.get(chosen, platform) != platform:
        objection = f"runs on {_PLATFORM[chosen].upper()} only, not on {platform.upper()}"
    else:
        objection = _kernel(chosen).objection(inputs, spec)
    if objection is None:
        return chosen
    if backend is AttentionBackend.AUTO:
        return AttentionBackend.XLA
    raise UserError(f"attention is {str(backend)!r}, which {objection}: set 'auto'")


def _kernel(backend: AttentionBackend) -> AttentionKernel:
    match backend:
        case AttentionBackend.SPLASH:
            from capibara.kernels.attention import splash as kernel  # Pallas takes a second to import
        case AttentionBackend.CUDNN:
            from capibara.kernels.attention import cudnn as kernel
        case AttentionBackend.BLOCKWISE:
            from capibara.kernels.attention import blockwise as kernel
        case _:
            from capibara.kernels.attention import reference as kernel
    return kernel
