"""Parameters as files of a group: safetensors with float32 arrays, or with the codes of few bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from capibara.consensus.compression import Compression, Encoded
from capibara.core import limits
from capibara.core.types import UserError

Arrays = Mapping[str, np.ndarray]  # by the parameters' names, float32
Shapes = Mapping[str, tuple[int, ...]]

_CODES, _SCALES = ":codes", ":scales"  # after a parameter's name


class Packed(NamedTuple):
    """Arrays that a file holds, and how they are stored.

    Attributes:
      arrays: by name; of a compressed gradient the codes and scales.
      bits: of a value; 32: float32.
      block: values that share a scale; 0: there are none.
    """

    arrays: dict[str, np.ndarray]
    bits: int = 32
    block: int = 0


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    """The shapes by name."""
    return {name: array.shape for name, array in arrays.items()}


def to_bytes(arrays: Arrays) -> bytes:
    """The content of a file; equal for equal arrays, for which it has no metadata, whose order is not fixed."""
    return safetensors.numpy.save(dict(arrays))


def most_bytes(shapes: Shapes) -> int:
    """The largest size of a file with such parameters: their float32 values, and a header with three entries for each."""
    values = sum(4 * math.prod(shape) for shape in shapes.values())
    return values + sum(3 * (len(name) + 256) for name in shapes) + limits.MIB


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of a file; raises UserError if it is no such file."""
    try:
        return safetensors.numpy.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"it is no safetensors file ({limits.cause(error)})") from error


def model_of(arrays: Arrays, shapes: Shapes) -> dict[str, np.ndarray]:
    """The parameters of a file with float32 arrays.

    Raises:
      UserError: it holds other parameters than `shapes`, in words that follow the file's name.
    """
    _check_names(set(arrays), set(shapes))
    for name, shape in shapes.items():
        _check(arrays[name], name, np.dtype(np.float32), shape)
    return {name: arrays[name] for name in shapes}


def compressed(compression: Compression, gradient: Arrays, lost: Arrays) -> tuple[Packed, dict[str, np.ndarray]]:
    """A gradient in few bits, and what the rounding lost, for the next round."""
    sent, rest = jax.jit(compression.encode)(dict(gradient), dict(lost))
    arrays: dict[str, np.ndarray] = {}
    for name, encoded in sent.items():
        arrays |= {name + _CODES: np.asarray(encoded.codes), name + _SCALES: np.asarray(encoded.scales)}
    return Packed(arrays, compression.bits, compression.block), {name: np.asarray(x) for name, x in rest.items()}


def gradient_of(arrays: Arrays, compression: Compression, shapes: Shapes) -> dict[str, np.ndarray]:
    """The gradient of a file with codes and scales.

    Raises:
      UserError: it holds other parameters than `shapes`, in words that follow the file's name.
    """
    _check_names(set(arrays), {name + part for name in shapes for part in (_CODES, _SCALES)})
    like = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    wanted = jax.eval_shape(lambda: compression.encode(*2 * [jax.tree.map(lambda x: np.zeros(x.shape), like)])[0])
    sent: dict[str, Encoded] = {}
    for name, encoded in wanted.items():
        codes, scales = arrays[name + _CODES], arrays[name + _SCALES]
        _check(codes, name, encoded.codes.dtype, encoded.codes.shape)
        _check(scales, name, encoded.scales.dtype, encoded.scales.shape)
        sent[name] = Encoded(jnp.asarray(codes), jnp.asarray(scales))
    return {name: np.asarray(x) for name, x in jax.jit(compression.decode)(sent, like).items()}


def _check_names(names: set[str], expected: set[str]) -> None:
    if names == expected:
        return
    missing, extra = sorted(expected - names), sorted(names - expected)
    fault = f"{missing[0]} is missing" if missing else f"{limits.shortened(extra[0])} is unknown"
    raise UserError(
        f"its parameters are not the group's: {fault}, {len(missing) + len(extra)} of {len(expected)} differ"
    )


def _check(array: np.ndarray, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise UserError(
            f"its {name} has shape {array.shape} and dtype {array.dtype}, must be {shape} and {np.dtype(dtype)}"
        )
