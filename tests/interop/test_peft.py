"""PEFT adapters against PEFT's own answers in models/golden/peft.json (written by golden/make_peft.py), and back."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.interop.peft import folder as peft
from capibara.models import api
from capibara.models.api import DecoderConfig, Gemma3nConfig, Lora
from capibara.models.layers.rope import Rope

safetensors = pytest.importorskip("safetensors.numpy")
GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "models" / "golden"
ANSWERS = json.loads((GOLDEN / "peft.json").read_text())
sys.path.insert(0, str(GOLDEN))
import answers  # noqa: E402

SIZES = dict(vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, dtype="float32", norm_eps=1e-5)
LLAMA = SIZES | dict(num_kv_heads=2, head="separate")
NORMS = dict(norm="layer", bias="all")
FAMILIES = {
    "llama": LLAMA,
    "qwen3": LLAMA | dict(head_dim=16, qk_norm="head", rope=Rope(theta=1e6)),
    "gpt2": SIZES | NORMS | dict(mlp_dim=128, activation="gelu", positions="learned", max_length=64),
    "gpt_neox": SIZES
    | NORMS
    | dict(embed_dim=64, activation="gelu_exact", residual="parallel", head="separate", rope=Rope(fraction=0.25)),
    "phi3": LLAMA | dict(layer_pattern=("local",), window=7),
    "gemma3n": SIZES
    | dict(num_layers=8, num_kv_heads=2, head_dim=16, norm_eps=1e-6, streams=3, laurel_rank=6, per_layer_dim=8)
    | dict(layer_pattern=("local",) * 3 + ("global",), window=8, rope=Rope(theta=1e6, local_theta=10_000.0))
    | dict(per_layer_vocab_size=90, kv_shared_layers=4, activation_sparsity=(0.8,) * 3, logit_soft_cap=3.0),
}
TYPES = {"gemma3n": "gemma3n_text"}  # the name in config.json, where it differs from ours
MORE = {"qwen2": SIZES | dict(num_kv_heads=2, bias="qkv", rope=Rope(theta=1e6))}


def base_of(name):
    """The plain model, and the reference's parameters."""
    model = api.build((Gemma3nConfig if name == "gemma3n" else DecoderConfig)(**(FAMILIES | MORE)[name]))
    names = tree.path_names(model.abstract_params)
    shapes = {name: leaf.shape for name, leaf in zip(names, jax.tree.leaves(model.abstract_params), strict=True)}
    values = tensors.read(tables.of(TYPES.get(name, name), shapes, {}), shapes, answers.draw)
    return model, tree.map_with_names(lambda name, _: values[name], model.abstract_params)


@pytest.fixture
def folder(request, tmp_path):
    """The folder that PEFT wrote."""
    answer = ANSWERS[request.param]
    drawn = {name: answers.draw(name, tuple(shape)) for name, shape in answer["tensors"].items()}
    safetensors.save_file(drawn, tmp_path / peft.WEIGHTS)
    (tmp_path / peft.CONFIG).write_text(json.dumps(answer["config"]))
    return tmp_path


FUSED = (("query", "key", "value"), ("gate", "up"))


