"""The language model of a model that reads images, too: its keys and its tensors, as the wrapper's file has them."""

from __future__ import annotations

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf import tied, wrappers
from capibara.models import api

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=4)
FLAT = SIZES | dict(model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"])


def wrapped(model_type, text=None, **outer):
    return dict(model_type=model_type, text_config=SIZES | (text or {}), vision_config={}, **outer)


@pytest.mark.parametrize(
    "values, head",
    [
        (wrapped("llava"), "separate"),
        (wrapped("llava", {"tie_word_embeddings": True}), "tied"),
        (wrapped("llava", {"model_type": "gemma"}), "tied"),
        (wrapped("llava", {"model_type": "gemma", "tie_word_embeddings": False}), "separate"),
        (wrapped("mistral3"), "tied"),
        (wrapped("mistral3", {"tie_word_embeddings": True}, tie_word_embeddings=False), "separate"),
        (wrapped("lfm2_vl", {"layer_types": ["conv", "full_attention"]}, tie_embedding=False), "separate"),
        (wrapped("qwen2_vl", {"tie_word_embeddings": True}), "tied"),
        (wrapped("llava_next", {"tie_word_embeddings": True}), "separate"),
        (wrapped("paddleocr_vl", tie_word_embeddings=False), "tied"),
        (wrapped("paddleocr_vl", {"tie_word_embeddings": False}, tie_word_embeddings=False), "separate"),
        (SIZES | {"model_type": "paddleocr_vl", "tie_word_embeddings": False}, "tied"),
        (FLAT, "separate"),
        (FLAT | {"tie_word_embeddings": True}, "tied"),
    ],
)
def test_the_head_is_tied_where_transformers_ties_it(values, head):
    assert hf_config.from_hf(values).head == head
    assert hf_config.from_hf(wrappers.untied(values)).head == "separate"


def test_a_flat_file_has_the_keys_of_its_text_beside_the_others():
    rope = {"type": "mrope", "mrope_section": [2, 1, 1]}
    flat = hf_config.from_hf(FLAT | {"rope_theta": 5e5, "rope_scaling": rope, "head_dim": 16, "max_window_layers": 1})
    nested = hf_config.from_hf(
        wrapped("qwen2_vl", {"rope_theta": 5e5, "rope_parameters": rope, "max_window_layers": 1, "model_type": "other"})
    )
    assert flat == nested
    assert (flat.rope.theta, flat.rope.scaling, flat.norm_eps, flat.head_size, flat.kv_heads) == (
        5e5,
        "none",
        1e-5,
        8,
        4,
    )


def test_a_flat_file_of_paddleocr_has_all_keys_of_its_text():
    flat = SIZES | {"model_type": "paddleocr_vl", "head_dim": 16, "use_bias": True, "vision_config": {}}
    config = hf_config.from_hf(flat)
    assert config == hf_config.from_hf(wrapped("paddleocr_vl", {"head_dim": 16, "use_bias": True}))
    assert (config.head_size, config.bias, config.rope.pairs, config.norm_eps) == (16, "all", "halves", 1e-5)


def test_logits_are_those_of_the_wrapper():
    assert hf_config.from_hf(wrapped("aya_vision", {"logit_scale": 0.25, "head_dim": 8})).logit_scale == 1
    assert hf_config.from_hf(wrapped("llava", {"model_type": "gemma2"})).logit_soft_cap is None
    assert hf_config.from_hf(wrapped("granite4_vision", {"logits_scaling": 4.0})).logit_scale == 0.25
    assert hf_config.from_hf(wrapped("gemma3n", {"num_kv_shared_layers": 0})).logit_soft_cap == 30.0


def test_what_is_written_is_the_language_model_alone():
    values = wrapped("qwen3_vl", {"head_dim": 16, "rope_parameters": {"mrope_section": [4, 2, 2], "rope_theta": 1e6}})
    written = hf_config.to_hf(hf_config.from_hf(values), values)
    assert written["model_type"] == "qwen3" and "vision_config" not in written
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    "values, message",
    [
        (
            wrapped("llava", {"model_type": "opt"}),
            "a llava has text_config with model_type 'opt', must be one of llama",
        ),
        (wrapped("llava", architectures=["LlavaForClassification"]), "must be LlavaForConditionalGeneration for llava"),
        (wrapped("qwen3_vl", {"rope_scaling": {"rope_type": "mrope"}}), "rope_type 'mrope', must be one of"),
        (wrapped("paligemma"), "model_type 'paligemma', must be one of"),
        (wrapped("mistral3") | {"text_config": 3}, "text_config = 3, must be an object"),
    ],
)
def test_other_language_models_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        hf_config.from_hf(values)


def written(path, values, change, part="model.visual.patch.weight"):
    """A folder with random tensors: those of the language model as `change` has them, and one of another part."""
    model = api.build(hf_config.from_hf(values, dtype="float32"))
    rng, text = np.random.default_rng(0), wrappers.text_part(values)["model_type"]
    tensors = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in open_model.hf_shapes(model, text).items()
    }
    stored = change(tensors) | {part: np.zeros((2, 2), np.float32)}
    shapes = {name: value.shape for name, value in stored.items()}
    hf_folder.save_hf(str(path), values, shapes, stored.items(), {}, dtype="float32")
    return model, tensors


def read(path, model, text):
    foreign = open_model.open_model(str(path))
    open_model.check(foreign, model)
    stored = open_model.NamedTensors(foreign, model, text)
    return {name: stored.read(name) for name in stored.names}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("width", [24, 16, 32])  # of 32 x 32 matrices transformers turns none
def test_experts_are_turned_where_the_shape_says_so(tmp_path, turned, width):
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": width, "head_dim": 8}
    values = wrapped("qwen3_vl_moe", experts)

    def fused(tensors):
        plain = {name: value for name, value in tensors.items() if ".experts." not in name}
        for layer in range(2):
            at = f"model.layers.{layer}.mlp.experts."
            both = [
                np.concatenate([tensors[f"{at}{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in range(2)
            ]
            down = [tensors[f"{at}{e}.down_proj.weight"] for e in range(2)]
            for name, matrices in (("gate_up_proj", both), ("down_proj", down)):
                value = np.stack(matrices)
                square = value.shape[1] == value.shape[2]
                plain[at + name] = value.swapaxes(1, 2) if turned and not square else value
        return {name.replace("model.", "model.language_model."): value for name, value in plain.items()}

    model, tensors = written(tmp_path, values, fused)
    got = read(tmp_path, model, "qwen3_moe")
    assert got.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(got[name], value)


def test_names_of_other_versions_are_those_of_the_language_model(tmp_path):
    values = wrapped("llava", {"num_key_value_heads": 2})
    part = "vision_tower.patch.weight"
    renamed = lambda tensors: {f"language_model.{name}": value for name, value in tensors.items()}  # noqa: E731
    model, tensors = written(tmp_path, values, renamed, part)
    got = read(tmp_path, model, "llama")
    assert all(np.array_equal(got[name], value) for name, value in tensors.items())


def test_a_head_that_differs_is_not_tied():
    values = wrapped("llava", {"tie_word_embeddings": True})
    tensors = {"model.language_model.embed_tokens.weight": np.zeros(3), "lm_head.weight": np.ones(3)}
    config = tied.with_stored_head(values, tensors, tensors.__getitem__)
    assert hf_config.from_hf(config).head == "separate"
    tensors["lm_head.weight"] = np.zeros(3)
    assert hf_config.from_hf(tied.with_stored_head(values, tensors, tensors.__getitem__)).head == "tied"
