"""Makes stored_quants.json: weights as other libraries store them, and their dequantized values.

    python tests/interop/stored_quants_peer.py tests/interop/stored_quants.json [SEED]

(pip install torch transformers compressed-tensors torchao auto-round amd-quark; or vllm; or torch 'mlx[cpu]'.) Each library that is installed makes its own cases; those of the
others stay as they are. A case has the quantization_config, the dtype of the model, the stored tensors, and the values' hash.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402

BASE = "model.layers.0.self_attn.q_proj"
OUTPUTS, INPUTS = 24, 96
WHOLE_OUTPUTS = 32  # for words of 3-bit zeros, and NVFP4 of torchao
KINDS = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint32: "U32",
}
Case = tuple[str, dict[str, Any], str, dict[str, torch.Tensor], torch.Tensor]
TYPED = tuple[str, dict[str, Any], str, dict[str, torch.Tensor], torch.Tensor, dict[str, str]]  # with a file's metadata


def content(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def described(value: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(content(value)).decode()
    return {"kind": KINDS[value.dtype], "shape": list(value.shape), "data": data}


def scheme(form: str, **arguments: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    activations = arguments.pop("activations", None)
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_INT = {"type": "int", "symmetric": True}
_FP8 = {"type": "float", "num_bits": 8}
_MX = {"type": "float", "strategy": "group", "group_size": 32}
SCHEMES = {
    "int4 in groups": scheme("pack-quantized", **_INT, num_bits=4, strategy="group", group_size=32),
    "int4 in groups, zeros": scheme(
        "pack-quantized", type="int", symmetric=False, num_bits=4, strategy="group", group_size=32
    ),
    "int4 of channels, zeros": scheme("pack-quantized", type="int", symmetric=False, num_bits=4, strategy="channel"),
    "int4 of the weight": scheme("pack-quantized", **_INT, num_bits=4, strategy="tensor"),
    "int4 of the weight, zeros": scheme("pack-quantized", type="int", symmetric=False, num_bits=4, strategy="tensor"),
    "int8 of channels": scheme("pack-quantized", **_INT, num_bits=8, strategy="channel"),
    "int8 in groups, zeros": scheme(
        "pack-quantized", type="int", symmetric=False, num_bits=8, strategy="group", group_size=16
    ),
    "int3 in groups": scheme("pack-quantized", **_INT, num_bits=3, strategy="group", group_size=32),
    "int5 of channels, zeros": scheme("pack-quantized", type="int", symmetric=False, num_bits=5, strategy="channel"),
    "int2 in groups": scheme("pack-quantized", **_INT, num_bits=2, strategy="group", group_size=32),
    "W8A8": scheme("int-quantized", **_INT, num_bits=8, strategy="channel"),
    "W8A8, zeros": scheme("int-quantized", type="int", symmetric=False, num_bits=8, strategy="channel"),
    "int8 of the weight": scheme("int-quantized", **_INT, num_bits=8, strategy="tensor"),
    "int4 as bytes": scheme("naive-quantized", **_INT, num_bits=4, strategy="group", group_size=32),
    "FP8 of the weight": scheme("float-quantized", **_FP8, strategy="tensor"),
    "FP8 of channels": scheme("float-quantized", **_FP8, strategy="channel"),
    "FP8 in blocks": scheme("float-quantized", **_FP8, strategy="block", block_structure=[16, 32]),
    "FP8 in groups": scheme("naive-quantized", **_FP8, strategy="group", group_size=32),
    "NVFP4": scheme("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
    "MXFP4": scheme("mxfp4-pack-quantized", **_MX, num_bits=4, scale_dtype="torch.uint8"),
    "MXFP6": scheme("mxfp6-pack-quantized", **_MX, num_bits=6, scale_dtype="torch.uint8"),
    "MXFP8": scheme("mxfp8-quantized", **_MX, num_bits=8, scale_dtype="torch.uint8"),
}


def of_compressed_tensors(draw: torch.Generator) -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    for name, about in SCHEMES.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype == torch.float32 and name not in ("int4 in groups", "FP8 of channels"):
                continue
            if dtype == torch.float16 and name.startswith("MX"):
                continue
            arguments = QuantizationScheme(**about["config_groups"]["group_0"])
            compressor = BaseCompressor.get_value_from_registry(about["format"])
            stored = compressor.compress(parameters(arguments.weights, about["format"], dtype, draw), arguments)
            values = compressor.decompress(stored, arguments)["weight"]
            parts = {f"{BASE}.{part}": value for part, value in stored.items()}
            yield f"{name}, {str(dtype)[6:]}", about, str(dtype)[6:], parts, values


def parameters(arguments: Any, form: str, dtype: torch.dtype, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """A weight with scales and zero points of the scheme, chosen so that codes take all values."""
    weight = torch.randn(OUTPUTS, INPUTS, generator=draw)
    shape = {
        "tensor": (1,),
        "channel": (OUTPUTS, 1),
        "block": (-(-OUTPUTS // 16), INPUTS // 32),
    }.get(str(arguments.strategy), (OUTPUTS, INPUTS // (arguments.group_size or 1)))
    scale = torch.rand(shape, generator=draw) + 0.5
    if form.startswith("mx"):
        return {
            "weight": weight.to(dtype),
            "weight_scale": 2.0 ** torch.randint(-6, 2, shape, generator=draw).to(dtype),
        }
    if form.startswith("nvfp4"):
        scale = (100 * scale).to(torch.float8_e4m3fn).to(dtype)
        return {"weight": weight.to(dtype), "weight_scale": scale, "weight_global_scale": torch.tensor([347.7])}
    most = 448 if arguments.type == "float" else 2 ** (arguments.num_bits - 1)
    made = {"weight": weight.to(dtype), "weight_scale": (3 * scale / most).to(dtype)}
    if not arguments.symmetric:
        zeros = torch.randint(-most // 2, most // 2 + 1, shape, generator=draw)
        made["weight_zero_point"] = zeros.to(torch.int8)
    return made


def of_transformers(draw: torch.Generator) -> Iterator[Case]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    about: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 32]}
    exponents = torch.randint(100, 140, (3, 3), generator=draw, dtype=torch.uint8)
    factors = {"": 0.01 * torch.rand(3, 3, generator=draw) + 0.001, ", exponents": exponents}
    for name, scales in factors.items():
        for dtype in (torch.bfloat16, torch.float16):
            if dtype == torch.float16 and name:
                continue
            weight = (100 * torch.randn(OUTPUTS, INPUTS, generator=draw)).to(torch.float8_e4m3fn)
            values = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=dtype)
            parts = {f"{BASE}.weight": weight, f"{BASE}.weight_scale_inv": scales}
            yield f"FP8 in blocks{name}, {str(dtype)[6:]}", about, str(dtype)[6:], parts, values
    weight = (100 * torch.randn(OUTPUTS, INPUTS, generator=draw)).to(torch.float8_e4m3fn)
    one = torch.tensor(0.0123)
    values = Fp8Dequantize(None)._dequantize_one(weight, one.reshape(1, 1), output_dtype=torch.bfloat16)
    parts = {f"{BASE}.weight": weight, f"{BASE}.weight_scale_inv": one, f"{BASE}.activation_scale": one}
    about = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    yield "FP8 of the weight, bfloat16", about, "bfloat16", parts, values


def of_gemma(draw: torch.Generator) -> Iterator[Case]:
    """Gemma's own format, as transformers computes it."""
    from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear

    for bits in (2, 4, 8):
        for dtype in (torch.bfloat16, torch.float16):
            module = QuantizedLinear(INPUTS, OUTPUTS, num_bits=bits)
            codes = torch.randint(0, 256, module.weight.shape, generator=draw, dtype=torch.uint8)
            module.weight.data = codes.view(torch.int8) if bits == 8 else codes
            module.weight_scale.data = 0.01 + 0.1 * torch.rand(OUTPUTS, 1, generator=draw)
            parts = {f"{BASE}.{name}": value for name, value in module.state_dict().items()}
            about = {"quant_method": "gemma", "num_bits": 4, "module_quant_configs": {"q_proj$": {"num_bits": bits}}}
            yield f"{bits} bits, {str(dtype)[6:]}", about, str(dtype)[6:], parts, module._dequantize_weights(dtype)
    table = QuantizedEmbedding(OUTPUTS, INPUTS, torch.float16, embed_scale=7.0, num_bits=4)
    table.embedding_quantized.data = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), generator=draw, dtype=torch.uint8)
    table.embedding_scale.data = 0.01 + 0.1 * torch.rand(OUTPUTS, 3, generator=draw)
    about = {"quant_method": "gemma", "quantize_embeddings": True}
    parts = {f"{BASE}.{name}": value for name, value in table.state_dict().items()}
    yield "embedding in blocks, float16", about, "float16", parts, table.weight


