"""K-quants in GGUF files: the bytes of llama.cpp's quantizer, the mixtures of llama-quantize."""

from __future__ import annotations

import json
import pathlib
import sys
import weakref

import gguf
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import ggml  # noqa: E402
import gguf_cases as cases  # noqa: E402
from test_gguf import copy, llama_cpp, our_logits  # noqa: E402, F401

from capibara.cli import convert
from capibara.core.types import UserError  # noqa: E402
from capibara.interop.gguf import k_quants, values
from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf import types as gguf_types
from capibara.interop.gguf.layout import tensors as gguf_tensors
from capibara.interop.gguf.read import open_gguf  # noqa: E402
from capibara.interop.gguf.write import write_gguf  # noqa: E402
from capibara.interop.quantize import options as quantize  # noqa: E402
from capibara.multihost import exits

GOLDEN = pathlib.Path(__file__).with_name("gguf_mixtures.json")
KINDS = tuple(k_quants.KINDS)


def matrices(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Matrices [rows, 1024]: like real weights, and like none."""
    draw = np.random.default_rng(seed)
    normal, uniform = draw.normal(size=(rows, 1024)), draw.uniform
    of_groups = lambda low, high, size: np.repeat(10.0 ** uniform(low, high, (rows, 1024 // size)), size, 1)  # noqa: E731
    found = {
        "weights": 0.02 * normal,
        "heavy tails": draw.standard_t(2, (rows, 1024)),
        "groups of all sizes": normal * of_groups(-9, 4, 32),
        "groups below float16": normal * of_groups(-20, -4, 16),
        "blocks below float32": normal * of_groups(-45, -8, 256),
        "values of all sizes": normal * 10.0 ** uniform(-12, 3, (rows, 1024)),
        "zeros": 0 * normal,
        "one value a group": np.repeat(normal[:, :32], 32, 1),
        "above zero": np.abs(normal) + draw.integers(0, 9, (rows, 1)),
        "below zero": -np.abs(normal) - draw.integers(0, 1000, (rows, 1)),
        "on a grid": 0.25 * draw.integers(-8, 8, (rows, 1024)),
        "few": np.where(uniform(size=(rows, 1024)) < 0.05, normal, 0),
        "large": 1e6 * normal,
    }
    return {name: value.astype(np.float32) for name, value in found.items()}


def check_bytes(rows: int, seed: int) -> None:
    for name, value in matrices(rows, seed).items():
        for kind in KINDS:
            got, want = k_quants.quantize(value, kind), ggml.quantized(value, kind)
            np.testing.assert_array_equal(got, want, err_msg=f"{name}, {kind}")


def test_k_quants_are_the_bytes_of_llama_cpp():
    check_bytes(rows=40, seed=0)  # more blocks than are processed at once


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_k_quants_are_the_bytes_of_llama_cpp(seed):
    check_bytes(rows=1000, seed=seed)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q8_0"])
def test_types_of_narrow_rows_are_the_bytes_of_llama_cpp(kind):
    for name in ("weights", "heavy tails", "on a grid", "zeros"):
        value, number = matrices(8)[name], gguf.GGMLQuantizationType[kind]
        if kind == "Q5_1":  # if a block's least values are 0 and -0, the first one decides the sign
            value = value + np.float32(0)
        np.testing.assert_array_equal(gguf_types.quantized(value, number), ggml.quantized(value, kind), err_msg=name)


@pytest.mark.parametrize("kind", [*KINDS, "Q2_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_types_are_undone_as_llama_cpp_does(kind):
    for name, value in matrices(8).items():
        if name == "large" and kind not in KINDS:
            continue  # outside their range
        stored = ggml.quantized(value, kind)
        got = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(got, ggml.values(stored, kind), err_msg=name)


STORED = [*gguf.quants._type_traits, gguf.GGMLQuantizationType.Q1_0]


@pytest.mark.parametrize("kind", [kind for kind in STORED if kind.name != "BF16"], ids=lambda kind: kind.name)
def test_blocks_of_any_bytes_are_undone_as_llama_cpp_does(kind):
    """All types that llama.cpp has, from bits that no quantizer would choose; NaN included."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(kind).integers(0, 256, (32, 8 * size), np.uint8)
    with np.errstate(all="ignore"):
        value = np.asarray(values.of(stored, kind), np.float32)
    np.testing.assert_array_equal(value, ggml.values(stored, kind.name))


@pytest.mark.parametrize(("name", "tensor", "count"), [("llama", "attn_q", 1), ("mixtral", "ffn_gate_exps", 4)])
def test_weights_in_nvfp4_have_scales_beside_them(name, tensor, count, tmp_path):
    """One for each matrix, by which llama.cpp multiplies its products; those of activations are not used."""
    config = dict(cases.CASES[name]) | {"hidden_size": 64}
    plain = tmp_path / "plain.gguf"
    write_gguf(plain, config, cases.tensors(config), {}, dtype="f32")
    kind = gguf.GGMLQuantizationType.NVFP4
    (value,) = (part.data for part in gguf.GGUFReader(plain).tensors if part.name == f"blk.0.{tensor}.weight")
    stored = np.random.default_rng(0).integers(0x20, 0x60, (*value.shape[:-1], 36), np.uint8)
    scales = np.linspace(0.5, 3, count, dtype=np.float32)
    files = {}
    for beside in (True, False):
        more = {f"blk.0.{tensor}.scale": scales, f"blk.0.{tensor}.input_scale": scales} if beside else {}
        files[beside] = open_gguf(
            copy(plain, tmp_path / f"{beside}.gguf", more=more, stored={f"blk.0.{tensor}.weight": (stored, kind)})
        )
    changed = 0
    for tensor_name in files[True].shapes():
        scaled, bare = (files[beside].read(tensor_name) for beside in (True, False))
        expert = tensor_name.partition("experts.")[2].partition(".")[0]
        if not np.array_equal(scaled, bare):
            changed += 1
            np.testing.assert_array_equal(scaled, bare * scales[int(expert or 0)])
    assert changed == count
    for wrong in ({f"blk.0.{tensor}.scale": np.ones(7, np.float32)}, {"blk.1.attn_k.scale": scales}):
        path = copy(plain, tmp_path / "wrong.gguf", more=wrong, stored={f"blk.0.{tensor}.weight": (stored, kind)})
        with pytest.raises(UserError, match="must be . numbers in F32|is not known in"):
            open_gguf(path)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_llama_cpp_answers_from_nvfp4_as_we_do(name, llama_cpp, tmp_path):  # noqa: F811
    """Up to its 8-bit activations; without the scales beside the weights the answers are others."""
    config, draw = dict(cases.CASES[name]) | {"hidden_size": 64}, np.random.default_rng(0)
    plain = tmp_path / "plain.gguf"
    write_gguf(plain, config, cases.tensors(config), cases.byte_level(), dtype="f32")
    stored, scales = {}, {}
    for part in sorted(gguf.GGUFReader(plain).tensors, key=lambda part: "ffn_up_exps" in part.name):
        shape = part.data.shape
        if part.name.startswith("blk") and len(shape) > 1 and "gate_inp" not in part.name:
            blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36), np.uint8)
            blocks[..., :4] = draw.integers(0x30, 0x40, blocks[..., :4].shape)
            stored[part.name] = blocks.reshape(*shape[:-1], -1), gguf.GGMLQuantizationType.NVFP4
            count = shape[0] if len(shape) == 3 else 1
            scales[part.name.replace("weight", "scale")] = draw.uniform(0.02, 0.1, count).astype(np.float32)
    answers, compared = {}, 0
    for label, more in (("scaled", scales), ("bare", {})):
        path = copy(plain, tmp_path / f"{label}.gguf", more=more, stored=stored)
        with llama_cpp(path) as peer:
            for start in (2, 40, 80, 120):
                ids = list(range(start, start + 12))
                logits = our_logits(open_gguf(path), ids)[-1]
                answers[label] = logits - np.log(np.exp(logits).sum())
                best = peer.ask("continue", ids=ids, count=1, best=cases.VOCAB)["best"]
                for token, log_probability in best[0] if best else ():  # empty where the token is a part of a character
                    assert abs(answers[label][token] - log_probability) < 0.5
                    compared += 1
    assert compared >= 2 * cases.VOCAB - 40
    assert np.abs(answers["scaled"] - answers["bare"]).max() > 3


