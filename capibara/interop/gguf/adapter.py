"""Writes adapters as a GGUF file, which llama.cpp adds to their base when it loads: `llama-server --lora`.

Each pair belongs to a tensor of the base's file and has its name there. Where the base's file reorders the checkpoint
(gguf.names.Change), it reorders rows, so only `lora_B` is affected.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping

import numpy as np

from capibara.core.types import UserError
from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf.layout import metadata as gguf_metadata
from capibara.interop.gguf.layout import tensors as gguf_tensors
from capibara.interop.gguf.layout.tensors import Change, Tensor
from capibara.interop.peft.folder import Pair
from capibara.storage import outputs, partial

_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps\.weight")


def write_adapter(path: str | os.PathLike[str], config: Mapping[str, object], pairs: Iterable[Pair]) -> int:
    """Writes adapters in float32; atomically: `path` is either complete or unchanged.

    Args:
      path: ends in .gguf.
      config: config.json of the base.
      pairs: the adapters.

    Returns:
      The number of tensors with an adapter.

    Raises:
      UserError: llama.cpp does not support the base, or an adapter of such a tensor, or the file cannot be written.
    """
    family = gguf_names.of_config(config)
    gguf_metadata.write(config, family)  # raises if the base is not supported
    tensors, heads = family.tensors(config), family.heads(config)
    known = {tensor.name: tensor for tensor in tensors if tensor.is_exact} | _of_fused_experts(tensors)
    stored: dict[str, list[tuple[Tensor, Pair]]] = {}
    for pair in pairs:
        tensor = known.get(pair.name)
        if tensor is None:
            raise UserError(
                f"{pair.name} has an adapter, and its base has no such tensor in GGUF: write the merged model"
            )
        stored.setdefault(tensor.stored, []).append((tensor, pair))
    values, alpha = {}, _alpha(stored)
    for name, of_tensor in stored.items():
        of_tensor.sort(key=lambda item: item[0].index or 0)
        a, b = zip(*(_parts(tensor, pair, alpha, heads) for tensor, pair in of_tensor))
        of_experts = of_tensor[0][0].index is not None
        values[f"{name}.lora_a"], values[f"{name}.lora_b"] = (np.stack(x) if of_experts else x[0] for x in (a, b))
    with outputs.unwritable_told(path), partial.scratch(os.fspath(path)) as unfinished:
        _write(unfinished, family.arch, alpha, values)
        os.replace(unfinished, path)
    return len(stored)


def _of_fused_experts(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """The parts of fused experts of gpt-oss, by the names that their adapters have; outputs come first in these."""
    result = {}
    for tensor in tensors:
        part = _EXPERTS.fullmatch(tensor.take.place)
        if part is not None and tensor.change is Change.SWAPPED:
            name = f"{tensor.name.rpartition('.')[0]}.{part[1]}_proj.weight"
            result[name] = dataclasses.replace(tensor, name=name, change=Change.NONE)
    return result


def _alpha(stored: Mapping[str, list[tuple[Tensor, Pair]]]) -> float:
    """The file's alpha: llama.cpp scales every pair by alpha / rank."""
    first = next(iter(stored.values()))[0][1]
    return first.scale * first.rank


def _parts(tensor: Tensor, pair: Pair, alpha: float, heads: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """`lora_a` [rank, inputs] and `lora_b` [outputs, rank] of the file."""
    change = Change.NONE if tensor.change is Change.TRANSPOSED else tensor.change  # lora_A reads inputs either way
    b = gguf_tensors.to_gguf(pair.b, change, heads)
    numerator = pair.scale * pair.rank
    return pair.a, b if numerator == alpha else b * (numerator / alpha)


def _write(path: str, arch: str, alpha: float, values: Mapping[str, np.ndarray]) -> None:
    gguf = gguf_tensors.package()
    writer = gguf.GGUFWriter(path, arch)
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        for name, value in values.items():
            writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
