"""Other programs' results with folders in 4 bits: the peer program of test_quantized_folders.py, which runs it.

    python tests/interop/quant_peer.py FOLDER

Every NAME in FOLDER/names.json is a model in GPTQ's or AWQ's form in FOLDER/NAME. FOLDER/NAME.made.npz holds its
`tokens`, and for each weight `NAME:values`, `NAME:scales` and `NAME:zeros`. This writes FOLDER/NAME.read.npz with:
  logits     transformers' with gptqmodel's layers; exact: with plain layers of the same weights, in float32
  values     gptqmodel's weight [O, I]
  qweight, qzeros, scales, g_idx    gptqmodel's packing of our values, scales and zeros
  codes, ort_scales, ort_zeros      those of ONNX Runtime GenAI's model builder, for the families that it knows
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # noqa: E402
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear  # noqa: E402
from gptqmodel.quantization import QuantizeConfig  # noqa: E402
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm  # noqa: E402
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module  # noqa: E402
from onnxruntime_genai.models.loaders.quant_model import QuantModel  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

_ORT = ("llama", "qwen2", "qwen3")  # families without fused layers


def load(path: pathlib.Path) -> torch.nn.Module:
    """Loads the model as a user would, but with the kernels in plain torch."""
    config = AutoConfig.from_pretrained(path)
    awq = config.quantization_config["quant_method"] == "awq"
    config.quantization_config["backend"] = "torch_awq" if awq else "gptq_torch"
    model, told = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, device_map="cpu", output_loading_info=True
    )
    wrong = {what: sorted(names) for what, names in told.items() if names}
    assert not wrong, f"{path.name}: {wrong}"
    return model.eval()


def weight_of(layer: torch.nn.Module) -> torch.Tensor:
    """Its weight [O, I], float16."""
    if isinstance(layer, AwqTorchLinear):
        words = layer.qweight, layer.qzeros, layer.scales
        return dequantize_gemm(*words, bits=layer.bits, group_size=layer.group_size).T.half()
    return layer.dequantize_weight().T.half()


def packed(values: np.ndarray, scales: np.ndarray, zeros: np.ndarray, config: dict) -> dict[str, np.ndarray]:
    """A layer's tensors as they are saved."""
    outputs, inputs = values.shape
    awq, group = config["quant_method"] == "awq", config["group_size"]
    sizes = dict(bits=4, group_size=group, sym=config.get("sym", False), desc_act=False)
    layer = (AwqTorchLinear if awq else TorchLinear)(
        **sizes, in_features=inputs, out_features=outputs, bias=False, register_buffers=True
    )
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    linear.weight.data = torch.from_numpy(values)
    given = linear, torch.from_numpy(scales.astype(np.float32)), torch.from_numpy(zeros.astype(np.int32))
    if awq:
        layer.pack(*given)
    else:
        layer.pack_original(*given, g_idx=torch.arange(inputs, dtype=torch.int32) // group)
        if config["checkpoint_format"] == "gptq":
            convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=4, group_size=group))
    names = ("qweight", "qzeros", "scales") + (() if awq else ("g_idx",))
    return {name: getattr(layer, name).numpy() for name in names}


def of_ort(path: pathlib.Path, config: dict) -> dict[str, np.ndarray]:
    """Codes [O, I], scales and zeros [O, G] of all weights, unpacked from ONNX Runtime's words."""
    said, found = config["quantization_config"], {}
    heads, size = config["num_attention_heads"], config.get("head_dim")
    size = size or config["hidden_size"] // heads
    model = QuantModel.from_pretrained(
        said["quant_method"],
        input_path=str(path),
        quant_attrs={"config": said, "use_g_idx": False},
        q_size=heads * size,
        kv_size=config["num_key_value_heads"] * size,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
    )

    def nibbles(x: torch.Tensor, *shape: int) -> np.ndarray:
        both = np.stack([x.numpy() & 15, x.numpy() >> 4], -1)
        return both.reshape(shape[0], -1)[:, : shape[1]]

    for index, layer in enumerate(model.layers):
        for part, owner in (("self_attn", layer.self_attn), ("mlp", layer.mlp)):
            for name in (
                ("q_proj", "k_proj", "v_proj", "o_proj")
                if part == "self_attn"
                else ("gate_proj", "up_proj", "down_proj")
            ):
                one = getattr(owner, name)
                shape, groups = (one.out_features, one.in_features), one.in_features // said["group_size"]
                key = f"model.layers.{index}.{part}.{name}.weight"
                found[f"{key}:codes"] = nibbles(one.qweight, *shape)
                found[f"{key}:ort_scales"] = one.scales.numpy().reshape(shape[0], groups)
                found[f"{key}:ort_zeros"] = nibbles(one.qzeros, shape[0], groups)
    return found


def read(path: pathlib.Path, made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    config = json.loads((path / "config.json").read_text())
    model, tokens = load(path), torch.from_numpy(made["tokens"]).long()
    found = {}
    with torch.no_grad():
        found["logits"] = model(tokens, use_cache=False).logits.float().numpy()
        layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "qweight")}
        for name, layer in layers.items():
            weight = weight_of(layer)
            found[f"{name}.weight:values"] = weight.numpy()
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight.data = weight.float()
            if layer.bias is not None:
                plain.bias.data = layer.bias.data.float()
            model.set_submodule(name, plain)
        found["exact"] = model(tokens, use_cache=False).logits.float().numpy()
    for key in made:
        if key.endswith(":values"):
            name = key.removesuffix(":values")
            given = (made[f"{name}:{part}"] for part in ("values", "scales", "zeros"))
            parts = packed(*given, config["quantization_config"])
            found |= {f"{name}:{part}": array for part, array in parts.items()}
    # Its GPTQ reader takes every folder for the first format, which stores each zero point less 1.
    if config["model_type"] in _ORT and config["quantization_config"].get("checkpoint_format") != "gptq_v2":
        found |= of_ort(path, config)
    return found


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    for name in json.loads((folder / "names.json").read_text()):
        np.savez(folder / f"{name}.read.npz", **read(folder / name, dict(np.load(folder / f"{name}.made.npz"))))