def wide(name: str, **changes) -> dict:
    """A case with rows of blocks, and enough layers for the mixtures' rules."""
    config = dict(cases.CASES[name])
    if config["model_type"] == "gpt2":
        config |= {"n_embd": 256, "n_layer": 9}
    else:
        config |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9}
    return config | changes


# Name of a mixture's golden -> config.json.
MODELS = {
    name: wide(name)
    for name in ("llama", "smollm2", "mixtral", "qwen3", "qwen3_moe", "gemma2", "phi3", "gpt2", "gpt_neox")
} | {
    "33 layers": wide("llama", num_hidden_layers=33),
    "80 layers": wide("llama", num_hidden_layers=80),
    "80 layers, all heads with keys": wide("llama", num_hidden_layers=80, num_key_value_heads=4),
    "80 layers of qwen2": wide("qwen2", num_hidden_layers=80),
    "eight experts": wide("mixtral", num_local_experts=8),
    "narrow MLP": wide("llama", intermediate_size=544),
    "narrow": wide("llama", hidden_size=288),
    "narrow, tied": wide("smollm2", hidden_size=288),
}


def types(config: dict, dtype: str) -> dict[str, str]:
    """The type of each tensor in a file."""
    family = gguf_names.of_config(config)
    wanted = family.tensors(config)
    of = gguf_types.Types.of(dtype, config, family, wanted)
    return {tensor.stored: of.type(tensor.stored, tensor.stored_shape).name for tensor in wanted}


