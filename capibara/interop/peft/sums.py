"""Weighted sums of adapters, as in PEFT's add_weighted_adapter: PEFT folders in, one folder out.

cat: concatenates the factors, so that the product is the sum of theirs: sum_i w_i s_i b_i a_i, of rank sum_i r_i.
linear: sums factors of equal rank, each times sqrt(|w_i s_i|), with the sign in `a`: keeps the rank, but the product
  has
terms that mix adapters (Zhang et al. 2023, arXiv:2306.14870).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.tokenizers import files as tokenizer_files
from capibara.interop.peft import fields, variants
from capibara.interop.peft import folder as peft
from capibara.interop.peft.modules import PARTS
from capibara.interop.peft.sum_options import Combination, Sum
from capibara.storage import partial

_NOT_SUMMED = ("layer_replication", "use_bdlora", "lora_bias")


@dataclasses.dataclass(frozen=True)
class _Read:
    """A folder: its configuration, and each module's factors `a` [r, in], `b` [out, r] and scale."""

    path: str
    config: Mapping[str, Any]
    modules: Mapping[str, tuple[np.ndarray, np.ndarray, float]]


def write(target: str, of: Sum, base: str | None = None) -> str:
    """Writes the sum as one adapter of scale 1; returns a line that describes the result.

    Args:
      target: a new folder.
      of: the adapters to sum.
      base: the adapters' base model; None: the one that they name.

    Raises:
      UserError: one cannot be read, or has another base or another tokenizer than the others.
    """
    read = [_read(folder) for folder in of.folders]
    base, carried = base or _base(read), _tokenizer(of.folders)
    names = sorted({name for item in read for name in item.modules})
    factors = {}
    for name in names:
        having = [(item, weight) for item, weight in zip(read, of.weights) if name in item.modules]
        pairs = [(*item.modules[name][:2], weight * item.modules[name][2]) for item, weight in having]
        _check(name, [item for item, _ in having], of.combination)
        factors[name] = _linear(pairs) if of.combination is Combination.LINEAR else _side_by_side(pairs)
    ranks = {name: len(a) for name, (a, _) in factors.items()}
    rank = max(ranks.values())
    others = {name: other for name, other in ranks.items() if other != rank}
    config = {
        **{"peft_type": "LORA", "task_type": read[0].config.get("task_type")},
        **{"base_model_name_or_path": base},
        **{"r": rank, "lora_alpha": rank, "rank_pattern": others, "alpha_pattern": others, "target_modules": names},
        **{"fan_in_fan_out": bool(read[0].config.get("fan_in_fan_out")), "bias": "none", "lora_dropout": 0.0},
        **{"use_rslora": False, "use_dora": False, "init_lora_weights": True, "inference_mode": True},
    }
    tensors = {
        f"{peft.PREFIX}{name}{PARTS[part]}": np.ascontiguousarray(value, np.float32)
        for name, pair in factors.items()
        for part, value in zip("ab", pair)
    }
    extras.require("safetensors", why="PEFT folders")
    from safetensors.numpy import save_file

    with partial.whole(target) as unfinished:
        save_file(tensors, os.path.join(unfinished, peft.WEIGHTS), metadata={"format": "pt"})
        with open(os.path.join(unfinished, peft.CONFIG), "w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2) + "\n")
        for name, content in carried.items():
            with open(os.path.join(unfinished, name), "wb") as file:
                file.write(content)
    return f"{target}: the sum of {len(read)} adapters ({of.combination}), of rank {rank}"


def _read(folder: str) -> _Read:
    config = fields.read(folder)
    if config.get("target_parameters"):
        raise UserError(
            f"{folder} has target_parameters (adapters of experts), which cannot be summed: merge it instead"
        )
    if field := next((name for name in _NOT_SUMMED if config[name]), fields.change_of_base(config)):
        raise UserError(
            f"{folder} has {field} = {limits.shortened(config[field])}, and only pairs of matrices can be summed: merge it instead"
        )
    tensors = variants.without_training(peft.read_raw(folder), config)
    ends = PARTS["a"], PARTS["b"]
    other = next((name for name in tensors if not name.endswith(ends)), None)
    if other is not None:
        raise UserError(f"{folder} has {other}, and only pairs of matrices can be summed: merge it instead")
    modules = {}
    for name in (name.removesuffix(ends[0]) for name in tensors if name.endswith(ends[0])):
        if name + ends[1] not in tensors:
            raise UserError(f"{folder} has no {name + ends[1]}: copy the adapter again")
        a, b = (np.asarray(tensors[name + end], np.float32) for end in ends)
        module = name.removeprefix(peft.PREFIX)
        if len(a) != fields.rank_of(module, config):
            raise UserError(
                f"{folder} has an adapter of {module} of rank {len(a)}, must be {fields.rank_of(module, config)}"
            )
        modules[module] = a, b, fields.scale_of(module, config)
    if not modules:
        raise UserError(f"{folder} has no adapter: name one of PEFT")
    return _Read(folder, config, modules)


def _base(read: Sequence[_Read]) -> str | None:
    """The base model that all adapters name, as far as they name one."""
    named = [(entry, str(name)) for entry in read if (name := entry.config.get("base_model_name_or_path"))]
    for item, name in named[1:]:
        if os.path.realpath(name) != os.path.realpath(named[0][1]):
            raise UserError(
                f"{item.path} is of {limits.shortened(name)}, {named[0][0].path} of {limits.shortened(named[0][1])}: add up "
                "adapters of one model, or say with --base that these are"
            )
    return named[0][1] if named else None


def _tokenizer(folders: Sequence[str]) -> dict[str, bytes]:
    """The tokenizer files of the folders; all that have some must have the same ones, as a tokenizer is taken whole."""
    having = [(folder, files) for folder in folders if (files := tokenizer_files.carried(folder))]
    for (before, known), (folder, files) in itertools.pairwise(having):
        for name in sorted(known.keys() | files.keys()):
            if known.get(name) != files.get(name):
                raise UserError(
                    f"{name} of {folder} differs from that of {before}: remove the tokenizer's files that the sum shall "
                    "not have"
                )
    return having[0][1] if having else {}


def _check(name: str, having: Sequence[_Read], combination: Combination) -> None:
    first = having[0].modules[name]
    for other in having[1:]:
        a, b, _ = other.modules[name]
        if (a.shape[1], b.shape[0]) != (first[0].shape[1], first[1].shape[0]):
            raise UserError(
                f"{name} is {[b.shape[0], a.shape[1]]} in {other.path} and {[first[1].shape[0], first[0].shape[1]]} in "
                f"{having[0].path}: add up adapters of one model"
            )
        if combination is Combination.LINEAR and len(a) != len(first[0]):
            raise UserError(
                f"{name} has rank {len(a)} in {other.path} and {len(first[0])} in {having[0].path}, and --combination=linear "
                "needs one rank: set cat"
            )


def _side_by_side(pairs: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([a * scale for a, _, scale in pairs]), np.concatenate([b for _, b, _ in pairs], axis=1)


def _linear(pairs: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> tuple[np.ndarray, np.ndarray]:
    nothing = np.zeros((), np.float32)
    a = sum((np.float32(math.copysign(math.sqrt(abs(scale)), scale)) * a for a, _, scale in pairs), nothing)
    return a, sum((np.float32(math.sqrt(abs(scale))) * b for _, b, scale in pairs), nothing)
