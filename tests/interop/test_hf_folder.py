"""Hugging Face folders: every family is written and read back bit for bit on any mesh; incomplete ones are refused."""

import dataclasses
import json
import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from capibara import sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig, Moe, Rope
from capibara.sharding import Plan

SIZES = dict(vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, dtype="float32")
LLAMA = DecoderConfig(**SIZES, norm_eps=1e-5, head="separate")
MHA = dataclasses.replace(LLAMA, num_kv_heads=None)
GEMMA = dataclasses.replace(
    LLAMA, head="tied", head_dim=16, norm_scale="offset", activation="geglu", embedding_scale="sqrt_dim"
)
GEMMA2 = dataclasses.replace(
    GEMMA, norm_placement="sandwich", layer_pattern=("local", "global"), window=8, attention_scale=0.125
)
T5 = EncoderDecoderConfig(
    **(SIZES | dict(num_kv_heads=None)), num_encoder_layers=3, head_dim=16, relative_buckets=8, relative_distance=20
)
FAMILIES = {
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, layer_pattern=("local",), window=8),
    "gemma": GEMMA,
    "gemma2": dataclasses.replace(GEMMA2, attention_soft_cap=2.0, logit_soft_cap=3.0),
    "gemma3_text": dataclasses.replace(
        GEMMA2, num_layers=4, layer_pattern=(*("local",) * 3, "global"), qk_norm="head", rope=Rope(local_theta=100.0)
    ),
    "qwen2": dataclasses.replace(LLAMA, bias="qkv", head="tied"),
    "qwen3": dataclasses.replace(LLAMA, head_dim=16, qk_norm="head"),
    "mixtral": dataclasses.replace(LLAMA, moe=Moe(num_experts=4)),
    "qwen3_moe": dataclasses.replace(LLAMA, qk_norm="head", moe=Moe(num_experts=4, expert_dim=24)),
    "phi3": LLAMA,
    "gpt2": dataclasses.replace(
        MHA, norm="layer", bias="all", activation="gelu", positions="learned", max_length=64, head="tied"
    ),
    "gpt_neox": dataclasses.replace(
        MHA, norm="layer", bias="all", activation="gelu_exact", residual="parallel", rope=Rope(fraction=0.5)
    ),
    "t5": dataclasses.replace(T5, activation="relu", head="tied"),
    "t5_1_1": T5,
    "bert": EncoderConfig(**(SIZES | dict(num_kv_heads=None)), max_length=40),
}
MESHES = {"fsdp=4 x tensor=2": Plan(batch_size=8, fsdp=4, tensor=2), "expert=4": Plan(batch_size=8, fsdp=2, expert=4)}


def host_params(model, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32).astype(dtype), model.abstract_params)


def on_one(model):
    return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), model.abstract_params)


def written(folder, model, params, model_type=None, dtype="float32", **options):
    values = hf_config.to_hf(model.config, {"model_type": model_type}, dtype=dtype)
    assert model_type in (None, values["model_type"])
    shapes = open_model.hf_shapes(model, values["model_type"])
    tensors = open_model.hf_tensors(params, model, values["model_type"])
    hf_folder.save_hf(str(folder), values, shapes, tensors, {"tokenizer.json": b"{}"}, dtype=dtype, **options)
    return str(folder)


