"""Weights in 4 bits: GPTQ and AWQ lose less than rounding to nearest, and files hold exactly the chosen codes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import gguf  # noqa: E402
import gguf_cases as cases  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from capibara.cli import convert
from capibara.core.types import UserError  # noqa: E402
from capibara.data.tokenizers.vocabulary import ByteVocabulary  # noqa: E402
from capibara.interop import conversion, open_model
from capibara.interop.gguf.read import open_gguf  # noqa: E402
from capibara.interop.hf import config as hf_config
from capibara.interop.quantize import awq, calibration, grid, quantization  # noqa: E402
from capibara.interop.quantize.gptq import gptq  # noqa: E402
from capibara.interop.quantize.grid import Grid, Packed  # noqa: E402
from capibara.interop.quantize.options import CALIBRATED, Method, Quantize  # noqa: E402
from capibara.models import api  # noqa: E402
from capibara.multihost import exits

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "phi3")
GRIDS = [Grid(32, signed=True), Grid(64), Grid(32, symmetric=False)]


class Source:
    """A tiny model as a ForeignModel."""

    def __init__(self, name):
        self.config, self.tokenizer, self.about = dict(cases.CASES[name]), cases.byte_level(), {}
        self.values = dict(cases.tensors(self.config))

    def shapes(self):
        return {name: value.shape for name, value in self.values.items()}

    def dtype(self, name):
        return self.values[name].dtype.name

    def read(self, name):
        return self.values[name]


def ours(source):
    """The case's model and parameters."""
    model = api.build(hf_config.from_hf(source.config, dtype="float32"))
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    return model, open_model.load_params(source, model, here)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("calibration") / "text.txt"
    file.write_text(cases.TEXT[:6000], encoding="utf-8")
    return str(file)


def asked(method, text, **more):
    return Quantize(method=Method(method), calibration=None if method == "rtn" else text, length=32, rows=8, **more)


def made_of(source, how, *, q4_0):
    model, params = ours(source)
    config = hf_config.to_hf(model.config, source.config)
    return quantization.quantize(model, params, config, source.tokenizer, how, q4_0=q4_0)


def correlated(inputs=128, tokens=1024, seed=0):
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((inputs, inputs)) * np.exp(-np.arange(inputs) / 20)[:, None]
    x = (rng.standard_normal((tokens, inputs)) @ mixed).astype(np.float32)
    x[:, 5] = 0  # an input that is always 0
    return rng.standard_normal((48, inputs)).astype(np.float32), x


@pytest.mark.parametrize("chosen", GRIDS, ids=str)
def test_products_with_correlated_inputs_lose_less(chosen):
    weight, x = correlated()

    def lost(packed):
        return np.sum(np.square(x @ (packed.values() - weight).T))

    nearest = grid.rounded(weight, *chosen.nearest(weight))
    fitted = grid.rounded(weight, *chosen.fit(weight, np.sum(np.square(x), 0)))
    assert lost(fitted) < lost(nearest)
    for act_order in (True, False):
        assert lost(gptq(weight, x.T @ x, chosen, act_order=act_order)) < 0.3 * lost(nearest)
    # A few inputs are much larger than their neighbours: the case that AWQ is for.
    sizes = np.where(np.arange(x.shape[1]) % 16 == 3, 20, 1).astype(np.float32)
    x = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32) * sizes
    scales = awq.channel_scales([weight], x.T @ x, np.mean(np.abs(x), 0), chosen, np.arange(x.shape[1]))
    scaled = weight * scales
    values = grid.rounded(scaled, *chosen.nearest(scaled)).values() / scales
    assert np.sum(np.square(x @ (values - weight).T)) < 0.5 * lost(grid.rounded(weight, *chosen.nearest(weight)))


@pytest.mark.parametrize("chosen", GRIDS, ids=str)
def test_every_value_is_the_nearest_point_of_its_grid(chosen):
    weight, _ = correlated()
    packed = grid.rounded(weight, *chosen.nearest(weight))
    zeros, scales = (np.repeat(x, packed.group_size, 1).astype(np.float32) for x in (packed.zeros, packed.scales))
    grid_values = scales[..., None] * (np.arange(16) - zeros[..., None])
    np.testing.assert_allclose(
        np.abs(packed.values() - weight), np.min(np.abs(grid_values - weight[..., None]), -1), atol=1e-6
    )
    assert np.array_equal(packed.zeros, np.full_like(packed.zeros, 8)) == chosen.symmetric


