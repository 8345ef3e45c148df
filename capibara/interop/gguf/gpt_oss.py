"""The experts of gpt-oss: in GGUF gate and up apart, outputs first; in transformers interleaved, inputs first.

`gguf.names` has rows for the file's tensors, named as transformers would name separate ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.quantize.grid import Packed

MODEL_TYPE = "gpt_oss"
_TENSOR = re.compile(r"(?P<layer>.*\.mlp\.experts)\.(?P<what>gate_up|down)_proj(?P<bias>_bias)?")


def parts(name: str) -> tuple[str, ...]:
    """The rows of the table that correspond to a tensor of transformers."""
    result = _TENSOR.fullmatch(name)
    if result is None:
        return (name,)
    end = "bias" if result["bias"] else "weight"
    return tuple(f"{result['layer']}.{what}_proj.{end}" for what in result["what"].split("_"))


def names(rows: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of transformers that rows of the table form, and the rows of each."""
    result = {}
    for row in rows:
        name = re.sub(r"(?<=\.mlp\.experts\.)(?:gate|up)(?=_proj\.)", "gate_up", row)
        if ".mlp.experts." in name:
            name = name.removesuffix(".weight").replace("_proj.bias", "_proj_bias")
        result[name] = parts(name)
    return result


def shape(name: str, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of a tensor of transformers, from those of its rows."""
    first = shapes[parts(name)[0]]
    if _TENSOR.fullmatch(name) is None:
        return first
    experts, *rest = first
    inner = rest[::-1]  # outputs last
    return (experts, *inner[:-1], inner[-1] * len(parts(name)))


def joined(name: str, values: list[np.ndarray]) -> np.ndarray:
    """A tensor of transformers, from its rows' tensors."""
    if _TENSOR.fullmatch(name) is None:
        return values[0]
    values = [np.moveaxis(value, 1, -1) for value in values]
    whole = np.stack(values, axis=-1)
    return np.ascontiguousarray(whole.reshape(*whole.shape[:-2], -1))


def apart(tensors: Iterable[tuple[str, np.ndarray | Packed]]) -> Iterator[tuple[str, np.ndarray | Packed]]:
    """Splits the tensors of transformers into those of the rows."""
    for name, value in tensors:
        rows = parts(name)
        if _TENSOR.fullmatch(name) is None:
            yield name, value
            continue
        assert isinstance(value, np.ndarray), "experts are not quantized here"
        for at, row in enumerate(rows):
            yield row, np.moveaxis(value[..., at :: len(rows)], -1, 1)
