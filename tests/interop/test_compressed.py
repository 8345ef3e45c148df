"""Weights in NVFP4, FP8 and int4: rounded to the nearest level, read back as written, and as compressed-tensors packs them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE))
import gguf_cases as cases  # noqa: E402
from test_quantization import Source  # noqa: E402

from capibara.cli import convert
from capibara.core.types import UserError
from capibara.interop import conversion, open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf.folder import HfFolder
from capibara.interop.quantize.options import BY_TENSOR, Method, Quantize
from capibara.models import api
from capibara.multihost import exits

PYTHON = os.environ.get("QUANT_PYTHON")
_WIDE = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
MODELS = {
    "llama": cases.CASES["llama"] | _WIDE,
    "phi3": cases.CASES["phi3"] | _WIDE | {"head_dim": 32, "num_key_value_heads": 4},
    "qwen3_moe": cases.CASES["qwen3_moe"] | _WIDE | {"moe_intermediate_size": 128},
}
METHODS = [str(method) for method in BY_TENSOR]
LEVELS = {
    "nvfp4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "int4": np.arange(-8, 8),
    "fp8": np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
}


class Wide(Source):
    """A model wide enough for blocks of 128 x 128."""

    def __init__(self, name):
        super().__init__("llama")
        self.config = dict(MODELS[name])
        self.values = dict(cases.tensors(self.config))


def written(folder, name, method, dtype=None, **more):
    source = Wide(name)
    how = Quantize(method=Method(method), **more)
    told = conversion.write(source, str(folder), "hf", dtype, lambda *given: None, how)
    return source, told, HfFolder(str(folder))


def steps(stored, name, shape):
    """The size of a step for each value of a weight, float64."""
    if f"{name}_scale_inv" in stored.shapes():
        return np.kron(stored.stored(f"{name}_scale_inv").astype(np.float64), np.ones((128, 128)))
    scale = stored.stored(f"{name}_scale")
    scale = scale.view(ml_dtypes.float8_e4m3fn) if scale.dtype == np.uint8 else scale
    scale = np.repeat(scale.astype(np.float64), shape[1] // scale.shape[1], 1)
    if f"{name}_global_scale" in stored.shapes():
        scale = scale / stored.stored(f"{name}_global_scale").astype(np.float64)
    return scale


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_rounded_to_the_nearest_level(name, method, tmp_path):
    if name == "phi3" and method == "fp8_block":
        pytest.skip("its heads do not fill a block")
    source, told, stored = written(tmp_path / "hf", name, method)
    read = open_model.open_model(str(tmp_path / "hf"))
    assert read.shapes() == source.shapes()
    count = 0
    levels = LEVELS[method.removesuffix("_block")]
    for tensor, weight in source.values.items():
        value = read.read(tensor)
        if f"{tensor}_scale" not in stored.shapes() and f"{tensor}_scale_inv" not in stored.shapes():
            np.testing.assert_array_equal(value, weight.astype(ml_dtypes.bfloat16))
            continue
        count += 1
        step = steps(stored, tensor, weight.shape)
        exact = (weight if method == "int4" else np.abs(weight)) / step
        least = np.abs(exact[..., None] - levels).min(-1)
        error = np.abs(value.astype(np.float64) - weight) / step
        assert (error <= least + (np.abs(exact) + least) * 2.0**-8).all(), tensor  # bfloat16 rounds the value
        assert (np.abs(exact).max() <= levels.max() * 1.08) and np.abs(exact).max() > 0.9 * levels.max(), tensor
    assert f"{count} weights in {method}" in told and count == sum("proj" in tensor for tensor in source.values)


def test_weights_that_vllm_joins_share_a_scale(tmp_path):
    _, _, stored = written(tmp_path / "hf", "qwen3_moe", "nvfp4")
    scales = {
        name.removesuffix(".weight_global_scale"): stored.stored(name).item()
        for name in stored.shapes()
        if name.endswith("_global_scale")
    }
    layer = "model.layers.{}."
    for index in range(2):
        at = layer.format(index)
        assert len({scales[f"{at}self_attn.{part}_proj"] for part in "qkv"}) == 1
        experts = {scales[f"{at}mlp.experts.{e}.gate_proj"] for e in range(4)}
        assert experts == {scales[f"{at}mlp.experts.{e}.up_proj"] for e in range(4)} and len(experts) == 4
    assert len(set(scales.values())) == 2 * (2 + 4 * 2)


def test_what_stays_in_floats_is_named(tmp_path):
    written(tmp_path / "hf", "qwen3_moe", "fp8_block")
    about = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{index}.mlp.gate" for index in range(2)]
    assert about["modules_to_not_convert"] == ["lm_head", "model.embed_tokens", *routers]


def test_a_group_of_zeros_and_a_model_of_zeros(tmp_path):
    for method in METHODS:
        source = Wide("llama")
        for name, value in source.values.items():
            value[..., :128] = 0 if "down" not in name else value[..., :128]
        zero = "model.layers.1.self_attn.o_proj.weight"
        source.values[zero] *= 0
        target = tmp_path / method
        conversion.write(source, str(target), "hf", None, lambda *given: None, Quantize(method=Method(method)))
        assert not open_model.open_model(str(target)).read(zero).any()


@pytest.mark.parametrize(
    ("name", "more", "form", "dtype", "message"),
    [
        ("llama", {"method": "nvfp4"}, "gguf", None, "--quantize=nvfp4 is for hf, not for gguf"),
        ("llama", {"method": "fp8"}, "hf", "f32", "--dtype=f32 with --quantize=fp8"),
        ("narrow", {"method": "fp8_block"}, "hf", None, "needs a multiple of 128: try fp8"),
        ("narrow", {"method": "int4"}, "hf", None, "48 inputs, --quantize=int4 needs a multiple of 32"),
        ("gpt2", {"method": "fp8"}, "hf", None, "and transformer.h.0.attn.c_attn.weight is another"),
        ("gpt_oss", {"method": "nvfp4"}, "hf", None, "of one expert, and model.layers.0.mlp.experts.gate_up_proj is"),
    ],
)
def test_what_cannot_be_written(name, more, form, dtype, message, tmp_path):
    source = Source("llama" if name == "narrow" else name)
    if name == "narrow":
        source.config |= {"intermediate_size": 48}
        source.values = dict(cases.tensors(source.config))
    more = {**more, "method": Method(more["method"])}
    with pytest.raises(UserError) as error:
        conversion.write(source, str(tmp_path / "out"), form, dtype, lambda *given: None, Quantize(**more))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantize=fp8", "--calibration=text.txt"], "--calibration=text.txt is for gptq and awq, not for fp8"),
        (["--quantize=nvfp4", "--group_size=32"], "--group_size=32 is not for nvfp4"),
    ],
)
def test_flags_that_do_not_go_together(flags, message, tmp_path, capsys):
    assert exits.run_verb(convert.main, [f"--from={tmp_path}", f"--to={tmp_path / 'out'}", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("method", METHODS)
def test_a_run_starts_from_the_values_that_are_stored(method, tmp_path):
    """By the loader of every verb, in float32 and as a base of adapters."""
    _, _, stored = written(tmp_path / "hf", "llama", method)
    foreign = open_model.open_model(str(tmp_path / "hf"))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    params = open_model.load_params(foreign, model, here)
    again = dict(open_model.hf_tensors(params, model, "llama"))
    for name, value in again.items():
        np.testing.assert_array_equal(value, foreign.read(name).astype(np.float32), name)
    assert open_model.stored_dtype(foreign) == "bfloat16"


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON, reason="QUANT_PYTHON names no python with compressed-tensors")
def test_other_libraries_read_the_values_and_pack_the_same_bytes(tmp_path):
    names = []
    for name in ("llama", "qwen3_moe"):
        for method in METHODS:
            folder = tmp_path / f"{name}-{method}"
            source, _, _ = written(folder, name, method)
            read = open_model.open_model(str(folder))
            values = {f"{tensor}:read": read.read(tensor).astype(np.float32) for tensor in read.shapes()}
            np.savez(tmp_path / f"{name}-{method}.npz", **source.values, **values)
            names.append(f"{name}-{method}")
    subprocess.run([PYTHON, HERE / "compressed_peer.py", tmp_path, *names], check=True)


@pytest.mark.parametrize(
    ("method", "group", "largest", "of_zeros"),
    [("int4", 32, 7.5, 1.0), ("fp8", 128, 448.0, 1.0), ("nvfp4", 16, 6.0, 0.125)],
)
def test_scales_are_those_of_the_largest_value(method, group, largest, of_zeros, tmp_path):
    """By hand: the largest magnitude over the largest code, rounded to the dtype of scales; groups of zeros have a scale, too."""
    source, name = Wide("llama"), "model.layers.0.mlp.up_proj.weight"
    weight = source.values[name] = source.values[name].copy()
    weight[0] = 0
    more = {"group_size": 32} if method == "int4" else {}
    how = Quantize(method=Method(method), **more)
    conversion.write(source, str(tmp_path / "hf"), "hf", None, lambda *given: None, how)
    stored = HfFolder(str(tmp_path / "hf"))
    want = np.abs(weight.reshape(len(weight), -1, group)).max(-1).astype(np.float32) / np.float32(largest)
    kind = ml_dtypes.float8_e4m3fn if method == "nvfp4" else ml_dtypes.bfloat16
    if method == "nvfp4":
        want = want * stored.stored(f"{name}_global_scale")
    want = want.astype(kind)
    want[0] = of_zeros
    np.testing.assert_array_equal(stored.stored(f"{name}_scale").view(kind), want)