def random_packed(outputs=24, inputs=64, group=32, zeros=None):
    rng = np.random.default_rng(3)
    of = lambda *shape: rng.integers(0, 16, shape, dtype=np.uint8)  # noqa: E731
    scales = rng.standard_normal((outputs, inputs // group)).astype(np.float16)
    some = of(outputs, inputs // group) if zeros is None else np.full((outputs, inputs // group), zeros, np.uint8)
    return Packed(of(outputs, inputs), scales, some)


def test_q4_0_has_every_code_and_scale():
    packed = random_packed(zeros=8)
    np.testing.assert_array_equal(gguf.dequantize(packed.q4_0(), gguf.GGMLQuantizationType.Q4_0), packed.values())
    wide = random_packed(zeros=8, group=64)
    np.testing.assert_array_equal(gguf.dequantize(wide.q4_0(), gguf.GGMLQuantizationType.Q4_0), wide.values())


def nibbles(words, axis):
    """Unpacks each int32 into eight 4-bit values along an axis, lowest bits first."""
    parts = np.stack(
        [(words.view(np.uint32) >> np.uint32(4 * position)) & np.uint32(15) for position in range(8)], axis + 1
    )
    return parts.reshape(*words.shape[:axis], -1, *words.shape[axis + 1 :]).astype(np.float32)


def from_gptq(parts, offset):
    """The weight [O, I], computed like gptqmodel's torch kernel."""
    groups, zeros = parts["g_idx"], nibbles(parts["qzeros"], 1) + offset
    return (parts["scales"].astype(np.float32)[groups] * (nibbles(parts["qweight"], 0) - zeros[groups])).T


def from_awq(parts):
    """The weight [O, I], computed like AutoAWQ's "gemm" kernel."""
    order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])

    def in_order(words):
        values = nibbles(words, 1)
        return values.reshape(len(values), -1, 8)[..., order].reshape(values.shape)

    codes = in_order(parts["qweight"])
    groups = np.arange(len(codes)) // (len(codes) // len(parts["scales"]))
    return (parts["scales"].astype(np.float32)[groups] * (codes - in_order(parts["qzeros"])[groups])).T


def test_words_have_every_code_zero_and_scale():
    for packed, offset in ((random_packed(zeros=8), 1), (random_packed(), 0)):
        np.testing.assert_array_equal(from_gptq(packed.gptq(zero_offset=offset), offset), packed.values())
        np.testing.assert_array_equal(from_awq(packed.awq()), packed.values())
    word = Packed(
        np.arange(8, dtype=np.uint8)[None].repeat(8, 0), np.ones((8, 1), np.float16), np.full((8, 1), 8, np.uint8)
    )
    assert (
        word.gptq(zero_offset=1)["qweight"][0, 0] == 0x76543210
        and word.gptq(zero_offset=1)["qzeros"][0, 0] == 0x77777777
    )
    turned = Packed(word.codes.T.copy(), word.scales, word.zeros)
    assert turned.awq()["qweight"].view(np.uint32)[0, 0] == 0x75316420


@pytest.mark.parametrize("name", FAMILIES)
def test_folded_scales_change_no_answer(name):
    model, params = ours(Source(name))
    tokens = np.random.default_rng(0).integers(0, 300, (2, 24), np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": np.arange(24)[None].repeat(2, 0)}
    logits = jax.jit(model.logits)
    before = np.asarray(logits(params, batch))
    rng, layers = np.random.default_rng(1), []
    for index in range(model.config.num_layers):
        layer = jax.tree.map(lambda x, index=index: np.asarray(x[index]), params["layers"])
        folds = awq.foldable(model.config, layer)
        assert set(folds) >= {"attention/query", "attention/out", "mlp/up"}
        for weight, channels in folds.items():
            layer = awq.fold(layer, model.config, weight, np.exp(rng.normal(size=channels.max() + 1))[channels])
        layers.append(layer)
    folded = params | {"layers": jax.tree.map(lambda *x: np.stack(x).astype(np.float32), *layers)}
    changed = jax.tree.map(lambda a, b: not np.allclose(a, b), folded, params)
    assert any(jax.tree.leaves(changed["layers"]["attention"])) and any(
        jax.tree.leaves(changed["layers"]["attention_norm"])
    )
    np.testing.assert_allclose(np.asarray(logits(folded, batch)), before, atol=2e-4 * np.abs(before).max())


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("gpt2", "gpt_neox", "phi3"))]
)  # every change of the order
def test_a_gguf_file_has_exactly_the_weights_that_were_made(name, text, tmp_path):
    source, how = Source(name), asked("gptq", text)
    path = str(tmp_path / "model.gguf")
    line = conversion.write(source, path, "gguf", None, lambda *given: None, how)
    made = made_of(source, how, q4_0=True)
    read = open_gguf(path)
    assert f"{len(made.packed)} weights in 4 bits by gptq, groups of 32" in line
    assert {t.tensor_type.name for t in gguf.GGUFReader(path).tensors if "attn_output.weight" in t.name} == {"Q4_0"}
    for tensor, value in made.tensors():
        if isinstance(value, Packed):
            got = read.read(tensor)
            np.testing.assert_array_equal(got.T if name == "gpt2" else got, value.values(), err_msg=tensor)
    nearest = made_of(source, asked("rtn", text), q4_0=True)
    original = {tensor: x.T if name == "gpt2" else x for tensor, x in source.values.items()}
    assert all(not np.array_equal(made.packed[t].codes, nearest.packed[t].codes) for t in made.packed)
    for tensor, packed in nearest.packed.items():  # equals llama.cpp's own rounding except for ties
        same = gguf.dequantize(
            gguf.quantize(original[tensor], gguf.GGMLQuantizationType.Q4_0), gguf.GGMLQuantizationType.Q4_0
        )
        assert np.mean(packed.values() == same) > 0.99


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_folder_has_exactly_the_weights_that_were_made(method, text, tmp_path):
    source, how = Source("llama"), asked(method, text)
    conversion.write(source, str(tmp_path / "hf"), "hf", None, lambda *given: None, how)
    made, stored = made_of(source, how, q4_0=False), load_file(tmp_path / "hf" / "model.safetensors")
    about = json.loads((tmp_path / "hf" / "config.json").read_text())
    said = about["quantization_config"]
    assert said["quant_method"] == method and said["bits"] == 4 and said["group_size"] == 32
    assert about["torch_dtype"] == "float16" and said.get("zero_point", said.get("sym")) is True
    for name, packed in made.packed.items():
        parts = {key: stored.pop(name.removesuffix("weight") + key) for key in ("qweight", "qzeros", "scales")}
        if method == "gptq":
            parts["g_idx"] = stored.pop(name.removesuffix("weight") + "g_idx")
        got = from_awq(parts) if method == "awq" else from_gptq(parts, 1)
        np.testing.assert_array_equal(got, packed.values())
    others = {name for name in source.values if name not in made.packed}
    assert set(stored) == others and {x.dtype for x in stored.values()} == {np.dtype("float16")}
    scales = stored["model.layers.1.input_layernorm.weight"]
    plain = source.values["model.layers.1.input_layernorm.weight"].astype(np.float16)
    assert np.array_equal(scales, plain) == (method == "gptq")  # AWQ's are folded into it


