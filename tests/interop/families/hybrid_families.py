"""Cases of interop/hf/catalog/hybrid."""

from __future__ import annotations

from typing import Any

from family_sizes import RMS, SIZES, VOCAB, rope

DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6)
DELTA |= dict(linear_conv_kernel_dim=3, head_dim=16, num_hidden_layers=5)
DELTA |= dict(layer_types=["linear_attention", "linear_attention", "full_attention"] + ["linear_attention"] * 2)
SHORT = dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_d_conv=3, mamba_chunk_size=8)
MAMBA2 |= dict(mamba_expand=2, num_hidden_layers=3, time_step_limit=[0.1, 2.0])
FACTORS = dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=2.0)
MIXED = ["linear_attention", "full_attention", "linear_attention"]
GRANITE = dict(RMS, model_type="granitemoehybrid", layer_types=MIXED) | MAMBA2 | FACTORS
FALCON = dict(RMS, model_type="falcon_h1", mamba_d_ssm=64, rope_parameters=rope(theta=500.0)) | MAMBA2
FALCON |= dict(embedding_multiplier=3.0, lm_head_multiplier=0.5, key_multiplier=0.7, attention_in_multiplier=1.5)
FALCON |= dict(attention_out_multiplier=0.6, ssm_in_multiplier=1.25, ssm_out_multiplier=0.8)
FALCON |= dict(mlp_multipliers=[0.9, 0.4], ssm_multipliers=[0.35, 0.5, 0.6, 0.7, 0.8])

ALONE = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, expand=2, conv_kernel=3, layer_norm_epsilon=1e-5)
ALONE |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=None, state_size=6)
NEMOTRON = dict(SIZES, model_type="nemotron_h", head_dim=16, layer_norm_epsilon=1e-5, mamba_num_heads=8, n_groups=2)
NEMOTRON |= dict(mamba_head_dim=8, ssm_state_size=6, conv_kernel=3)
del NEMOTRON["num_hidden_layers"]

JAMBA = dict(RMS, model_type="jamba", num_hidden_layers=6, mamba_d_state=6, mamba_d_conv=3, attn_layer_period=3)
JAMBA |= dict(attn_layer_offset=1, mamba_dt_rank=5)
KIMI = dict(RMS, model_type="kimi_linear", num_hidden_layers=4, linear_num_heads=2, linear_head_dim=8)
KIMI |= dict(linear_conv_kernel_dim=3, layer_types=["linear_attention", *MIXED], num_key_value_heads=4)
KIMI |= dict(kv_lora_rank=12, q_lora_rank=None, qk_rope_head_dim=8, v_head_dim=10, qk_nope_head_dim=6)
KIMI |= dict(num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2, n_group=4)
KIMI |= dict(topk_group=2, routed_scaling_factor=1.5, norm_topk_prob=True)
LING = {key: value for key, value in KIMI.items() if not key.startswith("linear_")} | dict(model_type="bailing_hybrid")
LING |= dict(head_dim=12, short_conv_kernel_size=3, kda_lower_bound=-3.0, rope_parameters=rope(theta=500.0))
LING |= dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"])
MINIMAX = dict(RMS, model_type="minimax", num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2, block_size=8)
MINIMAX |= dict(full_attn_alpha_factor=1.5, full_attn_beta_factor=0.7, linear_attn_alpha_factor=1.25)
MINIMAX |= dict(linear_attn_beta_factor=0.8, mlp_alpha_factor=0.9, mlp_beta_factor=1.1)

RWKV = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, context_length=64)
RWKV |= dict(model_type="rwkv", bos_token_id=1, eos_token_id=2)
ZAMBA = dict(RMS, model_type="zamba2", num_hidden_layers=5, mamba_d_state=6, mamba_d_conv=3, mamba_ngroups=2)
ZAMBA |= dict(n_mamba_heads=4, adapter_rank=5, tie_word_embeddings=True, num_attention_heads=8)
# Narrower than the others: with more, scores of blocks without a residual are so large that float32 itself differs by 1e-4.
ZAMBA |= dict(hidden_size=16, num_key_value_heads=8)

