"""llama.cpp's own quantizers and dequantizers, by ctypes: xllamacpp's library exports ggml's C interface."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import pathlib

import gguf
import numpy as np
import pytest


@functools.cache
def _library() -> ctypes.CDLL:
    pytest.importorskip("xllamacpp")
    found = ctypes.CDLL(str(next(pathlib.Path(importlib.util.find_spec("xllamacpp").origin).parent.glob("*.so"))))
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    found.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    return found


def quantized(value: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of each row of a float32 matrix, as ggml_quantize_chunk makes them without an importance matrix."""
    value = np.ascontiguousarray(value, np.float32)
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    found = np.empty((len(value), value.shape[1] // block * size), np.uint8)
    arguments = (int(number), value.ctypes.data, found.ctypes.data, 0, *value.shape, None)
    assert _library().ggml_quantize_chunk(*arguments) == found.nbytes
    return found


def values(stored: np.ndarray, kind: str) -> np.ndarray:
    """The float32 values that the stored bytes encode."""
    stored = np.ascontiguousarray(stored)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    found = np.empty((*stored.shape[:-1], stored.shape[-1] // size * block), np.float32)
    undo = getattr(_library(), f"dequantize_row_{kind.removesuffix('_K').lower()}{'_K' if kind.endswith('_K') else ''}")
    undo(ctypes.c_void_p(stored.ctypes.data), ctypes.c_void_p(found.ctypes.data), ctypes.c_int64(found.size))
    return found