QUICK = (("gpt_neox", "awq"), ("phi3", "gptq"))


@pytest.mark.parametrize(
    ("name", "method"),
    [*QUICK]
    + [
        pytest.param(name, method, marks=pytest.mark.heavy)
        for name in (*FAMILIES, "gemma3", "qwen2")
        for method in ("awq", "gptq")
        if (name, method) not in QUICK
    ],
)
def test_a_folder_read_back_answers_as_the_model_that_was_made(name, method, text, tmp_path):
    source, how = Source(name), asked(method, text)
    conversion.write(source, str(tmp_path / "hf"), "hf", None, lambda *given: None, how)
    made, stored = made_of(source, how, q4_0=False), load_file(tmp_path / "hf" / "model.safetensors")
    back = Source(name)
    for tensor in made.packed:
        stem = tensor.removesuffix("weight")
        parts = {key: stored.pop(stem + key) for key in ("qweight", "qzeros", "scales")}
        if method == "gptq":
            parts["g_idx"] = stored.pop(f"{stem}g_idx")
        weight = from_awq(parts) if method == "awq" else from_gptq(parts, 1)
        back.values[tensor] = np.ascontiguousarray(weight.T) if name == "gpt2" else weight
    # Where AutoAWQ scales an activation's output, readers divide by these scales and do not take a missing one for 1.
    divisors = {key: stored.pop(key) for key in list(stored) if key.endswith(".act.scales")}
    wanted = [f"gpt_neox.layers.{index}.mlp.act.scales" for index in range(2)]
    assert sorted(divisors) == (wanted if (name, method) == ("gpt_neox", "awq") else [])
    for value in divisors.values():
        np.testing.assert_array_equal(value, np.ones(64, np.float16))
    back.values |= {key: value.astype(np.float32) for key, value in stored.items()}
    assert back.values.keys() == source.values.keys()
    tokens = np.random.default_rng(0).integers(0, 300, (2, 24), np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": np.arange(24)[None].repeat(2, 0)}
    model, params = ours(back)
    half = jax.tree.map(lambda x: np.asarray(x, np.float16).astype(np.float32), made.params)
    logits = jax.jit(model.logits)
    want = np.asarray(logits(dataclasses.replace(made, params=half).float_params(), batch))
    np.testing.assert_allclose(logits(params, batch), want, atol=1e-5 * np.abs(want).max())


def test_a_model_answers_nearer_to_what_it_did(text, tmp_path):
    """On text outside the calibration."""
    source, held_out = Source("llama"), tmp_path / "held_out.txt"
    held_out.write_text(cases.TEXT[6000:], encoding="utf-8")
    model, params = ours(source)
    tokens = calibration.rows(str(held_out), source.tokenizer, None, length=32, most=32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}
    logits = jax.jit(model.logits)
    before, lost = np.asarray(logits(params, batch)), {}
    for method in (*CALIBRATED, Method.RTN):
        how = Quantize(method=method, calibration=None if method == "rtn" else text, length=32, rows=128)
        made = made_of(source, how, q4_0=True)
        lost[method] = np.mean(np.square(np.asarray(logits(made.float_params(), batch)) - before))
    assert lost["gptq"] < 0.9 * lost["rtn"] and lost["awq"] < 0.95 * lost["rtn"], lost


def test_layers_run_one_by_one_answer_as_the_model():
    """So the calibration sees the inputs that the weights get in the model."""
    model, params = ours(Source("gemma2"))
    tokens = np.random.default_rng(0).integers(0, 300, (2, 24), np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": np.arange(24)[None].repeat(2, 0)}
    x = model.begin(params, batch)
    for index in range(model.config.num_layers):
        layer = jax.tree.map(lambda value, index=index: value[index], params["layers"])
        x, inputs = model.layer(layer, x, batch, index % 2)
        heads = model.config.num_heads, model.config.head_size
        assert inputs["attention/out"].shape == (2, 24, *heads) and inputs["mlp/down"].shape == (2, 24, 64)
        np.testing.assert_array_equal(inputs["attention/query"], inputs["attention/value"])
    hidden, _ = model.hidden(params | {"layers": jax.tree.map(lambda v: v * 0, params["layers"])}, batch)
    assert not np.allclose(hidden, model.hidden(params, batch)[0])
    scale = np.asarray(params["final_norm"]["scale"]) + 1
    normed = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + model.config.norm_eps) * scale
    np.testing.assert_allclose(normed, model.hidden(params, batch)[0], atol=1e-4)


def test_conversations_are_calibration_text_too(tmp_path):
    file = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": cases.TEXT[:400]}]}, {"text": cases.TEXT[400:800]}] * 3
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    made = made_of(Source("llama"), asked("gptq", str(file)), q4_0=True)
    assert len(made.packed) == 14


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
@pytest.mark.parametrize(
    "name", ["layers.1.mlp.up_proj.weight", "layers.0.input_layernorm.weight", "embed_tokens.weight"]
)
def test_values_that_are_not_finite_are_reported(name, method, text):
    source = Source("llama")
    value = source.values[f"model.{name}"] = source.values[f"model.{name}"].copy()
    value[..., 0] = np.nan
    with pytest.raises(ValueError, match=f"model.{name} has values that are not finite"):
        made_of(source, asked(method, text), q4_0=True)


def test_layers_are_reported_as_they_are_reached(text):
    source, seen = Source("llama"), []
    model, params = ours(source)
    how, show = asked("rtn", text), lambda *given: seen.append(given)
    quantization.quantize(model, params, source.config, source.tokenizer, how, q4_0=True, show=show)
    assert seen == [("quantizing", "layer 1 of 2"), ("quantizing", "layer 2 of 2")]


def test_outputs_that_make_no_word_are_reported(text):
    c = api.DecoderConfig(
        vocab_size=96, embed_dim=32, num_layers=1, num_heads=8, num_kv_heads=1, head_dim=4, mlp_dim=32
    )
    model = api.build(c)
    params = jax.tree.map(lambda s: np.ones(s.shape, np.float32), model.abstract_params)
    values = hf_config.to_hf(c)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_proj.weight has 4 outputs, .* multiple of 8: use gguf"):
        quantization.quantize(model, params, values, {}, asked("rtn", text), q4_0=False)
    assert quantization.quantize(model, params, values, {}, asked("rtn", text), q4_0=True).packed


def test_a_tokenizer_of_another_model_is_reported(text):
    source = Source("llama")
    model, params = ours(source)
    files = {"tokenizer.json": b"{", "tokenizer_config.json": b"{}"}
    with pytest.raises(
        ValueError, match="the tokenizer of --from cannot be used: tokenizer.json is not a tok"
    ) as error:
        quantization.quantize(model, params, source.config, files, asked("gptq", text), q4_0=True)
    assert "/tmp" not in str(error.value)
    more = json.loads(source.tokenizer["tokenizer.json"])
    size = model.config.vocab_size
    more["model"]["vocab"] = {piece: i + size * (piece == "e") for piece, i in more["model"]["vocab"].items()}
    tokenizer = source.tokenizer | {"tokenizer.json": json.dumps(more).encode()}
    with pytest.raises(ValueError, match="the tokenizer gives the id .*, and the model has vocab_size"):
        quantization.quantize(model, params, source.config, tokenizer, asked("gptq", text), q4_0=True)


def test_conversations_need_a_template(tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    with pytest.raises(ValueError, match="chats.jsonl:1 is a conversation, and --from has no tokenizer.json"):
        calibration.rows(str(tmp_path / "chats.jsonl"), {}, ByteVocabulary(), length=32, most=8)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--quantize=gptq"], "--quantize=gptq needs --calibration=FILE"),
        (["--quantize=rtn", "--calibration=x"], "is for gptq and awq, not for rtn"),
        (["--calibration=x"], "--calibration=x needs --quantize"),
        (["--group_size=64"], "--group_size=64 needs --quantize"),
        (["--quantize=rtn", "--group_size=48"], "--group_size=48 must be 32, 64 or 128"),
        (["--quantize=rtn", "--group_size=64"], "--group_size=64 must divide the weights' inputs (32, 64): try 32"),
        (["--quantize=rtn", "--dtype=bf16"], "--dtype=bf16 with --quantize=rtn, whose hf has f16: leave it out"),
        (["--quantize=rtn", "--format=capibara"], "--quantize=rtn is for hf and gguf"),
        (["--quantize=awq", "--calibration=nowhere.txt"], "--calibration=nowhere.txt cannot be read"),
        (["--quantize=awq", "--calibration=SHORT"], "tokens, must have at least 512"),
    ],
)
def test_mistakes_are_one_line(argv, message, tmp_path, capsys):
    source = Source("llama")
    conversion.write(source, str(tmp_path / "hf"), "hf", "f32", lambda *given: None)
    (tmp_path / "short.txt").write_text("short")
    argv = [arg.replace("SHORT", str(tmp_path / "short.txt")) for arg in argv]
    assert exits.run_verb(convert.main, [f"--from={tmp_path}/hf", f"--to={tmp_path}/out", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and message in captured.err and not (tmp_path / "out").exists()


def test_other_models_are_refused(text):
    with pytest.raises(ValueError, match="is for decoders without experts, not for mixtral"):
        made_of(Source("mixtral"), asked("gptq", text), q4_0=True)


@pytest.mark.heavy
def test_llama_cpp_answers_as_the_model_that_was_made(text, tmp_path):
    """Equal except for the inputs of products, which llama.cpp rounds to 8 bits."""
    pytest.importorskip("xllamacpp")
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
    from gguf_files import LlamaCpp

    source, path = Source("llama"), str(tmp_path / "model.gguf")
    conversion.write(source, path, "gguf", None, lambda *given: None, asked("gptq", text))
    ids = [int(i) for i in np.random.default_rng(0).integers(2, 300, 12)]
    with LlamaCpp(sys.executable, path) as peer:
        best = peer.ask("continue", ids=ids, count=1, best=cases.VOCAB)["best"][0]
    batch = {
        "tokens": np.asarray([ids], np.int32),
        "positions": np.arange(12)[None],
        "segment_ids": np.ones((1, 12), int),
    }
    told = {}
    for name, foreign in (("made", open_gguf(path)), ("before", source)):
        model, params = ours(foreign)
        logits = np.asarray(model.logits(params, batch))[0, -1]
        ours_of = logits - np.log(np.sum(np.exp(logits)))
        told[name] = np.sqrt(np.mean([np.square(ours_of[token] - theirs) for token, theirs in best]))
    assert told["made"] < 0.2 * told["before"], told


@pytest.mark.parametrize(
    "layers",
    [
        dict(mixer=api.Mamba(inner_dim=32, step_rank=4), layer_pattern=("recurrent",), mlp_dim=0, positions="none"),
        dict(mlp_dim=0),
    ],
    ids=["recurrent", "attention alone"],
)
@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_layers_of_one_branch_are_refused(layers, method, text):
    config = api.DecoderConfig(**dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=64) | layers)
    model, source = api.build(config), Source("llama")
    with pytest.raises(UserError, match="decoders whose layers all have attention and an MLP, not for llama"):
        quantization.quantize(model, {}, source.config, source.tokenizer, asked(method, text), q4_0=False)
