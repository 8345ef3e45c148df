"""What files of the families of interop/hf/catalog say and our models do not compute is refused by name."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import safetensors.numpy

from capibara.core.types import UserError
from capibara.data.tokenizers import files as tokenizer_files
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder

HERE = pathlib.Path(__file__).resolve().parent
RECORDED = HERE / "recorded"
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "models" / "golden"), str(HERE.parent / "merge")]

import answers  # noqa: E402
import llamas  # noqa: E402
from family_cases import CASES  # noqa: E402

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            "helium",
            {"head_dim": 12},
            r"head_dim = 12 and num_attention_heads = 4, their product must be hidden_size = 32",
        ),
        ("m2m_100", {"pad_token_id": None}, "config.json of an m2m_100 has pad_token_id = None, must be a token"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings = False"),
        ("mvp", {"use_prompt": True}, "use_prompt = True, capibara's mvp has False alone"),
        ("xlm", {"n_langs": 15}, "n_langs = 15, capibara's xlm has 1 alone"),
        ("flaubert", {"pre_norm": True}, "pre_norm = True, capibara's flaubert has False alone"),
        ("roformer", {"rotary_value": True}, "rotary_value = True, capibara's roformer has False alone"),
        ("esm", {"mask_token_id": None}, "token_dropout = true and mask_token_id = None, must be a token's number"),
        ("esm", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("esm_absolute", {"pad_token_id": None}, "'absolute' and pad_token_id = None, must be 'rotary', or 'absolute'"),
        (
            "lara_mini",
            {"layer_types": ["full_attention"] * 6},
            "layer_types .* must be one for each of 6 layers, and have",
        ),
        ("lara_mini", {"layer_types": ["chunked_attention"] * 6}, "layer_types 'chunked_attention', must be one of"),
        ("aria_text", {"hidden_act": "gelu"}, "hidden_act = 'gelu', capibara's aria_text has 'silu' alone"),
        ("rwkv", {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon = 0.001, capibara's rwkv has 1e-05 alone"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings = False, capibara's zamba2 has True alone"),
        ("zamba2", {"attention_head_dim": 3}, "attention_head_dim = 3, must be 4 by other keys"),
        ("zamba2", {"hybrid_layer_ids": [1]}, r"hybrid_layer_ids = .1., must be .1, 2, 4. by other keys"),
        (
            "zamba2",
            {"num_hidden_layers": 4},
            "5 layers_block_type .layer_types., must be one for each of num_hidden_layers = 4",
        ),
        (
            "zamba2",
            {"layers_block_type": ["attention"] * 5},
            "layers_block_type .layer_types. 'full_attention', must be",
        ),
        ("zamba2", {"layers_block_type": ["mamba"] * 5}, "layers_block_type .layer_types. without 'hybrid'"),
        (
            "zamba2",
            {"num_mem_blocks": 4},
            "at most the number of hybrid layers .3.: .* shared_blocks is num_mem_blocks",
        ),
        ("zamba2", {"mamba_expand": 1.1}, r"mamba_expand .1.1. x hidden_size .16. channels, must be a multiple"),
        ("zamba2", {"num_key_value_heads": 4}, "num_kv_heads .4. must be num_heads .8. where adapters is 'all'"),
        ("gemma4_moe", {"num_experts": None}, "enable_moe_block = True without num_experts"),
        ("gemma4_moe", {"use_double_wide_mlp": True}, "use_double_wide_mlp = True and num_kv_shared_layers = 1"),
        ("mimo_v2_flash", {"sliding_window": None}, "sliding_window = None for layer_types"),
        (
            "mimo_v2_flash",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "without an object for each of layer_types with rope_theta",
        ),
        ("mimo_v2_flash", {"mlp_layer_types": ["dense"] * 4}, "must be experts in some of num_hidden_layers = 4"),
        ("mimo_v2_flash", {"attention_value_scale": 0.0}, "attention_output is attention_value_scale"),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 6, 4, 6]},
            "num_attention_heads_per_layer .* the same for all of",
        ),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "must be one for each of 4 layers"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True"),
        (
            "minimax_m3",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types sliding_attention, .* must be one of minimax_m3",
        ),
        (
            "minimax_m3",
            {"rope_parameters": {"rope_theta": 500.0}},
            r"index_head_dim = 10, .* rope_parameters .*rope_scaling. rotate",
        ),
        ("minimax_m3", {"sparse_attention_config": 3}, "sparse_attention_config = 3, must be an object"),
        ("minimax_m3", {"index_local_blocks": 4}, "BlockIndexer.recent .* recent is index_local_blocks"),
        ("bailing_hybrid", {"layer_types": None, "layer_group_size": 0}, "layer_group_size = 0, must be at least 1"),
        ("bailing_hybrid", {"kda_lower_bound": 0.0}, "least_decay is kda_lower_bound"),
        ("apertus1p5", {"output_vocab_size": 97}, "output_rows is output_vocab_size"),
        ("apertus1p5_pruned", {"tie_word_embeddings": True}, "with head 'separate'"),
        ("axk2", {"n_group": None}, "must be n_group and topk_group or neither"),
        ("axk2", {"q_lora_rank": None}, "config.json of an axk2 has q_lora_rank = None"),
        ("internlm3", {"mlp_bias": False}, r"qkv_bias \(attention_bias\) = True and bias \(mlp_bias\) = False"),
        ("iquestcoder", {"clip_qkv": 1.0}, "clip_qkv = 1.0, must be without"),
        ("arcee", {"hidden_act": "xielu"}, "hidden_act = 'xielu', must be one of"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern = 'LLLG'"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "layer 2 with a window and without rotary positions"),
        ("smollm3", {"sliding_window": None}, "layer 2 with a window and without a sliding_window"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "2 no_rope_layers, must be one for each of 4 layers"),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "no_rope_layer_interval = 0, must be at least 1",
        ),
        ("smollm3", {"no_rope_layers": "1"}, "no_rope_layers = '1', must be a list"),
        ("granitemoehybrid", {"layer_types": 3}, "layer_types = 3, must be a list"),
        (
            "falcon_h1",
            {"projectors_bias": False},
            "mamba_proj_bias = True and projectors_bias = False, must be equal",
        ),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers = \[1.0\], must be a list of 2 numbers"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 0.0, 1.0, 1.0, 1.0]}, "projection_multipliers is ssm_multipliers"),
        ("falcon_h1", {"key_multiplier": 0.0}, "attention_scale is key_multiplier"),
        ("falcon_h1", {"mamba_d_ssm": 72}, r"mamba_d_head = 8, must be mamba_d_ssm \(72\) together"),
        ("granitemoehybrid", {"time_step_limit": None}, "time_step_limit = None, must be a pair of numbers"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "layer_types 'conv' alone, must have both of conv, full_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "2 layer_types, must be one for each of 4 layers"),
        ("lfm2", {"layer_types": ["conv", "rnn", "conv", "conv"]}, "layer_types 'rnn', must be one of conv, full"),
        (
            "qwen3_5",
            {"layer_types": None, "full_attention_interval": 0},
            "full_attention_interval = 0, must be at least 1",
        ),
        (
            "granite_swa",
            {"layer_types": WINDOWS},
            "layer_rope_theta 100.0 and 500.0 for layer_types 'sliding_attention'",
        ),
        ("granite_swa", {"layer_rope_theta": [1.0]}, "1 layer_rope_theta and 4 layer_types"),
        (
            "granite_swa",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"scales both by rope_parameters \(rope_scaling\)",
        ),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "llama_4_scaling_beta = None"),
        (
            "mellum",
            {"mlp_layer_types": ["dense", "sparse"]},
            "mlp_layer_types 'dense', must be 'sparse' for all layers",
        ),
        (
            "mellum",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters without an object for each of layer_types",
        ),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse", "dense"]},
            "mlp_layer_types sparse, dense, must be 'dense' or 'sparse' for each of num_hidden_layers = 3",
        ),
        ("exaone_moe", {"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types dense, dense, dense, dense, must be"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias = True"),
        ("glm4_moe", {"num_local_experts": 9}, "num_experts is n_routed_experts or num_local_experts"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True"),
        (
            "ernie4_5_moe",
            {"moe_layer_end_index": 0},
            "moe_layer_end_index = 0, moe_layer_interval = 1, must be experts in some",
        ),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval = 0, must be at least 1"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, r"moe_topk \(num_experts_per_tok\) = \[1, 2\], must be the same"),
        ("qwen2_moe", {"layer_types": WINDOWS[:2], "use_sliding_window": False}, "with use_sliding_window = False"),
        (
            "mistral4",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "factor = 0.5",
        ),
        ("mistral4", {"rope_parameters": {"rope_type": "default"}}, "rope_type 'default' in rope_parameters"),
        (
            "dbrx",
            {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
            "moe_normalize_expert_weights = 2.0 in ffn_config",
        ),
        ("dbrx", {"attn_config": 3}, "attn_config = 3, must be an object"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": "silu"}}, "ffn_act_fn = silu, must be an object"),
        (
            "phimoe",
            {"rope_parameters": {"rope_type": "longrope", "short_mscale": 1.0, "long_mscale": 2.0}},
            "long_mscale = 2.0",
        ),
        ("llama4", {"no_rope_layers": [1, 0]}, "2 no_rope_layers, must be one for each of 5 layers"),
        (
            "llama4",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "no_rope_layer_interval = 0, must be at least 1",
        ),
        (
            "llama4",
            {"layer_types": ["sliding_attention"] * 5},
            "layer_types 'sliding_attention', must be one of chunked",
        ),
        ("llama4", {"layer_types": ["chunked_attention"] * 5}, "layer 2 with a window and without rotary positions"),
        (
            "llama4",
            {"moe_layers": [7]},
            r"moe_layers = \[7\] .*, must be experts in some of num_hidden_layers = 5 layers",
        ),
        (
            "llama4",
            {"moe_layers": None, "interleave_moe_layer_step": 0},
            "interleave_moe_layer_step = 0, must be at least 1",
        ),
        (
            "recurrent_gemma",
            {"block_types": ["recurrent"]},
            "block_types recurrent for num_hidden_layers = 4, must have both",
        ),
        (
            "recurrent_gemma",
            {"block_types": ["mamba"]},
            "block_types = .'mamba'., must be a list of recurrent and attention",
        ),
        ("recurrent_gemma", {"hidden_activation": "silu"}, "hidden_activation = 'silu', capibara's recurrent_gemma"),
        (
            "recurrent_gemma",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_type 'linear' in rope_scaling, must be 'default'",
        ),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_period = 3 and attn_layer_offset = 3, must be a period"),
        ("jamba", {"expert_layer_period": 0}, "expert_layer_period = 0 and expert_layer_offset = 1, must be a period"),
        (
            "jamba",
            {"attn_layer_period": 1, "attn_layer_offset": 0},
            "attn_layer_offset = 0, must give attention to some of num_hidden_layers = 6",
        ),
        ("jamba", {"mamba_dt_rank": 0}, "mamba_dt_rank = 0, must be a number above 0 or 'auto'"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu', capibara's jamba has 'silu' alone"),
        ("albert", {"inner_group_num": 2}, "inner_group_num = 2, capibara's albert has 1 alone"),
        ("albert", {"num_hidden_groups": 3}, "num_hidden_layers = 4 and num_hidden_groups = 3, must be a multiple"),
        ("albert", {"embedding_size": 32}, "embedding_size = 32 = hidden_size, must be another width"),
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size = 3, capibara's deberta-v2 has 0 alone"),
        ("deberta-v2", {"legacy": False}, "legacy = False, capibara's deberta-v2 has True alone"),
        ("deberta-v2", {"pos_att_type": "p2p"}, "pos_att_type = 'p2p' and relative_attention = True, must be some of"),
        ("deberta-v2", {"relative_attention": False}, "relative_attention = False, must be some of c2p, p2c and true"),
        ("deberta-v2", {"attention_head_size": 4}, "attention_head_size = 4, must be 8 for hidden_size = 32"),
        ("deberta-v2", {"max_relative_positions": 3}, "position_buckets = 4 and max_relative_positions = 3"),
        ("deberta-v2", {"embedding_size": 16}, "embedding_size = 16, must be 32 for hidden_size = 32"),
        ("bart", {"decoder_ffn_dim": 64}, "encoder_ffn_dim = 48 and decoder_ffn_dim = 64, must be the same"),
        ("bart", {"decoder_attention_heads": 2}, "decoder_attention_heads = 2, must be the same"),
        (
            "t5gemma",
            {
                side: {**CASES["t5gemma"][side], "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
                for side in ("encoder", "decoder")
            },
            "rope_type 'dynamic' in encoder and decoder, .* must be 'default', 'linear', 'llama3' or 'yarn'",
        ),
        ("t5gemma", {"encoder": 3}, "encoder = 3, must be an object"),
        ("t5gemma", {"encoder": {}}, "attn_logit_softcapping = 50.0 in encoder and 3.0 in decoder, must be the same"),
        (
            "t5gemma",
            {"decoder": {**CASES["t5gemma"]["decoder"], "hidden_size": 48}},
            "hidden_size = 32 in encoder and 48 in decoder, must be the same",
        ),
        (
            "t5gemma",
            {"decoder": {**CASES["t5gemma"]["decoder"], "layer_types": ["full_attention"]}},
            "layer_types .'full_attention'. in decoder, must be one of full_attention, sliding_attention for each of 4",
        ),
        (
            "t5gemma",
            {"decoder": {**CASES["t5gemma"]["decoder"], "layer_types": ["full_attention"] * 4}},
            "layer_types in encoder and in decoder that differ, must repeat one pattern",
        ),
        (
            "t5gemma",
            {side: {**CASES["t5gemma"][side], "sliding_window": None} for side in ("encoder", "decoder")},
            "sliding_window = null, must be a number of at least 1",
        ),
        (
            "t5gemma",
            {"decoder": {**CASES["t5gemma"]["decoder"], "per_layer_config": {"0": {"head_dim": 8}}}},
            "per_layer_config in decoder, must be without",
        ),
        ("pegasus", {"tie_word_embeddings": False}, "tie_word_embeddings = False, capibara's pegasus has True alone"),
        (
            "longt5",
            {"encoder_attention_type": "transient-global"},
            "encoder_attention_type = 'transient-global', capibara's longt5",
        ),
        ("longt5_plain", {"num_hidden_layers": 2}, "num_hidden_layers = 2 without num_decoder_layers"),
        (
            "dbrx",
            {"rope_parameters": {"rope_theta": 5e5}},
            "rope_theta = 10000.0 in attn_config and 500000.0 outside of it",
        ),
        (
            "qwen3_next",
            {"rope_parameters": {"rope_type": "proportional"}},
            "rope_type 'proportional', which is for models",
        ),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act = 'gelu', capibara's qwen3_next has 'silu'"),
        ("qwen3_5", {"hidden_act": "relu"}, "hidden_act = 'relu', capibara's qwen3_5_text has 'silu'"),
        ("mamba", {"state_size": 0}, r"Mamba.state_dim is 0.* \(in transformers' words state_dim is state_size\)"),
        ("falcon_mamba", {"conv_kernel": 1}, "taps is conv_kernel"),
        ("mamba", {"time_step_rank": "many"}, "time_step_rank = many, must be a number above 0 or 'auto'"),
        ("mamba2", {"num_heads": 7}, "num_heads = 7 of head_dim = 8, must be expand"),
        ("bamba", {"mamba_n_groups": 3}, "groups is mamba_n_groups"),
        ("lfm2", {"conv_L_cache": 1}, "taps is conv_L_cache"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "taps is linear_conv_kernel_dim"),
        ("nemotron_h", {"layers_block_type": ["mlp", "moe"]}, "'mlp' and 'moe' in layers_block_type"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "layers_block_type 'conv', must be one of"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M?"},
            "'\\?' in hybrid_override_pattern",
        ),
        (
            "nemotron_h",
            {"time_step_limit": [0.0, 0.1]},
            r"time_step_limit = \[0.0, 0.1\], which transformers does not read",
        ),
        ("nemotron_h_moe", {"moe_latent_size": 8}, "moe_latent_size = 8 and 'moe' in layers_block_type"),
        ("nemotron_h_moe", {"n_group": 3}, "groups is n_group"),
        ("minicpm3", {"mlp_bias": True}, "mlp_bias = True, capibara's minicpm3 has False alone"),
        ("minicpm3", {"num_key_value_heads": 2}, r"num_key_value_heads = 2, must be num_attention_heads \(4\)"),
        ("hy_v3", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types dense, dense, dense, must be experts in some"),
        ("cohere2_moe", {"sliding_window": None}, "cohere2_moe has no sliding_window, must be at least 1"),
        ("cohere2_moe", {"expert_selection_fn": "relu"}, "expert_selection_fn 'relu', must be one of softmax, sigmoid"),
        ("cohere2_moe", {"layer_types": WINDOWS[:2]}, "2 layer_types, must be one for each of 4 layers"),
        (
            "cohere2_moe",
            {"prefix_dense_sliding_window_pattern": 0},
            "prefix_dense_sliding_window_pattern = 0, must be at least 1",
        ),
        ("axk1", {"q_lora_rank": None}, "q_lora_rank = None, must be at least 1"),
        ("axk1", {"mlp_layer_types": None, "moe_layer_freq": 0}, "moe_layer_freq = 0, must be at least 1"),
        ("lfm3", {"sliding_window": None}, "layer_types 'sliding_attention' without a sliding_window"),
        ("lfm3", {"layer_types": ["full_attention"] * 5}, "layer_types 'full_attention' alone, must have both of conv"),
        (
            "modernbert-decoder",
            {"local_attention": 1},
            r"local_attention = 1 \(sliding_window = None\), must be at least 2",
        ),
        (
            "modernbert-decoder",
            {"layer_types": None, "global_attn_every_n_layers": 0},
            "global_attn_every_n_layers = 0, must be at least 1",
        ),
        ("modernbert-decoder", {"classifier_activation": "tanh"}, "classifier_activation = 'tanh', must be one of"),
        ("lfm3", {"conv_bias": True}, "conv_bias = True, capibara's lfm3 has False alone"),
        (
            "exaone4_5",
            {"text_config": {"model_type": "llama"}},
            "model_type 'llama', must be one of exaone4, exaone4_5_",
        ),
        ("afmoe", {"sliding_window": None}, "sliding_window = null, must be a number"),
        ("kolibri1", {"sliding_window": None}, "sliding_window = null, must be a number"),
        ("kolibri1", {"layer_types": ["linear_attention"] * 4}, "layer_types 'linear_attention', must be one of"),
        ("flint", {"sliding_window": None}, "sliding_window = null, must be a number"),
        ("flint", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0, must be at least 1"),
        ("flint", {"mlp_only_layers": "0"}, "mlp_only_layers = '0', must be a list"),
        ("flint", {"mlp_only_layers": [*range(6)]}, "decoder_sparse_step = 1, must be experts in some of"),
        ("gte", {"hidden_act": "tanh"}, "hidden_act = 'tanh', must be one of"),
        ("jina_embeddings_v3", {"num_attention_heads": 5}, "must be a multiple of num_heads"),
        ("afmoe", {"layer_types": None, "global_attn_every_n_layers": 0}, "global_attn_every_n_layers = 0"),
    ],
)
def test_other_models_are_refused_by_the_keys_that_make_them(name, change, message):
    with pytest.raises(UserError, match=message):
        hf_config.from_hf({**CASES[name], **change})


@pytest.mark.parametrize("name", CASES)
def test_a_family_writes_what_it_reads(name):
    config = hf_config.from_hf(CASES[name])
    model_type = hf_config.text_part(CASES[name])["model_type"]
    values = hf_config.to_hf(config, {"model_type": model_type})
    assert values["model_type"] == model_type
    assert hf_config.differences(values, config) == {}


def test_objects_of_both_stacks_keep_what_is_beside_the_model():
    """Transformers reads the special tokens there; those of a run's tokenizer stand outside."""
    case = CASES["t5gemma"]
    config = hf_config.from_hf(case)
    kept = hf_config.to_hf(config, case)["decoder"]
    assert (kept["pad_token_id"], kept["bos_token_id"], kept["max_position_embeddings"]) == (1, 2, 64)
    made = hf_config.to_hf(config, {"pad_token_id": 5, "eos_token_id": 6})
    assert [made[side]["pad_token_id"] for side in ("encoder", "decoder")] == [5, 5] and made["eos_token_id"] == 6


