"""Forms of LoRA as plain pairs of matrices: what PEFT computes with them when it loads a folder.

PiSSA (Meng et al. 2024, arXiv:2404.02948), OLoRA (Buyukakyuz 2024, arXiv:2406.01775) and KaSA (Wang et al. 2025,
arXiv:2412.06071) take a part of rank r away from the base. Here the base stays as it is, and the adapter has that part
too, with the opposite sign, in r further ranks. BD-LoRA's matrices are block-diagonal. The noise of MonteCLoRA and the
projections of VeLoRA are used in training only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.interop.peft import fields
from capibara.interop.peft.modules import PARTS

A, B = PARTS["a"], PARTS["b"]
DIAGONAL, BIAS = ".lora_diag", ".lora_B.bias"
_OF_TRAINING = {
    "velora_config": re.compile(r"\.lora_velora_embed$"),
    "monteclora_config": re.compile(r"\.lora_monteclora_sampler\.[\w.]+$"),
}

Weight = Callable[[str], np.ndarray]  # a tensor of the base in f32 [outputs, inputs], by its name in a checkpoint


def without_training(stored: Mapping[str, np.ndarray], config: Mapping[str, object]) -> dict[str, np.ndarray]:
    """The tensors that have an effect after training."""
    unused = [pattern for name, pattern in _OF_TRAINING.items() if config[name] is not None]
    return {name: value for name, value in stored.items() if not any(pattern.search(name) for pattern in unused)}


def as_pairs(
    stored: dict[str, np.ndarray],
    names: Mapping[str, str],
    config: Mapping[str, Any],
    weight: Weight | None,
    folder: str,
) -> dict[str, float]:
    """Replaces the adapters in `stored` by plain ones.

    Args:
      stored: tensors, by their names in the base's table; changed in place.
      names: of a module in the table -> in PEFT's model.
      config: of the folder.
      weight: tensors of the base; None: they are not here.
      folder: for errors.

    Returns:
      By module the factor of its alpha, where its rank has become larger.

    Raises:
      UserError: a matrix has another rank than the configuration, or the base is needed and not here.
    """
    factors = {}
    for module in [name.removesuffix(A) for name in stored if name.endswith(A)]:
        name = names.get(module, module)
        # A folder that has the base's weight too has it without what was taken away.
        changing = "" if f"{module}.weight" in stored else fields.change_of_base(config)
        if module + B not in stored:
            raise UserError(f"{folder} has no {module + B}: copy the adapter again")
        if config["use_bdlora"] is not None:
            _fill_blocks(stored, module, name, config["use_bdlora"], folder)
        _check_rank(stored, module, name, config, folder)
        if config["kasa_config"] is not None:
            if module + DIAGONAL not in stored:
                raise UserError(f"{folder} has no {module + DIAGONAL}: copy the adapter again")
            stored[module + B] = stored[module + B] * stored.pop(module + DIAGONAL)
        if not changing and module + BIAS not in stored:
            continue
        if weight is None or ".experts." in module:
            field = changing or "lora_bias"
            reason = "of experts" if weight is not None else "which changes the base, and is not read alone"
            raise UserError(
                f"{folder} has {field} = {config[field]!r}, {reason}: merge it, capibara convert --format=hf"
            )
        scale = fields.scale_of(name, config)
        if module + BIAS in stored:
            _add_bias(stored, module, scale, weight, folder)
        if changing:
            a, b = _taken_from_base(
                _of_base(weight, module, config, changing, folder), len(stored[module + A]), scale, config
            )
            stored[module + A] = np.concatenate([stored[module + A], a])
            stored[module + B] = np.concatenate([stored[module + B], -b], axis=1)
            factors[module] = 2**0.5 if config["use_rslora"] else 2.0
    return factors


def _check_rank(
    stored: Mapping[str, np.ndarray], module: str, name: str, config: Mapping[str, object], folder: str
) -> None:
    rank, result = fields.rank_of(name, config), stored[module + A].shape[0]
    if ".experts" in module or result == rank:  # a layer's experts can be in one tensor, or several in one adapter
        return
    field = "r" if rank == config["r"] else "rank_pattern"
    raise UserError(
        f"{folder} has {field} = {rank} for {name}, whose adapter is of rank {result}: copy the adapter again"
    )


def _fill_blocks(stored: dict[str, np.ndarray], module: str, name: str, config: Mapping[str, Any], folder: str) -> None:
    count = config.get("nblocks") or 1
    lists = [config.get(f"target_modules_bd_{part}") or [] for part in "ab"]
    of_a, of_b = (any(pattern in name for pattern in patterns) for patterns in lists)
    if of_a and of_b or (not (of_a or of_b) and config.get("match_strict", True)):
        raise UserError(
            f"{folder} has use_bdlora, which must name {name} for one of its two matrices: name a folder that PEFT wrote"
        )
    if of_a or of_b:
        part = module + (A if of_a else B)
        blocks, width = stored[part], stored[part].shape[1]
        if blocks.shape[0] % count:
            raise UserError(f"{part} has {blocks.shape[0]} rows, must be a multiple of use_bdlora.nblocks ({count})")
        full = np.zeros((blocks.shape[0], width * count), blocks.dtype)
        height = blocks.shape[0] // count
        for at in range(count):
            rows = slice(at * height, (at + 1) * height)
            full[rows, at * width : (at + 1) * width] = blocks[rows]
        stored[part] = full


def _of_base(weight: Weight, module: str, config: Mapping[str, object], field: str, folder: str) -> np.ndarray:
    try:
        return np.asarray(weight(f"{module}.weight"), np.float64)
    except KeyError:
        raise UserError(
            f"{folder} has {field} = {config[field]!r} with an adapter of {module}, which is tied or no matrix of the base: "
            "merge it with PEFT first"
        ) from None


def _taken_from_base(
    weight: np.ndarray, rank: int, scale: float, config: Mapping[str, object]
) -> tuple[np.ndarray, np.ndarray]:
    """Factors a [r, inputs] and b [outputs, r] of what PEFT subtracts, which the adapter's scale multiplies."""
    if config["init_lora_weights"] == "olora":
        q, r = np.linalg.qr(weight)
        return r[:rank].astype(np.float32), q[:, :rank].astype(np.float32)
    u, s, v = np.linalg.svd(weight, full_matrices=False)
    part = slice(0, rank) if config["init_lora_weights"] == "pissa" else slice(len(s) - rank, None)
    return v[part].astype(np.float32), (u[:, part] * s[part] / scale).astype(np.float32)


def _add_bias(stored: dict[str, np.ndarray], module: str, scale: float, weight: Weight, folder: str) -> None:
    name = f"{module}.bias"
    try:
        bias = stored[name] if name in stored else weight(name)
    except KeyError:
        raise UserError(
            f"{folder} has lora_bias = True, and {module} has no bias in the base that it could be added to: merge it with "
            "PEFT first"
        ) from None
    stored[name] = bias + np.float32(scale) * stored.pop(module + BIAS)
