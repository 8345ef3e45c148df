"""Modules for multi-token prediction in Hugging Face folders: their names, both ways, and folders without them."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import SingleDeviceSharding

from capibara.consensus.merging import Linear, Passthrough
from capibara.core.types import UserError
from capibara.interop import conversion, open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.merge.merging import Merge, merge
from capibara.models import api

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "families"))

from family_cases import CASES  # noqa: E402

NEXTN, QWEN = "num_nextn_predict_layers", "mtp_num_hidden_layers"
KEYS = {
    "deepseek_v3": NEXTN,
    "glm4_moe": NEXTN,
    "glm4_moe_lite": NEXTN,
    "qwen3_next": NEXTN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "ernie4_5_moe": NEXTN,
    "exaone_moe": NEXTN,
}
# Names that vLLM 0.32's loaders and published files have; deepseek's case has three layers.
PUBLISHED = {
    "deepseek_v3": (
        "model.layers.3.enorm.weight model.layers.3.hnorm.weight model.layers.3.eh_proj.weight "
        "model.layers.3.shared_head.norm.weight model.layers.3.shared_head.head.weight model.layers.3.embed_tokens.weight "
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight model.layers.3.mlp.experts.7.down_proj.weight "
        "model.layers.3.mlp.gate.e_score_correction_bias"
    ),
    "glm4_moe": "model.layers.3.eh_proj.weight model.layers.3.self_attn.q_norm.weight model.layers.3.mlp.gate.weight",
    "qwen3_next": (
        "mtp.fc.weight mtp.pre_fc_norm_embedding.weight mtp.pre_fc_norm_hidden.weight mtp.norm.weight "
        "mtp.layers.0.self_attn.q_proj.weight mtp.layers.0.mlp.shared_expert_gate.weight"
    ),
    "qwen3_5": "mtp.fc.weight mtp.layers.0.self_attn.q_norm.weight mtp.layers.0.mlp.gate_proj.weight mtp.norm.weight",
    "ernie4_5_moe": (
        "model.mtp_emb_norm.0.weight model.mtp_hidden_norm.0.weight model.mtp_linear_proj.0.weight "
        "model.mtp_block.0.self_attn.q_proj.weight model.mtp_block.0.mlp.gate_proj.weight"
    ),
    "exaone_moe": "mtp.fc.weight mtp.layers.0.mlp.gate_proj.weight",
}


def values(name, count=1):
    return {key: value for key, value in CASES[name].items() if key not in (NEXTN, QWEN)} | {KEYS[name]: count}


def saved(folder, name, count=1, changed=lambda tensors: tensors, **config):
    """Writes a folder of random weights; returns its tensors."""
    rng = np.random.default_rng(0)
    model = api.build(hf_config.from_hf(values(name, count)))
    written = hf_config.to_hf(model.config, values(name, count))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), model.abstract_params)
    tensors = dict(open_model.hf_tensors(params, model, written["model_type"]))
    tensors = changed(tensors)
    shapes = {item: value.shape for item, value in tensors.items()}
    hf_folder.save_hf(str(folder), written | config, shapes, tensors.items(), {}, dtype="float32")
    return tensors


def loaded(folder):
    foreign = open_model.open_model(str(folder))
    model = api.build(hf_config.from_hf(foreign.config))
    here = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    return model, open_model.load_params(foreign, model, here), foreign


def without(*ends):
    return lambda tensors: {name: x for name, x in tensors.items() if not any(end in name for end in ends)}


@pytest.mark.parametrize("name", KEYS)
def test_folders_are_read_and_written_bit_by_bit(tmp_path, name):
    tensors = saved(tmp_path / "a", name)
    model, params, foreign = loaded(tmp_path / "a")
    assert model.config.mtp_windows and set(PUBLISHED.get(name, "").split()) <= tensors.keys()
    config = hf_config.to_hf(model.config, foreign.config)
    assert config[KEYS[name]] == 1 and hf_config.from_hf(config) == model.config
    again = dict(open_model.hf_tensors(params, model, config["model_type"]))
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[item], tensors[item]) for item in tensors)
    stored = dict(open_model.foreign_tensors(foreign, model, config["model_type"]))
    assert all(np.array_equal(stored[item], tensors[item]) for item in tensors)


def test_two_modules_follow_the_last_layer(tmp_path):
    tensors = saved(tmp_path / "a", "glm4_moe", 2)
    assert {"model.layers.3.eh_proj.weight", "model.layers.4.eh_proj.weight"} <= tensors.keys()
    assert not np.array_equal(tensors["model.layers.3.eh_proj.weight"], tensors["model.layers.4.eh_proj.weight"])
    model, params, _ = loaded(tmp_path / "a")
    assert model.config.mtp.layers == 2
    joined = np.concatenate([params["mtp"][name][1] for name in ("from_embedding", "from_hidden")])
    np.testing.assert_array_equal(joined.T, tensors["model.layers.4.eh_proj.weight"])


def test_the_embedding_comes_first_in_the_projection(tmp_path):
    tensors = saved(tmp_path / "a", "qwen3_next")
    _, params, _ = loaded(tmp_path / "a")
    D = tensors["mtp.norm.weight"].size
    np.testing.assert_array_equal(params["mtp"]["from_embedding"][0].T, tensors["mtp.fc.weight"][:, :D])
    np.testing.assert_array_equal(
        params["mtp"]["embedding_norm"]["scale"][0], tensors["mtp.pre_fc_norm_embedding.weight"]
    )


@pytest.mark.parametrize("name, of_module", [("deepseek_v3", "layers.3."), ("qwen3_5", "mtp.")])
def test_a_folder_without_the_tensors_is_read_without_the_modules(tmp_path, name, of_module, caplog):
    saved(tmp_path / "a", name, changed=without(of_module))
    with caplog.at_level(logging.WARNING):
        model, _, _ = loaded(tmp_path / "a")
    assert model.config.mtp is None
    assert "has 1 layers for multi-token prediction, the folder has no tensors of them" in caplog.text


def test_a_folder_that_does_not_count_its_modules_is_read_with_them(tmp_path):
    saved(tmp_path / "a", "qwen3_next")
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    del config[NEXTN]
    path.write_text(json.dumps(config))
    assert loaded(tmp_path / "a")[0].config.mtp.layers == 1


def test_modules_that_config_json_counts_as_none_are_left_out(tmp_path, caplog):
    saved(tmp_path / "a", "deepseek_v3", **{NEXTN: 0})
    with caplog.at_level(logging.WARNING):
        model, _, _ = loaded(tmp_path / "a")
    assert model.config.mtp is None and "tensors of other parts than the language model are not read" in caplog.text


def test_embeddings_of_their_own_are_left_out_with_a_line(tmp_path, caplog):
    saved(tmp_path / "a", "qwen3_5", mtp_use_dedicated_embeddings=True)
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path / "a")[0].config.mtp is None
    assert "mtp_use_dedicated_embeddings = true: the model is read without it" in caplog.text


def test_copies_may_be_missing_and_must_be_equal(tmp_path):
    whole = saved(tmp_path / "a", "deepseek_v3")
    saved(tmp_path / "b", "deepseek_v3", changed=without("3.embed_tokens", "shared_head.head"))
    (_, first, _), (model, second, foreign) = loaded(tmp_path / "a"), loaded(tmp_path / "b")
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))
    written = dict(open_model.foreign_tensors(foreign, model, "deepseek_v3"))
    assert np.array_equal(written["model.layers.3.shared_head.head.weight"], whole["lm_head.weight"])
    other = {"model.layers.3.embed_tokens.weight": 1 + whole["model.embed_tokens.weight"]}
    saved(tmp_path / "c", "deepseek_v3", changed=lambda tensors: tensors | other)
    with pytest.raises(
        UserError, match=r"3.embed_tokens.weight differs from model.embed_tokens.weight.* = 0 in config"
    ):
        loaded(tmp_path / "c")


def test_experts_in_one_tensor_are_read(tmp_path):
    tensors = saved(tmp_path / "a", "qwen3_5_moe")
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}

    def every(tensors):
        result = {name: x for name, x in tensors.items() if ".experts." not in name}
        for layer in (*(f"model.layers.{n}." for n in layers), "mtp.layers.0."):
            parts = [
                [tensors[f"{layer}mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")] for e in range(4)
            ]
            result[layer + "mlp.experts.gate_up_proj"] = np.stack([np.concatenate(of[:2]) for of in parts])
            result[layer + "mlp.experts.down_proj"] = np.stack([of[2] for of in parts])
        return result

    saved(tmp_path / "b", "qwen3_5_moe", changed=every)
    (_, split, _), (_, whole, _) = loaded(tmp_path / "a"), loaded(tmp_path / "b")
    assert jax.tree.all(jax.tree.map(np.array_equal, split, whole))


def test_a_run_takes_or_leaves_the_modules_of_its_initial_weights(tmp_path, caplog):
    saved(tmp_path / "with", "glm4_moe")
    saved(tmp_path / "without", "glm4_moe", 0)
    of = {
        name: api.build(hf_config.from_hf(open_model.open_model(str(tmp_path / name)).config))
        for name in ("with", "without")
    }
    with caplog.at_level(logging.WARNING):
        left = open_model.loader(str(tmp_path / "with"), of["without"])
        anew = open_model.loader(str(tmp_path / "without"), of["with"])
    assert "1 modules for multi-token prediction, DecoderConfig.mtp is None: left out" in caplog.text
    assert "those of DecoderConfig.mtp begin anew" in caplog.text
    assert "mtp" not in left.model.abstract_params and "mtp" not in anew.model.abstract_params
    whole = open_model.loader(str(tmp_path / "with"), of["with"])
    assert "mtp" in whole.model.abstract_params
    begun = of["with"].adapt(left.model.init(jax.random.key(0)), jax.random.key(1))
    assert float(np.abs(begun["mtp"]["from_hidden"]).max()) > 0


class Reader:
    """A conversion.ModelReader of foreign models alone."""

    completes = False

    def load_modules(self): ...

    def is_run(self, folder):
        return False

    def save(self, folder, params, gin):
        os.makedirs(folder, exist_ok=True)
        self.params, self.gin = params, gin


def test_a_run_of_a_folder_has_its_modules(tmp_path):
    tensors, reader = saved(tmp_path / "a", "ernie4_5_moe"), Reader()
    conversion.convert(str(tmp_path / "a"), str(tmp_path / "run"), "capibara", None, None, reader)
    assert all(line in reader.gin for line in ("DecoderConfig.mtp = @Mtp()", 'Mtp.mlp = "dense"', 'Mtp.norm = "none"'))
    norm = reader.params["mtp"]["hidden_norm"]["scale"][0]
    np.testing.assert_array_equal(norm, tensors["model.mtp_hidden_norm.0.weight"])


def test_merges_have_the_modules(tmp_path):
    one = saved(tmp_path / "a", "glm4_moe")
    saved(tmp_path / "b", "glm4_moe", changed=lambda tensors: {name: 3 * x for name, x in tensors.items()})
    saved(tmp_path / "c", "glm4_moe", 0)
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    mean = Merge(models=paths, method=Linear(weights=(0.5, 0.5)))
    merge(mean, str(tmp_path / "mean"), "hf", "f32", Reader())
    merged = safetensors.numpy.load_file(os.path.join(tmp_path, "mean", "model.safetensors"))
    assert merged.keys() == one.keys()
    name = "model.layers.3.eh_proj.weight"
    np.testing.assert_allclose(merged[name], 2 * one[name], rtol=1e-6)
    with pytest.raises(UserError, match="mtp of .*/c is None, must be"):
        other = dataclasses.replace(mean, models=(paths[0], str(tmp_path / "c")))
        merge(other, str(tmp_path / "x"), "hf", "f32", Reader())
    layers = Merge(models=paths, method=Passthrough(layers=((0, 2), (1, 3))))
    with pytest.raises(UserError, match="takes single layers, and a model has modules for multi-token prediction"):
        merge(layers, str(tmp_path / "y"), "hf", "f32", Reader())


def test_convert_copies_the_modules_and_says_where_it_leaves_them_out(tmp_path, caplog):
    tensors = saved(tmp_path / "a", "glm4_moe")
    conversion.convert(str(tmp_path / "a"), str(tmp_path / "b"), "hf", None, None, Reader())
    copied = safetensors.numpy.load_file(os.path.join(tmp_path, "b", "model.safetensors"))
    assert copied.keys() == tensors.keys() and all(np.array_equal(copied[name], tensors[name]) for name in tensors)
    with caplog.at_level(logging.WARNING):
        source = conversion.without_mtp(open_model.open_model(str(tmp_path / "a")), "GGUF files have none here")
    assert "modules for multi-token prediction are left out: GGUF files have none here" in caplog.text
    assert hf_config.from_hf(source.config).mtp is None