def answered(model, params):
    """Logits of the last row, at the recorded positions."""
    tokens = np.array(ANSWERS["tokens"], np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    got = np.asarray(jax.jit(model.logits)(params, batch))[-1]
    return got[np.ix_(ANSWERS["positions"], ANSWERS["entries"])]


def written_again(folder, params, model, name):
    """The folder that we write from the loaded adapter, with the same tensors."""
    again = folder / "again"
    peft.write_peft(str(again), params, model, name)
    first, second = (safetensors.load_file(path / peft.WEIGHTS) for path in (folder, again))
    assert first.keys() == second.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(second[key], value)
    return again


LAYERS = {
    "llama:layers": dict(targets=("layers/1/attention/query", "layers/1/mlp/down")),
    "llama:patterns": dict(
        targets=("layers/0/attention/query", "layers/0/attention/key", "layers/mlp/up"),
        rank_pattern=(("layers/0/attention/key", 3), ("layers/1/mlp/up", 2)),
        alpha_pattern=(("layers/0/attention/query", 1.0), ("layers/0/mlp/up", 5.0), ("layers/1/mlp/up", 5.0)),
    ),
    "llama:parameters": dict(targets=("layers/attention/out", "layers/mlp/up")),
    "qwen2:biases": dict(
        targets=("layers/attention/query", "layers/attention/out"), modules_to_save=("layers/attention/query_bias",)
    ),
    "gpt2:biases": dict(fused=FUSED[:1]),
}
KINDS = {"qwen2:biases": "lora_only", "gpt2:biases": "all"}


@pytest.mark.parametrize(("folder", "case"), [(name, name) for name in LAYERS], indirect=["folder"], ids=LAYERS)
def test_adapters_of_some_layers_and_biases_answer_as_in_peft(folder, case):
    name = case.partition(":")[0]
    plain, base = base_of(name)
    lora, adapters = peft.read_peft(str(folder), plain, name)
    assert {field: getattr(lora, field) for field in LAYERS[case]} == LAYERS[case]
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    params = jax.jit(model.adapt)(base, jax.random.key(0))
    assert tree.path_names(adapters) == tree.path_names(model.trained(params))
    params = tree.joined(adapters, model.frozen(params))
    np.testing.assert_allclose(answered(model, params), ANSWERS[case]["logits"], rtol=0, atol=2e-4)
    np.testing.assert_allclose(
        answered(plain, jax.jit(model.merge)(params)), ANSWERS[case]["logits"], rtol=0, atol=2e-4
    )
    again = written_again(folder, params, model, name)
    config = json.loads((again / peft.CONFIG).read_text())
    assert config["bias"] == KINDS.get(case, "none") and config["modules_to_save"] is None
    read, values = peft.read_peft(str(again), plain, name)
    assert sorted(read.targets) == sorted(lora.targets)
    jax.tree.map(np.testing.assert_array_equal, values, adapters)


def test_biases_that_peft_does_not_train_together_are_refused(tmp_path):
    plain, base = base_of("qwen2")
    lora = Lora(rank=2, targets=("query",), modules_to_save=("key_bias",))
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    with pytest.raises(
        UserError, match="modules_to_save has model.layers.0.self_attn.k_proj.bias but not all of either"
    ):
        peft.write_peft(str(tmp_path / "adapter"), jax.jit(model.adapt)(base, jax.random.key(0)), model, "qwen2")


@pytest.mark.parametrize(("folder", "name"), [(name, name) for name in FAMILIES], indirect=["folder"], ids=FAMILIES)
def test_adapters_of_peft_answer_as_there_and_are_written_as_they_were(folder, name):
    plain, base = base_of(name)
    model_type = TYPES.get(name, name)
    lora, adapters = peft.read_peft(str(folder), plain, model_type)
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    assert tree.path_names(adapters) == tree.path_names(model.trained(model.abstract_params))
    params = tree.joined(adapters, base)
    np.testing.assert_allclose(answered(model, params), ANSWERS[name]["logits"], rtol=0, atol=2e-4)
    again = written_again(folder, params, model, model_type)
    assert lora.fused == {"gpt2": FUSED[:1], "gpt_neox": FUSED[:1], "phi3": FUSED}.get(name, ())
    config, want = json.loads((again / peft.CONFIG).read_text()), ANSWERS[name]["config"]
    assert sorted(config.pop("target_modules")) == sorted(want["target_modules"])
    assert config["modules_to_save"] == want["modules_to_save"]
    for field in ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "bias"):
        assert config[field] == want[field], field
    assert config["fan_in_fan_out"] == want["fan_in_fan_out"]