def layer_of(tensor: str) -> tuple[int, str]:
    """The number of a tensor's layer (-1: none), and the rest of its name."""
    _, number, part = tensor.split(".", 2) if tensor.startswith("blk.") else ("", "-1", tensor)
    return int(number), part


@pytest.mark.parametrize("name", MODELS)
def test_mixtures_are_those_of_llama_quantize(name):
    for dtype, unusual in json.loads(GOLDEN.read_text())[name].items():
        found = types(MODELS[name], dtype)
        matrices = {tensor: kind for tensor, kind in found.items() if kind != "F32"}
        usual = f"{dtype[:2].upper()}_K"
        got: dict[str, dict[str, list[int]]] = {}
        for tensor, kind in sorted(matrices.items(), key=lambda item: layer_of(item[0])):
            if kind != usual:
                layer, part = layer_of(tensor)
                got.setdefault(kind, {}).setdefault(part, []).append(layer)
        assert got == unusual, dtype


def test_small_matrices_of_gemma_3n_are_in_no_blocks():
    """llama-quantize does not quantize AltUp, LAuReL and the model's projection to all layers."""
    for dtype in ("q8_0", "q4_k_m"):
        found = types(cases.CASES["gemma3n"] | {"hidden_size": 256}, dtype)
        small = {name for name in found if any(part in name for part in ("altup", "laurel", "per_layer_model_proj"))}
        coefficients = {name for name in small if "_coef." in name}
        assert {found[name] for name in coefficients} == {"F32"}
        matrices = {name for name in found if found[name] != "F32"}
        assert {name for name in matrices if found[name] == "F16"} == {n for n in small & matrices}
        assert "altup_proj.weight" in matrices and "per_layer_token_embd.weight" in matrices - small


def test_the_flag_has_all_types():
    assert sorted(quantize.DTYPES) == sorted(gguf_types.DTYPES)


def run(*argv: str) -> int:
    return exits.run_verb(convert.main, argv)