def assert_equal(got, want):
    names = tree.path_names(want)
    for name, a, b in zip(names, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_read_back_to_the_bit(name, tmp_path):
    model = api.build(FAMILIES[name])
    params = host_params(model)
    folder = written(tmp_path / "model", model, params, name.removesuffix("_1_1"))
    foreign = open_model.open_model(folder)
    again = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    assert hf_config.resolved(again.config) == hf_config.resolved(model.config)
    assert_equal(open_model.load_params(foreign, again, on_one(again)), params)
    assert foreign.tokenizer["tokenizer.json"] == b"{}"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gpt_neox", "mixtral"])
def test_each_device_holds_its_shards(name, mesh, tmp_path, monkeypatch):
    model, plan = api.build(FAMILIES[name]), MESHES[mesh]
    params = host_params(model)
    foreign = open_model.open_model(written(tmp_path / "model", model, params))
    targets = sharding.shardings(sharding.make_mesh(plan), plan.rules, model.axes, model.abstract_params)
    got = open_model.load_params(foreign, model, targets)
    assert_equal(got, params)
    assert [x.sharding for x in jax.tree.leaves(got)] == jax.tree.leaves(targets)
    monkeypatch.setattr(open_model, "BUFFER_BYTES", 1000)  # a few shards at a time
    assert_equal(open_model.load_params(foreign, model, targets), params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_dtypes(dtype, tmp_path):
    model = api.build(LLAMA)
    params = host_params(model)
    foreign = open_model.open_model(written(tmp_path / "model", model, params, dtype=dtype))
    kind = hf_folder.DTYPES[dtype]
    assert foreign.read("lm_head.weight").dtype == kind and foreign.config["dtype"] == dtype
    want = jax.tree.map(lambda x: x.astype(kind).astype(np.float32), params)
    assert_equal(open_model.load_params(foreign, model, on_one(model)), want)
    half = open_model.load_params(foreign, model, on_one(model), dtype=ml_dtypes.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {np.dtype(ml_dtypes.bfloat16)}


def test_a_value_that_float16_does_not_have_is_refused(tmp_path):
    model = api.build(LLAMA)
    params = host_params(model)
    params["output"][0, 0] = 1e6
    with pytest.raises(UserError, match=r"lm_head.weight has values up to 1e\+06, float16 ends at 65504"):
        written(tmp_path / "model", model, params, dtype="float16")
    assert os.listdir(tmp_path) == []


def test_a_large_model_has_several_files_and_an_index(tmp_path):
    model = api.build(LLAMA)
    params = host_params(model)
    folder = written(tmp_path / "model", model, params, shard_bytes=20_000)
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all(os.path.getsize(os.path.join(folder, name)) < 22_000 for name in files)
    foreign = open_model.open_model(folder)
    assert_equal(open_model.load_params(foreign, model, on_one(model)), params)
    os.unlink(os.path.join(folder, files[1]))
    with pytest.raises(UserError, match=f"{files[1]} is missing"):
        open_model.open_model(folder)


OTHER_NAMES = {
    "llama": lambda name: name.removeprefix("model."),
    "gpt2": lambda name: name.removeprefix("transformer."),
    "gpt_neox": lambda name: name.replace("embed_out", "lm_head"),
    "bert": lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    ),
    "gemma3_text": lambda name: f"language_model.{name}",
}
BUFFERS = {
    "gpt2": ["h.0.attn.bias", "h.1.attn.masked_bias", "lm_head.weight"],
    "gpt_neox": ["gpt_neox.layers.0.attention.rotary_emb.inv_freq", "gpt_neox.layers.1.attention.bias"],
    "bert": ["bert.pooler.dense.weight", "cls.seq_relationship.bias", "bert.embeddings.position_ids"],
    "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
    "gemma3_text": ["vision_tower.x.weight", "multi_modal_projector.y"],
}


class Renamed:
    """A folder's model with other tensor names and more tensors."""

    def __init__(self, foreign, rename, more=()):
        self.config, self.tokenizer, self.about, self._foreign = foreign.config, {}, {}, foreign
        self._names = {rename(name): name for name in foreign.shapes()} | dict.fromkeys(more)

    def shapes(self):
        of = self._foreign.shapes()
        return {name: (1,) if stored is None else of[stored] for name, stored in self._names.items()}

    def read(self, name):
        return self._foreign.read(self._names[name])


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_versions_are_known(name, tmp_path):
    model = api.build(FAMILIES[name])
    params = host_params(model)
    foreign = open_model.open_model(written(tmp_path / "model", model, params, name))
    other = Renamed(foreign, OTHER_NAMES[name], BUFFERS[name])
    assert set(other.shapes()) != set(foreign.shapes())
    assert_equal(open_model.load_params(other, model, on_one(model)), params)


@pytest.mark.parametrize("state_dict", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_a_t5_1_1_is_the_embedding_where_its_folder_has_none(tied, state_dict, tmp_path):
    """transformers 5 writes the same config.json for both: tied, and without a scale."""
    config = dataclasses.replace(T5, head="tied", head_scale="none") if tied else T5
    model = api.build(config)
    params = host_params(model)
    folder = pathlib.Path(written(tmp_path / "model", model, params, state_dict=state_dict))
    values = json.loads((folder / "config.json").read_text())
    assert values.get("scale_decoder_outputs", True) is not tied and values["tie_word_embeddings"] is tied
    said = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    (folder / "config.json").write_text(json.dumps(values | said))
    foreign = open_model.open_model(str(folder))
    assert ("lm_head.weight" in foreign.shapes()) is (state_dict or not tied) and ("output" in params) is not tied
    assert hf_config.resolved(hf_config.from_hf(foreign.config)) == hf_config.resolved(config)
    assert_equal(open_model.load_params(foreign, model, on_one(model)), params)


def test_a_run_begins_from_a_folder_of_its_model(tmp_path, caplog):
    model, plan = api.build(LLAMA), MESHES["fsdp=4 x tensor=2"]
    params = host_params(model)
    folder = written(tmp_path / "model", model, params)
    targets = sharding.shardings(sharding.make_mesh(plan), plan.rules, model.axes, model.abstract_params)
    as_in_run = lambda s, n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=n)  # noqa: E731
    target = jax.tree.map(as_in_run, model.abstract_params, targets)
    assert_equal(open_model.loader(folder, model)(target), params)
    mixed = target | {"output": jax.ShapeDtypeStruct(params["output"].shape, "bfloat16", sharding=targets["output"])}
    read = open_model.loader(folder, model)(mixed)
    assert_equal(read, params | {"output": params["output"].astype("bfloat16")})
    assert not caplog.records
    longer = api.build(dataclasses.replace(LLAMA, rope=Rope(theta=5e5), dtype="bfloat16"))
    assert_equal(open_model.loader(folder, longer)(target), params)
    assert "another rope than this run's" in caplog.text
    other = api.build(dataclasses.replace(LLAMA, norm_eps=1e-6))
    with pytest.raises(UserError, match=r"DecoderConfig.norm_eps is 1e-06, .*model was trained with 1e-05: set it"):
        open_model.loader(folder, other)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    model = api.build(LLAMA)
    foreign = open_model.open_model(written(tmp_path / "model", model, host_params(model)))
    renamed = Renamed(foreign, lambda name: name.replace("q_proj", "qq_proj"))
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj.weight, .* are missing in the checkpoint"):
        open_model.load_params(renamed, model, on_one(model))
    with pytest.raises(
        UserError, match=r"^model.layers.0.self_attn.q_proj.bias is in the checkpoint, not in the model"
    ):
        more = Renamed(foreign, str, ["model.layers.0.self_attn.q_proj.bias"])
        open_model.load_params(more, model, on_one(model))
    for head in ("score.weight", "v_head.summary.weight"):
        with pytest.raises(UserError, match=f"^{head} is of a classification or scoring head, which is not supported"):
            open_model.load_params(Renamed(foreign, str, [head]), model, on_one(model))
    wider = api.build(dataclasses.replace(LLAMA, mlp_dim=64))
    with pytest.raises(UserError, match=r"gate_proj.weight has the shape \[48, 32\], must be \[64, 32\]"):
        open_model.load_params(foreign, wider, on_one(wider))


def test_an_incomplete_folder_is_refused_in_one_line(tmp_path):
    model = api.build(LLAMA)
    folder = written(tmp_path / "model", model, host_params(model))
    weights, about = os.path.join(folder, "model.safetensors"), os.path.join(folder, "config.json")
    os.truncate(weights, os.path.getsize(weights) - 100)
    messages = [_refusal(folder)]
    os.truncate(weights, 5)
    messages.append(_refusal(folder))
    os.rename(weights, os.path.join(folder, "pytorch_model.bin"))
    messages.append(_refusal(folder))
    with open(about, "w") as file:
        file.write('{"model_type": ')
    messages.append(_refusal(folder))
    os.unlink(about)
    messages += [_refusal(folder), _refusal(str(tmp_path / "none"))]
    wanted = ["is cut short or corrupted", "is cut short or corrupted", "pytorch_model.bin is cut short"]
    wanted += ["config.json cannot be read", "config.json does not exist", "none does not exist"]
    for message, part in zip(messages, wanted, strict=True):
        assert part in message and "\n" not in message


def _refusal(path):
    with pytest.raises(UserError) as error:
        open_model.open_model(path)
    return str(error.value)


def test_a_write_that_fails_leaves_nothing_and_nothing_is_written_over(tmp_path):
    model = api.build(LLAMA)
    values = hf_config.to_hf(model.config)
    shapes = open_model.hf_shapes(model, "llama")

    def failing():
        yield next(open_model.hf_tensors(host_params(model), model, "llama"))
        raise RuntimeError("the host goes away")

    with pytest.raises(RuntimeError):
        hf_folder.save_hf(str(tmp_path / "model"), values, shapes, failing(), {})
    assert os.listdir(tmp_path) == []
    folder = written(tmp_path / "model", model, host_params(model))
    with open(os.path.join(folder, "generation_config.json")) as file:
        assert json.load(file) == {}
    with pytest.raises(UserError, match="must be a new folder"):
        written(folder, model, host_params(model))


def test_a_write_keeps_files_with_similar_names(tmp_path):
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "mine.txt").write_text("mine")
    model = api.build(LLAMA)
    folder = written(tmp_path / "model", model, host_params(model))
    assert sorted(os.listdir(tmp_path)) == ["model", "model.partial"] and os.listdir(tmp_path / "model.partial")
    (tmp_path / "like").mkdir()
    assert os.stat(folder).st_mode == os.stat(tmp_path / "like").st_mode
    with pytest.raises(UserError, match="cannot be written"):
        written(tmp_path / "model" / "config.json" / "below", model, host_params(model))