@pytest.mark.parametrize("name, some", [("lfm2", "attention and mixer"), ("glm4_moe", "first_mlp and mlp")])
def test_ranges_of_layers_whose_modules_differ_are_refused(name, some, tmp_path, capfd):
    """Their tensors have other numbers than those of models in which all layers are alike."""
    recorded, folder = json.loads((RECORDED / f"{name}.json").read_text()), tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    tensors = {key: answers.draw(key, tuple(shape)) for key, shape in recorded["tensors"].items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    argv = [folder, folder, "--method=passthrough", "--layers=0:2,1:2", f"--to={tmp_path}/out"]
    assert llamas.run(*argv) == 2
    assert f"has layers that differ in their modules ({some} are in some of them)" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["layer_types", "layers_block_type"])
def test_older_names_of_kinds_of_layers_are_todays(key):
    """As Granite 4's first files have them; transformers reads them alike."""
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    case = dict(CASES["granitemoehybrid"])
    older = {**case, key: [old[kind] for kind in case["layer_types"]]}
    if key != "layer_types":
        del older["layer_types"]
    assert hf_config.from_hf(older) == hf_config.from_hf(case)


def test_bambas_rotated_share_is_its_own():
    """transformers overwrites a partial_rotary_factor outside of rope_parameters."""
    case = {name: value for name, value in CASES["bamba"].items() if name != "rope_parameters"}
    assert hf_config.from_hf({**case, "partial_rotary_factor": 1.0}) == hf_config.from_hf(case)


