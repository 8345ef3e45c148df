"""Reads folders in NVFP4, FP8 and int4 with transformers, and packs their weights with compressed-tensors: of test_compressed.py.

    python tests/interop/compressed_peer.py FOLDER NAME...    (pip install torch transformers accelerate compressed-tensors)

FOLDER/NAME is a model, FOLDER/NAME.npz its weights before rounding and, as `WEIGHT:read`, our values of them. Fails at the first
difference.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np  # noqa: E402
import torch  # noqa: E402
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402


def check_values(path: pathlib.Path, made: dict[str, np.ndarray]) -> None:
    """transformers' weights equal ours; where it joins experts, ours are joined, too."""
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = dict(config.quantization_config) | {"dequantize": True}
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.bfloat16)
    for name, value in model.state_dict().items():
        if f"{name}:read" in made:
            want = made[f"{name}:read"]
        elif path.name.endswith("nvfp4"):
            continue  # transformers 5.24 leaves out the scale of an expert's whole weight
        else:
            base, parts = (
                name.rsplit(".", 1)[0],
                {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
            )
            of_expert = lambda expert: [  # noqa: E731
                made[f"{base}.{expert}.{part}.weight:read"] for part in parts[name.rsplit(".", 1)[1]]
            ]
            want = np.stack([np.concatenate(of_expert(expert)) for expert in range(len(value))])
        assert np.array_equal(value.float().numpy(), want), f"{path.name}: {name}"


def check_bytes(path: pathlib.Path, made: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """compressed-tensors' parts of every weight equal ours, from scales that it computes of the same weight."""
    stored, arguments = load_file(path / "model.safetensors"), QuantizationScheme(**about["config_groups"]["group_0"])
    compressor, count = BaseCompressor.get_value_from_registry(about["format"]), 0
    for name in [name for name in stored if name.endswith(".weight_scale")]:
        base = name.removesuffix("weight_scale")
        weight = torch.from_numpy(made[f"{base}weight"])
        of_it = {part.removeprefix(base): value for part, value in stored.items() if part.startswith(base)}
        divisor, size = of_it.get("weight_global_scale"), arguments.weights.group_size or weight.shape[1]
        groups = weight.reshape(len(weight), -1, size)
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments.weights, global_scale=divisor)
        scale = scale.to(of_it["weight_scale"].dtype)
        given = {"weight": weight, "weight_scale": scale.float()}
        packed = compressor.compress(given | ({} if divisor is None else {"weight_global_scale": divisor}), arguments)
        packed["weight_scale"] = scale
        assert packed.keys() == of_it.keys(), (packed.keys(), of_it.keys())
        for part, value in packed.items():
            same = value.reshape(-1).view(torch.uint8), of_it[part].reshape(-1).view(torch.uint8)
            assert value.shape == of_it[part].shape and torch.equal(*same), f"{path.name}: {base}{part}"
        count += 1
    assert count, path.name


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    for name in sys.argv[2:]:
        made = dict(np.load(folder / f"{name}.npz"))
        about = dict(AutoConfig.from_pretrained(folder / name).quantization_config)
        check_values(folder / name, made)
        if about["quant_method"] == "compressed-tensors":
            check_bytes(folder / name, made, about)
        print(f"{name}: equal")