def of_torchao(draw: torch.Generator) -> Iterator[TYPED]:
    from torchao import quantization
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    group, integers = quantization.PerGroup(32), quantization.IntxWeightOnlyConfig
    asymmetric = quantization.MappingType.ASYMMETRIC
    configs = {
        "int8 of channels": quantization.Int8WeightOnlyConfig(version=2),
        "int8 in groups": quantization.Int8WeightOnlyConfig(version=2, granularity=group),
        "int4 in groups": integers(weight_dtype=torch.int4, granularity=group),
        "int3 in groups, zeros": integers(weight_dtype=torch.int3, granularity=group, mapping_type=asymmetric),
        "FP8 of channels": quantization.Float8WeightOnlyConfig(),
        "MXFP8": MXDynamicActivationMXWeightConfig(),
        "NVFP4": NVFP4WeightOnlyConfig(),
    }
    for name, config in configs.items():
        linear = torch.nn.Linear(INPUTS, WHOLE_OUTPUTS, bias=False, dtype=torch.bfloat16)
        linear.weight.data = torch.randn(WHOLE_OUTPUTS, INPUTS, generator=draw).to(torch.bfloat16)
        quantization.quantize_(linear, config)
        stored, metadata = flatten_tensor_state_dict({f"{BASE}.weight": linear.weight.data})
        about = {"quant_method": "torchao", "quant_type": {"default": {"_type": type(config).__name__}}}
        yield f"{name}, bfloat16", about, "bfloat16", stored, linear.weight.dequantize(), metadata