CASES: dict[str, dict[str, Any]] = {
    "lfm2": dict(SIZES, model_type="lfm2", norm_eps=1e-5, num_hidden_layers=4, block_multiple_of=8)
    | dict(tie_word_embeddings=True, layer_types=["conv", "full_attention", "conv", "conv"], rope_parameters=rope()),
    "qwen3_next": dict(RMS, model_type="qwen3_next", rope_parameters=rope(partial_rotary_factor=0.5))
    | DELTA
    | EXPERTS
    | SHORT,
    "qwen3_5": dict(RMS, model_type="qwen3_5_text", rope_parameters=rope(partial_rotary_factor=0.5)) | DELTA,
    "granitemoehybrid": GRANITE
    | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=24, shared_intermediate_size=40)
    | dict(attention_bias=True, mamba_proj_bias=True),
    "granitemoehybrid_dense": GRANITE
    | dict(num_local_experts=0, shared_intermediate_size=40, position_embedding_type="rope", rope_parameters=rope())
    | dict(tie_word_embeddings=True, time_step_limit=[0.0, float("inf")], mamba_conv_bias=False),
    # Granite 4 without recurrent layers, and without attention.
    "granitemoehybrid_attention": GRANITE
    | dict(layer_types=["full_attention"] * 3, num_local_experts=0, shared_intermediate_size=40)
    | dict(position_embedding_type="rope", rope_parameters=rope()),
    "granitemoehybrid_recurrent": GRANITE
    | dict(layer_types=None, num_local_experts=4, intermediate_size=24, shared_intermediate_size=40),
    "bamba": dict(RMS, model_type="bamba", attn_layer_indices=[1], attention_bias=True, mlp_bias=True)
    | MAMBA2
    | dict(mamba_proj_bias=True, rope_parameters=rope(partial_rotary_factor=0.5)),
    "falcon_h1": FALCON
    | dict(mamba_rms_norm=True, mamba_norm_before_gate=False, attention_bias=True, mlp_bias=True, mamba_proj_bias=True)
    | dict(projectors_bias=True, head_dim=16),
    "falcon_h1_normed": FALCON | dict(mamba_rms_norm=True, tie_word_embeddings=True, mamba_conv_bias=False),
    "falcon_h1_plain": FALCON | dict(time_step_limit=[0.0, float("inf")]),
    "qwen3_5_moe": dict(RMS, model_type="qwen3_5_moe_text", rope_parameters=rope(partial_rotary_factor=0.5))
    | DELTA
    | EXPERTS
    | SHORT,
    "mamba": dict(ALONE, model_type="mamba", time_step_rank=5, use_bias=True, tie_word_embeddings=True),
    "falcon_mamba": dict(ALONE, model_type="falcon_mamba", time_step_rank=5, tie_word_embeddings=False)
    | dict(mixer_rms_eps=1e-3, use_conv_bias=False),
    "mamba2": dict(ALONE, model_type="mamba2", num_heads=8, head_dim=8, n_groups=2, use_bias=True)
    | dict(tie_word_embeddings=False, time_step_limit=[0.1, 2.0]),
    "nemotron_h": dict(NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"], mlp_bias=True)
    | dict(use_bias=True, time_step_min=0.2),
    "nemotron_h_moe": dict(NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "moe"])
    | dict(n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=1.5)
    | dict(moe_intermediate_size=24, moe_shared_expert_intermediate_size=40),
    "kimi_linear": KIMI,
    "bailing_hybrid": LING | {"q_lora_rank": 20},
    "bailing_hybrid_unbounded": LING | {"kda_safe_gate": False, "layer_types": None, "layer_group_size": 2},
    "lfm2_moe": dict(SIZES, model_type="lfm2_moe", norm_eps=1e-5, num_hidden_layers=4, num_dense_layers=1)
    | dict(layer_types=["conv", "full_attention", "conv", "conv"], rope_parameters=rope(), num_experts=4)
    | dict(num_experts_per_tok=2, moe_intermediate_size=24, routed_scaling_factor=1.5),
    "jamba": dict(JAMBA, num_experts=4, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1)
    | dict(mamba_proj_bias=True),
    "jamba_dense": dict(JAMBA, num_experts=1, tie_word_embeddings=True, mamba_conv_bias=False),
    # As many channels of queries as of values: transformers 5.24 writes their convolutions in three equal parts.
    "olmo_hybrid": dict(
        RMS | DELTA, model_type="olmo_hybrid", linear_value_head_dim=4, rope_parameters=rope(theta=500.0)
    ),
    "olmo_hybrid_unrotated": dict(
        RMS | DELTA, model_type="olmo_hybrid", linear_value_head_dim=4, tie_word_embeddings=True
    )
    | dict(rope_parameters=dict(rope_type="default", rope_theta=None), linear_allow_neg_eigval=False),
    "minimax": MINIMAX | dict(layer_types=MIXED, rope_parameters=rope(theta=500.0)),
    "minimax_window": MINIMAX | dict(layer_types=None, sliding_window=7, head_dim=16, tie_word_embeddings=True),
    "minimax_lightning": MINIMAX | dict(layer_types=["linear_attention"] * 3, num_key_value_heads=4),
    "recurrent_gemma": dict(RMS, model_type="recurrent_gemma", num_hidden_layers=4, attention_window_size=7)
    | dict(lru_width=24, conv1d_width=3, logits_soft_cap=2.0, attention_bias=True, tie_word_embeddings=True),
    "lfm3": dict(SIZES, model_type="lfm3", norm_eps=1e-5, num_hidden_layers=5, head_dim=12, conv_L_cache=4)
    | dict(layer_types=["conv", "full_attention", "sliding_attention", "conv", "sliding_attention"], sliding_window=5)
    | dict(attention_bias=True)
    | dict(
        rope_parameters={
            "full_attention": rope("proportional", 500.0, partial_rotary_factor=0.5),
            "sliding_attention": rope(theta=100.0),
        }
    ),
    "lfm3_plain": dict(SIZES, model_type="lfm3", norm_eps=1e-5, num_hidden_layers=4, head_dim=8)
    | dict(use_sandwich_norm=False, use_attention_gate=False, tie_word_embeddings=True),
    "lara_mini": dict(RMS, model_type="lara_mini", head_dim=16, rope_parameters=rope(theta=500.0), sliding_window=5)
    | DELTA
    | EXPERTS
    | dict(layer_types=["linear_attention", "sliding_attention", "full_attention"] * 2, num_hidden_layers=6)
    | dict(tie_word_embeddings=True),
    "rwkv": RWKV | dict(attention_hidden_size=24, rescale_every=0),
    "rwkv_tied": RWKV | dict(intermediate_size=None, tie_word_embeddings=True),
    "zamba2": ZAMBA
    | dict(layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"], num_mem_blocks=2)
    | dict(use_shared_attention_adapter=True, use_mem_rope=True, rope_parameters=rope(theta=500.0), time_step_min=0.2),
    "zamba2_grouped": ZAMBA
    | dict(layers_block_type=["linear_attention", "hybrid"] * 2, num_hidden_layers=4, num_key_value_heads=2)
    | dict(add_bias_linear=True, rms_norm_eps=1e-3, hidden_act="silu"),
}
