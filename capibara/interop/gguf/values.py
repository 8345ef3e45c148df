"""The values of a GGUF file's tensors, by type: as stored, or dequantized bit by bit as llama.cpp does."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from capibara.interop.gguf.layout import tensors as gguf_tensors

_Q1_0_SCALE_BYTES = 2


def of(data: np.ndarray, kind: Any) -> np.ndarray:
    """Values in float32, float16 or bfloat16, whichever holds them.

    Args:
      data: as `GgufFile` reads it: numbers, or bytes of blocks along the last axis.
      kind: the type, of the gguf package.

    Raises:
      NotImplementedError: the gguf package cannot dequantize it.
    """
    match kind.name:
        case "F32" | "F16":
            return data
        case "BF16":
            return data.view(ml_dtypes.bfloat16)
        case "Q1_0":
            return _signs(data, gguf_tensors.package().GGML_QUANT_SIZES[kind][1])
        case "MXFP4":
            return gguf_tensors.package().dequantize(data, kind).astype(ml_dtypes.bfloat16)
    return gguf_tensors.package().dequantize(data, kind)


def _signs(data: np.ndarray, block_bytes: int) -> np.ndarray:
    """Q1_0, which gguf 0.19 does not dequantize: a float16 scale for 128 values, positive where their bit is set."""
    blocks = data.reshape(*data.shape[:-1], -1, block_bytes)
    scales = np.ascontiguousarray(blocks[..., :_Q1_0_SCALE_BYTES]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[..., _Q1_0_SCALE_BYTES:], axis=-1, bitorder="little")
    return np.where(bits == 1, scales, -scales).reshape(*data.shape[:-1], -1)