def of_auto_round(draw: torch.Generator) -> Iterator[Case]:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    size = 32
    for packing, kind in (("auto_round:auto_gptq", qlinear_torch_zp), ("auto_round", qlinear_torch)):
        for bits in (2, 3, 4, 8):
            linear = torch.nn.Linear(INPUTS, WHOLE_OUTPUTS, bias=False)
            linear.weight.data = torch.randn(WHOLE_OUTPUTS, INPUTS, generator=draw)
            scales = (0.2 + torch.rand(WHOLE_OUTPUTS, INPUTS // size, generator=draw)) * 2.0 ** (2 - bits)
            zeros = torch.randint(1, 2**bits, scales.shape, generator=draw).float()
            module = kind.QuantLinear(bits, size, INPUTS, WHOLE_OUTPUTS, False)
            module.device = torch.device("cpu")  # which its pack reads, and nothing sets
            module.pack(linear, scales, zeros)
            values = module(torch.eye(INPUTS, dtype=torch.float16)).T
            parts = {f"{BASE}.{name}": value for name, value in module.state_dict().items()}
            about = {
                "quant_method": "auto-round",
                "packing_format": packing,
                "bits": bits,
                "group_size": size,
                "sym": False,
            }
            yield f"{bits} bits of {packing}", about, "bfloat16", parts, values


def of_quark(draw: torch.Generator) -> Iterator[Case]:
    import transformers
    from quark.torch import ModelQuantizer, export_safetensors, quantization
    from safetensors.torch import load_file

    group = dict(ch_axis=-1, is_dynamic=False, scale_type="float", group_size=32)
    channel = dict(ch_axis=0, is_dynamic=False)
    specs = {
        "FP8 of the weight": quantization.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "FP8 of channels": quantization.FP8E4M3PerChannelSpec(**channel),
        "int8 of channels": quantization.Int8PerChannelSpec(
            symmetric=True, scale_type="float", round_method="half_even", **channel
        ),
        "int4 in groups": quantization.Int4PerGroupSpec(**group),
        "uint4 in groups": quantization.Uint4PerGroupSpec(**group),
        "MXFP4": quantization.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }
    sizes = dict(vocab_size=32, hidden_size=INPUTS, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    for name, spec in specs.items():
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=WHOLE_OUTPUTS // 2)
        ).to(torch.bfloat16)
        weight = model.get_submodule(BASE).weight
        weight.data = torch.randn(weight.shape, generator=draw).to(torch.bfloat16)
        scheme = quantization.QLayerConfig(weight=spec.to_quantization_spec())
        quantizer = ModelQuantizer(quantization.QConfig(global_quant_config=scheme, exclude=["lm_head"]))
        model = quantizer.freeze(quantizer.quantize_model(model, [{"input_ids": torch.arange(8)[None]}]))
        module = model.get_submodule(BASE)
        values = module.get_quant_weight(module.weight).detach()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            export_safetensors(model, folder)
            stored = load_file(f"{folder}/model.safetensors")
            about = json.loads(pathlib.Path(folder, "config.json").read_text())["quantization_config"]
        parts = {name: value for name, value in stored.items() if name.startswith(BASE)}
        yield f"{name}, bfloat16", about, "bfloat16", parts, values


def of_vllm(draw: torch.Generator) -> Iterator[Case]:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    packed = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), generator=draw, dtype=torch.uint8)
    scales = (100 * torch.rand(OUTPUTS, INPUTS // 16, generator=draw)).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.0031)
    for dtype in (torch.bfloat16, torch.float16):
        values = dequantize_to_dtype(packed, scales, factor, dtype, swizzle=False)
        parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}
        about = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
        stored = {f"{BASE}.{part}": value for part, value in parts.items()}
        yield f"NVFP4, {str(dtype)[6:]}", about, str(dtype)[6:], stored, values
    weight = torch.randn(OUTPUTS, INPUTS, generator=draw).to(torch.float8_e4m3fn)
    exponents = torch.randint(110, 135, (OUTPUTS, INPUTS // 32), generator=draw, dtype=torch.uint8)
    stored = {f"{BASE}.weight": weight, f"{BASE}.weight_scale": exponents}
    about = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    yield "MXFP8, bfloat16", about, "bfloat16", stored, dequant_mxfp8_to_bf16(weight, exponents)


def of_mlx(draw: torch.Generator) -> Iterator[Case]:
    import mlx.core as mx
    import numpy as np

    def as_torch(value: mx.array) -> torch.Tensor:
        if value.dtype == mx.bfloat16:
            return torch.from_numpy(np.array(value.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(value))

    dtypes = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
    affine = [("affine", bits, 32, "bfloat16") for bits in (1, 2, 3, 4, 5, 6, 8)]
    affine += [("affine", 4, 64, "float16"), ("affine", 6, 128, "float32")]
    floats = [("mxfp4", 4, 32, "bfloat16"), ("mxfp8", 8, 32, "bfloat16"), ("nvfp4", 4, 16, "bfloat16")]
    for mode, bits, size, dtype in affine + floats:
        weight = torch.randn(OUTPUTS, INPUTS if size <= 32 else 2 * size, generator=draw)
        how: dict[str, Any] = {"group_size": size, "bits": bits, "mode": mode}
        stored = mx.quantize(mx.array(weight.numpy()).astype(dtypes[dtype]), **how)
        values = as_torch(mx.dequantize(*stored, **how))
        parts = {f"{BASE}.{part}": as_torch(value) for part, value in zip(("weight", "scales", "biases"), stored)}
        yield f"{mode} of {bits} bits in groups of {size}, {dtype}", how, dtype, parts, values


# By the distribution that makes the cases; several makers of one have names with a part after a colon.
MAKERS: dict[str, Callable[[torch.Generator], Iterator[Any]]] = {
    "compressed-tensors": of_compressed_tensors,
    "transformers": of_transformers,
    "transformers: gemma": of_gemma,
    "vllm": of_vllm,
    "mlx": of_mlx,
    "torchao": of_torchao,
    "auto-round": of_auto_round,
    "amd-quark": of_quark,
}


def main(path: str, seed: int = 0) -> None:
    made: dict[str, Any] = json.loads(pathlib.Path(path).read_text()) if os.path.exists(path) else {}
    for library, maker in MAKERS.items():
        distribution = library.partition(":")[0]
        module = {"amd-quark": "quark"}.get(distribution, distribution.replace("-", "_"))
        if importlib.util.find_spec(module) is None or (library != "vllm" and importlib.util.find_spec("vllm")):
            continue
        version = importlib.metadata.version(distribution)
        cases = {}
        for name, about, dtype, parts, values, *metadata in maker(torch.Generator().manual_seed(seed)):
            cases[name] = {
                "config": about,
                "dtype": dtype,
                "parts": {part: described(value) for part, value in parts.items()},
                "values": {"dtype": str(values.dtype)[6:], "hash": hashlib.sha256(content(values)).hexdigest()},
            } | ({"metadata": metadata[0]} if metadata else {})
        made[library] = {"version": version, "cases": cases}
    pathlib.Path(path).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
