"""Kimi K2's published config.json: a model type of code of its own, DeepSeek-V3's arithmetic, and one bound of YaRN for both."""

import json
import math

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder
from capibara.models import api
from capibara.models.layers.rope import Rope

PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "model_type": "kimi_k2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    return hf_config.from_hf(folder.config_of(str(tmp_path)))


def test_it_has_as_many_parameters_as_are_published(config):
    assert api.build(config).param_count == 1_026_408_232_448  # "1 trillion"
    assert hf_config.to_hf(config, PUBLISHED)["model_type"] == "deepseek_v3"


def test_its_frequencies_step_from_unchanged_to_divided(config):
    """transformers 5.24 computes these for DeepseekV3Config of the same values."""
    turns = [4096 * 50000.0 ** (-i / 32) / (2 * math.pi) for i in range(32)]
    step = sum(value >= 1 for value in turns)  # the first frequency with less than one turn
    plain = 50000.0 ** (-np.arange(32) / 32)
    got = np.asarray(config.rope.frequencies(64), np.float64)
    np.testing.assert_allclose(got[:step], plain[:step], rtol=1e-5)
    np.testing.assert_allclose(got[step:], plain[step:] / 32, rtol=1e-5)
    np.testing.assert_allclose(got[[0, 19, 20]], [1.0, 1.62176e-3, 3.6140467e-5], rtol=1e-5)


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(UserError, match=r"Rope.beta_slow \(2.0\) must be above 0 and at most beta_fast \(1.0\)"):
        Rope(scaling="yarn", factor=2.0, original_length=64, beta_fast=1.0, beta_slow=2.0)