def test_a_file_of_k_quants_is_read_as_llama_cpp_reads_it(tmp_path, capfd):
    config = wide("smollm2", num_hidden_layers=2)
    write_gguf(tmp_path / "f32.gguf", config, cases.tensors(config), cases.byte_level(), dtype="f32")
    assert run(f"--from={tmp_path}/f32.gguf", f"--to={tmp_path}/q.gguf", "--dtype=Q4_K_M") == 0
    assert "tensors in q4_k_m" in capfd.readouterr().out
    reader, found = gguf.GGUFReader(tmp_path / "q.gguf"), open_gguf(tmp_path / "q.gguf")
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert reader.fields["general.quantization_version"].contents() == 2
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert {tensor.tensor_type.name for tensor in stored.values()} == {"F32", "Q4_K", "Q6_K"}
    assert stored["token_embd.weight"].tensor_type.name == "Q6_K"  # it is the head, too
    family, weights = gguf_names.of_config({"model_type": "llama"}), dict(cases.tensors(config))
    for tensor in family.tensors(config):
        here, got = stored[tensor.stored], found.read(tensor.name)
        if here.tensor_type.name == "F32":
            np.testing.assert_array_equal(got, weights[tensor.name])
            continue
        turned = gguf_tensors.to_gguf(weights[tensor.name], tensor.change, family.heads(config))
        np.testing.assert_array_equal(here.data, ggml.quantized(turned, here.tensor_type.name), err_msg=tensor.name)
        want = ggml.values(here.data, here.tensor_type.name)
        np.testing.assert_array_equal(got, gguf_tensors.to_checkpoint(want, tensor.change, family.heads(config)))


def test_a_few_tensors_are_held_at_once(tmp_path):
    config, alive, most = wide("llama"), set(), 0

    def tensors():
        nonlocal most
        for name, value in cases.tensors(config):
            alive.add(name)
            weakref.finalize(value, alive.remove, name)
            most = max(most, len(alive))
            yield name, value
            del value

    told = []
    write_gguf(tmp_path / "q.gguf", config, tensors(), {}, dtype="q4_k_m", show=lambda *said: told.append(said))
    assert most <= 3 and len(told) == 84
    assert told[-1] == ("writing", "tensor 84 of 84, output.weight")


@pytest.mark.parametrize(
    "argv, match",
    [
        (["--to=y.gguf", "--dtype=q4_k"], "argument --dtype: invalid choice: 'q4_k' (choose from"),
        (["--to=y", "--dtype=q4_k_m"], "--dtype=q4_k_m is for gguf, must be one of f32, bf16, f16 for hf"),
        (
            ["--to=y.gguf", "--dtype=q4_k_m", "--quantize=rtn"],
            "--dtype=q4_k_m with --quantize=rtn, whose gguf has q4_0",
        ),
    ],
)
def test_bad_input(argv, match, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = dict(cases.CASES["llama"])
    write_gguf("f32.gguf", config, cases.tensors(config), {}, dtype="f32")
    assert run("--from=f32.gguf", *argv) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert match in line and sorted(path.name for path in tmp_path.iterdir()) == ["f32.gguf"]


def test_values_beyond_a_types_step(tmp_path):
    config = wide("llama", num_hidden_layers=1)
    weights = dict(cases.tensors(config))
    name = "model.layers.0.self_attn.q_proj.weight"
    for dtype, most in (("q4_k_m", 63 * 65504), ("q6_k", 4096 * 65504), ("q3_k_s", 128 * 65504)):
        weights[name] = np.full_like(weights[name], -most)
        write_gguf(tmp_path / "x.gguf", config, weights.items(), {}, dtype=dtype)
        assert np.isfinite(open_gguf(tmp_path / "x.gguf").read(name)).all()
        weights[name] = 1.01 * weights[name]
        with pytest.raises(
            UserError, match=f"q_proj.weight has values beyond .*{dtype[:2].upper()}_K cannot hold them"
        ):
            write_gguf(tmp_path / "x.gguf", config, weights.items(), {}, dtype=dtype)
