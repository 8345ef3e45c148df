"""A tiny model of every declared family of GGUF files: config.json and tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from capibara.interop.gguf import names as gguf_names

VOCAB = 320
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
RMS, LAYER = SIZES | {"rms_norm_eps": 1e-5}, SIZES | {"layer_norm_eps": 1e-5}
WHOLE, WINDOW = "full_attention", "sliding_attention"


def rope(kind: str = "default", theta: float = 10_000.0, **rest: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **rest}


YARN = rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope("llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0) | {
    "original_max_position_embeddings": 16
}
FOUR = dict(num_hidden_layers=4, sliding_window=8, layer_types=[WINDOW, WINDOW, WINDOW, WHOLE])

TOKENS = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
GPT = TOKENS | dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, layer_norm_epsilon=1e-5)
STABLELM = dict(model_type="stablelm", use_qkv_bias=True)
STABLELM |= dict(rope_parameters=rope(theta=500.0, partial_rotary_factor=0.5))
FALCON = TOKENS | dict(model_type="falcon", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, bias=False)
FALCON |= dict(max_position_embeddings=128, ffn_hidden_size=64, rope_parameters=rope(theta=500.0))

DEEPSEEK = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2, n_group=1)
DEEPSEEK |= dict(routed_scaling_factor=1.5, norm_topk_prob=True, first_k_dense_replace=1, num_hidden_layers=3)
LATENT = RMS | DEEPSEEK | dict(num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8)
LATENT |= dict(v_head_dim=12, rms_norm_eps=1e-6)
GRANITE_FACTORS = dict(embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, attention_multiplier=0.2)
FEW = dict(num_experts=4, num_experts_per_tok=2)

ALONE = TOKENS | dict(hidden_size=32, num_hidden_layers=3, expand=2, conv_kernel=4, layer_norm_epsilon=1e-5)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4, mamba_chunk_size=8)
MAMBA2 |= dict(mamba_expand=2, num_hidden_layers=3, time_step_limit=[0.0, float("inf")])
MIXED = ["linear_attention", WHOLE, "linear_attention"]
GRANITE4 = RMS | GRANITE_FACTORS | MAMBA2 | dict(model_type="granitemoehybrid", layer_types=MIXED)
LFM2 = SIZES | dict(norm_eps=1e-5, num_hidden_layers=4, block_auto_adjust_ff_dim=False, rope_parameters=rope())
LFM2 |= dict(layer_types=["conv", WHOLE, "conv", "conv"], tie_word_embeddings=True)

DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
DELTA |= dict(linear_conv_kernel_dim=4, head_dim=16, rope_parameters=rope(partial_rotary_factor=0.5))
DELTA |= dict(num_hidden_layers=4, layer_types=["linear_attention", "linear_attention", WHOLE, "linear_attention"])
SHARED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64)

JAMBA = RMS | dict(model_type="jamba", num_hidden_layers=6, mamba_d_state=16, mamba_d_conv=4, attn_layer_period=3)
JAMBA |= dict(attn_layer_offset=1, mamba_dt_rank=4)
FALCON_H1 = RMS | MAMBA2 | dict(model_type="falcon_h1", mamba_d_ssm=64, rope_parameters=rope(theta=500.0), head_dim=16)
FALCON_H1 |= dict(mamba_rms_norm=True, mamba_norm_before_gate=False)
FACTORS_H1 = dict(embedding_multiplier=3.0, lm_head_multiplier=0.5, key_multiplier=0.7, attention_in_multiplier=1.5)
FACTORS_H1 |= dict(attention_out_multiplier=0.6, ssm_in_multiplier=1.25, ssm_out_multiplier=0.8)
FACTORS_H1 |= dict(mlp_multipliers=[0.9, 0.4], ssm_multipliers=[0.35, 0.5, 0.6, 0.7, 0.8])
NEMOTRON_H = SIZES | dict(model_type="nemotron_h", head_dim=16, layer_norm_epsilon=1e-5, mamba_num_heads=8, n_groups=2)
NEMOTRON_H |= dict(mamba_head_dim=8, ssm_state_size=16, conv_kernel=4, time_step_min=0.0)
del NEMOTRON_H["num_hidden_layers"]

GEMMA = RMS | dict(head_dim=16, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
GEMMA |= dict(query_pre_attn_scalar=16)

# Name -> config.json.
CASES: dict[str, dict[str, Any]] = {
    "olmo2": RMS | dict(model_type="olmo2", rope_parameters=rope(theta=500.0)),
    "olmo3": RMS | FOUR | dict(model_type="olmo3", rope_parameters={WHOLE: YARN, WINDOW: rope(theta=500.0)}),
    "granite": RMS
    | dict(model_type="granite", embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0)
    | dict(attention_multiplier=0.2, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3, head_dim=16),
    "cohere": LAYER
    | dict(model_type="cohere", logit_scale=0.25, tie_word_embeddings=True, rope_parameters=rope(theta=500.0)),
    "cohere2": LAYER
    | FOUR
    | dict(model_type="cohere2", logit_scale=0.25, tie_word_embeddings=True, rope_parameters=rope(theta=500.0)),
    "exaone4": RMS | dict(model_type="exaone4", sliding_window=None, rope_parameters=LLAMA3),
    "smollm3": RMS
    | dict(model_type="smollm3", num_hidden_layers=5, no_rope_layers=[1, 1, 1, 0, 1], tie_word_embeddings=True)
    | dict(rope_parameters=rope(theta=500.0)),
    "seed_oss": RMS
    | dict(model_type="seed_oss", head_dim=16, attention_bias=True, attention_out_bias=False, rope_parameters=rope()),
    "glm4": RMS
    | dict(model_type="glm4", head_dim=16, attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5)),
    "ernie4_5": RMS | dict(model_type="ernie4_5", head_dim=16, tie_word_embeddings=True, rope_parameters=rope()),
    "hunyuan_v1_dense": RMS
    | dict(model_type="hunyuan_v1_dense", head_dim=16, attention_bias=False, rope_parameters=rope(theta=500.0)),
    "exaone": RMS
    | dict(model_type="exaone", head_dim=16, rope_parameters=LLAMA3, attention_bias=False, mlp_bias=False),
    "jais2": LAYER | dict(model_type="jais2", head_dim=16, attention_bias=True, mlp_bias=True, rope_parameters=rope()),
    "olmo": SIZES | dict(model_type="olmo", clip_qkv=0.8, rope_parameters=rope()),
    "starcoder2": SIZES
    | dict(model_type="starcoder2", norm_epsilon=1e-5, use_bias=True, rope_parameters=rope(theta=500.0))
    | dict(tie_word_embeddings=True, sliding_window=128),
    "gpt_bigcode": GPT | dict(model_type="gpt_bigcode", n_inner=64, multi_query=True),
    "gpt_bigcode_heads": GPT | dict(model_type="gpt_bigcode", n_inner=64, multi_query=False),
    "stablelm": LAYER | STABLELM | dict(use_parallel_residual=False, qk_layernorm=False),
    "stablelm_parallel": LAYER | STABLELM | dict(use_parallel_residual=True, qk_layernorm=True),
    "falcon": FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=True),
    "falcon_one_norm": FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon_old": FALCON | dict(multi_query=True, parallel_attn=True),
    "phi": LAYER | dict(model_type="phi", rope_parameters=rope(theta=500.0, partial_rotary_factor=0.5)),
    "nemotron": SIZES
    | dict(model_type="nemotron", norm_eps=1e-5, attention_bias=True, mlp_bias=True)
    | dict(rope_parameters=rope(theta=500.0, partial_rotary_factor=0.5)),
    "bloom": TOKENS | dict(model_type="bloom", hidden_size=48, n_layer=2, n_head=6, layer_norm_epsilon=1e-5),
    "mpt": TOKENS
    | dict(model_type="mpt", d_model=48, n_heads=6, n_layers=2, max_seq_len=128, attn_config={"clip_qkv": 0.5}),
    "qwen2_moe": RMS
    | FEW
    | dict(model_type="qwen2_moe", moe_intermediate_size=32, shared_expert_intermediate_size=64)
    | dict(norm_topk_prob=False, rope_parameters=rope()),
    "olmoe": RMS | FEW | dict(model_type="olmoe", num_key_value_heads=4, norm_topk_prob=False, rope_parameters=rope()),
    "granitemoe": RMS
    | GRANITE_FACTORS
    | dict(model_type="granitemoe", num_local_experts=4, num_experts_per_tok=2, attention_bias=True)
    | dict(rope_parameters=rope()),
    "granitemoeshared": RMS
    | GRANITE_FACTORS
    | dict(model_type="granitemoeshared", num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32)
    | dict(tie_word_embeddings=True, rope_parameters=rope()),
    "glm4_moe": RMS
    | DEEPSEEK
    | dict(model_type="glm4_moe", attention_bias=True, use_qk_norm=True, head_dim=16, n_group=4, topk_group=2)
    | dict(rope_parameters=rope(partial_rotary_factor=0.5)),
    "glm4_moe_air": RMS
    | DEEPSEEK
    | dict(model_type="glm4_moe", attention_bias=True, use_qk_norm=False, head_dim=16)
    | dict(rope_parameters=rope(partial_rotary_factor=0.5)),
    "dots1": RMS
    | DEEPSEEK
    | dict(model_type="dots1", head_dim=16, num_key_value_heads=4, sliding_window=None, rope_parameters=rope()),
    "deepseek_v2": LATENT
    | dict(model_type="deepseek_v2", q_lora_rank=None, topk_method="greedy", norm_topk_prob=False)
    | dict(rope_parameters=rope()),
    "deepseek_v2_yarn": LATENT
    | dict(model_type="deepseek_v2", q_lora_rank=20, topk_method="greedy", norm_topk_prob=False)
    | dict(rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
    "deepseek_v3": LATENT
    | dict(model_type="deepseek_v3", q_lora_rank=20, n_group=4, topk_group=2)
    | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)),
    "ernie4_5_moe": RMS
    | dict(model_type="ernie4_5_moe", num_hidden_layers=3, moe_num_experts=8, moe_k=2, moe_intermediate_size=32)
    | dict(moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1, tie_word_embeddings=True)
    | dict(rope_parameters=rope(theta=500.0)),
    "hunyuan_v1_moe": RMS
    | dict(model_type="hunyuan_v1_moe", head_dim=16, num_experts=4, moe_topk=2, rope_parameters=rope(theta=500.0)),
    "exaone_moe": RMS
    | DEEPSEEK
    | FOUR
    | dict(model_type="exaone_moe", num_experts=8, num_shared_experts=2, rope_parameters=rope(theta=500.0)),
    "minimax_m2": RMS
    | dict(model_type="minimax_m2", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    | dict(rope_parameters=rope(theta=500.0, partial_rotary_factor=0.5)),
    "afmoe": RMS
    | FOUR
    | dict(model_type="afmoe", head_dim=16, num_dense_layers=1, num_experts=8, num_experts_per_tok=3)
    | dict(moe_intermediate_size=32, num_shared_experts=2, route_scale=1.5, mup_enabled=True)
    | dict(rope_parameters=rope(theta=500.0)),
    "mamba": ALONE | dict(model_type="mamba", state_size=16, time_step_rank=4, tie_word_embeddings=True),
    "falcon_mamba": ALONE | dict(model_type="falcon_mamba", state_size=16, time_step_rank=4, mixer_rms_eps=1e-5),
    "mamba2": ALONE
    | dict(model_type="mamba2", state_size=16, num_heads=8, head_dim=8, n_groups=2)
    | dict(time_step_limit=[0.0, float("inf")]),
    "lfm2": LFM2 | dict(model_type="lfm2"),
    "lfm2_moe": LFM2
    | dict(model_type="lfm2_moe", num_dense_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "granitemoehybrid": GRANITE4
    | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, shared_intermediate_size=64),
    "granitemoehybrid_dense": GRANITE4
    | dict(num_local_experts=0, shared_intermediate_size=64, position_embedding_type="rope", rope_parameters=rope())
    | dict(tie_word_embeddings=True),
    "qwen3_next": RMS | DELTA | SHARED | dict(model_type="qwen3_next"),
    "qwen3_5": RMS | DELTA | dict(model_type="qwen3_5_text", tie_word_embeddings=True),
    # Two pairs: those that height and width would turn are turned by time too.
    "qwen3_5_two_pairs": RMS
    | DELTA
    | dict(model_type="qwen3_5_text", rope_parameters=rope(theta=10.0, partial_rotary_factor=0.25)),
    "qwen3_5_moe": RMS | DELTA | SHARED | dict(model_type="qwen3_5_moe_text"),
    "jamba": JAMBA | FEW | dict(expert_layer_period=2, expert_layer_offset=1),
    "jamba_dense": JAMBA | dict(num_experts=1, tie_word_embeddings=True),
    "falcon_h1": FALCON_H1,
    "falcon_h1_factors": FALCON_H1 | FACTORS_H1 | dict(mamba_rms_norm=False),
    "nemotron_h": NEMOTRON_H | dict(layers_block_type=["linear_attention", "mlp", WHOLE, "mlp"], mlp_bias=True),
    "nemotron_h_moe": NEMOTRON_H
    | dict(layers_block_type=["linear_attention", "moe", WHOLE, "moe"], n_routed_experts=8, num_experts_per_tok=3)
    | dict(n_group=4, topk_group=2, routed_scaling_factor=1.5, moe_intermediate_size=32)
    | dict(moe_shared_expert_intermediate_size=64),
    "apertus": RMS | dict(model_type="apertus", hidden_act="xielu", attention_bias=True, rope_parameters=LLAMA3),
    "gemma2_listed": GEMMA
    | FOUR
    | dict(model_type="gemma2", layer_types=[WHOLE, WINDOW, WINDOW, WHOLE], rope_parameters=rope())
    | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_listed": GEMMA
    | FOUR
    | dict(model_type="gemma3_text", layer_types=[WHOLE, WINDOW, WINDOW, WHOLE], final_logit_softcapping=3.0)
    | dict(rope_parameters={WINDOW: rope(theta=500.0), WHOLE: rope("linear", 1e6, factor=8.0)}),
    "gemma3_whole": GEMMA
    | dict(
        model_type="gemma3_text", layer_types=[WHOLE] * 2, rope_parameters={WINDOW: rope(), WHOLE: rope(theta=500.0)}
    ),
    "arcee": RMS | dict(model_type="arcee", head_dim=16, rope_parameters=YARN),
}


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Random values of all tensors, chosen so that adding 1 does not round them."""
    family = gguf_names.of_config(config)
    for name, shape in {tensor.name: tensor.shape for tensor in family.tensors(config)}.items():
        value = 0.25 * np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        is_scale = name.endswith("weight") and ("norm" in name or ".ln_" in name)
        yield name, (np.round((value + is_scale) * 2.0**18) / 2.0**18).astype(np.float32)