@pytest.mark.parametrize("outside", [{}, {"rope_parameters": None}, {"rope_theta": None}, {"rope_theta": 5e5}])
def test_dbrx_rotates_by_the_base_in_its_attention(outside):
    """So do Databricks' files say it; transformers 5.24 takes 10,000 (findings/dbrx_rope_theta.sh)."""
    case = {key: value for key, value in CASES["dbrx"].items() if key != "rope_parameters"}
    case |= {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5}} | outside
    assert hf_config.from_hf(case).rope.theta == 5e5


def test_infinity_is_a_limit_as_older_files_write_it(tmp_path):
    """Python writes it so, and json.loads reads it: config.json of Mamba 2, Bamba and Nemotron-H before transformers 5."""
    case = CASES["mamba2"] | {"time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(case))
    assert "[0.0, Infinity]" in (tmp_path / "config.json").read_text()
    assert tokenizer_files.carried(str(tmp_path)) is not None  # which reads the model's file, too
    config = hf_config.from_hf(hf_folder.config_of(str(tmp_path)))
    assert config == hf_config.from_hf(case | {"time_step_limit": [0.0, {"__float__": "Infinity"}]})
    for strange in ("-Infinity", "NaN"):
        (tmp_path / "config.json").write_text(json.dumps(case).replace("Infinity", strange))
        with pytest.raises(UserError, match=f"it has {strange}, which JSON does not have"):
            hf_folder.config_of(str(tmp_path))


def test_a_type_that_is_unknown_is_refused_before_its_values():
    """MobileBERT's classifier_activation is a truth value, in other families a name."""
    with pytest.raises(UserError, match="model_type 'mobilebert', must be one of"):
        hf_config.from_hf({"model_type": "mobilebert", "classifier_activation": True})