@pytest.mark.parametrize(("name", "rslora"), [("gpt2", False), ("phi3", True), ("gpt_neox", False)])
def test_adapters_of_parts_of_a_fused_tensor_become_one(tmp_path, name, rslora):
    """Our adapters of query and value, each with its rank, become one of PEFT's; read back it computes the same."""
    plain, base = base_of(name)
    lora = Lora(rank=2, alpha=4.0, targets=("query", "value"), rank_pattern=(("value", 3),), rslora=rslora)
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    new = jax.jit(model.adapt)(base, jax.random.key(0))
    params = tree.map_with_names(lambda n, x: answers.draw(n, x.shape) if n.endswith("_lora/b") else x, new)
    peft.write_peft(str(tmp_path / "adapter"), params, model, name)
    read, adapters = peft.read_peft(str(tmp_path / "adapter"), plain, name)
    assert read.rank == 5 and len(read.targets) == 3
    theirs = api.build(dataclasses.replace(plain.config, lora=read))
    want, got = model.merge(params), theirs.merge(tree.joined(adapters, base))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(peft_type="IA3"), "has peft_type = 'IA3', must be one of LORA"),
        (dict(bias="some"), "has bias = 'some'"),
        (
            dict(trainable_token_indices=[0]),
            "embed_tokens.token_adapter.trainable_tokens_delta is missing in the adapter",
        ),
        (dict(trainable_token_indices=dict(lm_head=[0])), "lm_head.token_adapter.trainable_tokens_delta is missing"),
        (dict(trainable_token_indices=dict(norm=[0])), "must be tokens of model.embed_tokens or of the head"),
        (dict(target_parameters=["mixer.a_log"]), r"has target_parameters = \['mixer.a_log'\]"),
        ("list", "is no JSON object"),
        (dict(r=None), "has r = None, must be an integer"),
        (dict(r="x"), "has r = 'x', must be an integer"),
        (dict(lora_alpha=None), "has lora_alpha = None, must be a number"),
        (dict(lora_alpha="x"), "has lora_alpha = 'x', must be a number"),
        (dict(alpha_pattern=["a"]), r"has alpha_pattern = \['a'\], must be an object"),
        (dict(alpha_pattern={"(": 3}), "has alpha_pattern = "),
        (dict(alpha_pattern={"q": "x"}), "has alpha_pattern = "),
        (dict(base_model_name_or_path=5), "has base_model_name_or_path = 5, must be a text"),
        ("gone", r"has no model\.layers\.1\.self_attn\.q_proj\.lora_B\.weight"),
        ("other", "by which PEFT gives model.embed_tokens no adapter"),
        ("shape", r"has the shape \[4, 31\], must be \[4, 32\] in this model"),
    ],
    ids=str,
)
def test_what_is_no_adapter_of_ours_is_refused(folder, change, told):
    config, weights = folder / peft.CONFIG, folder / peft.WEIGHTS
    values, layer = safetensors.load_file(weights), "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    if isinstance(change, dict):
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    elif change == "list":
        config.write_text("[]")
    elif change == "gone":
        del values[layer + "B.weight"]
    elif change == "other":
        values["base_model.model.model.embed_tokens.lora_embedding_A"] = np.zeros((4, 96), np.float32)
    else:
        values[layer + "A.weight"] = np.zeros((4, 31), np.float32)
    safetensors.save_file(values, weights)
    with pytest.raises(UserError, match=told):
        peft.read_peft(str(folder), base_of("llama")[0], "llama")


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("no use_dora", r"has use_dora = False, by which PEFT ignores model\.layers\.0\.\S+\.lora_magnitude_vector"),
        ("no magnitude", r"has use_dora = True and no model\.layers\.0\.\S+\.lora_magnitude_vector"),
        ("no magnitudes", r"has use_dora = True and no model\.layers\.0\.\S+\.lora_magnitude_vector"),
        ("a bias of B", r"has lora_bias = False, by which PEFT ignores model\.layers\.0\.\S+\.lora_B\.bias"),
    ],
)
def test_tensors_that_the_fields_contradict_are_refused(folder, change, told):
    config, weights = folder / peft.CONFIG, folder / peft.WEIGHTS
    values = safetensors.load_file(weights)
    magnitudes = sorted(name for name in values if "lora_magnitude_vector" in name)
    assert magnitudes
    if change == "no use_dora":
        config.write_text(json.dumps(json.loads(config.read_text()) | dict(use_dora=False)))
    elif change == "a bias of B":
        name = next(name for name in sorted(values) if name.endswith("lora_B.weight"))
        values[name.removesuffix("weight") + "bias"] = np.zeros(len(values[name]), np.float32)
    else:
        for name in magnitudes[: 1 if change == "no magnitude" else None]:
            del values[name]
    safetensors.save_file(values, weights)
    with pytest.raises(UserError, match=told):
        peft.read_peft(str(folder), base_of("qwen3")[0], "qwen3")


def test_existing_targets_and_missing_sources_are_refused(tmp_path):
    plain, base = base_of("llama")
    with pytest.raises(UserError, match="adapter_config.json cannot be read"):
        peft.read_peft(str(tmp_path), plain, "llama")
    with pytest.raises(UserError, match="DecoderConfig.lora is None"):
        peft.write_peft(str(tmp_path / "new"), base, plain, "llama")
    model = api.build(dataclasses.replace(plain.config, lora=Lora(rank=2)))
    with pytest.raises(UserError, match="must be a new folder"):
        peft.write_peft(str(tmp_path), base, model, "llama")


def test_adapters_of_recurrent_layers_are_refused(tmp_path):
    mixer = api.Mamba(inner_dim=32, state_dim=5, step_rank=6)
    sizes = dict(vocab_size=96, embed_dim=16, num_layers=2, num_heads=1, mlp_dim=0, positions="none")
    config = DecoderConfig(
        **sizes, mixer=mixer, layer_pattern=("recurrent",), lora=Lora(rank=2, targets=("all-linear",))
    )
    model = api.build(config)
    with pytest.raises(
        UserError, match="a model whose layers have states, which PEFT's adapters cannot have here: merge them"
    ):
        peft.write_peft(str(tmp_path / "adapter"), model.abstract_params, model, "mamba")
