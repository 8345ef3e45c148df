"""Cases of interop/hf/catalog/experts."""

from __future__ import annotations

from typing import Any

from family_sizes import LAYER, RMS, rope

FACTORS = dict(embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, attention_multiplier=0.2)

V4 = {key: value for key, value in RMS.items() if key not in ("intermediate_size", "num_key_value_heads")}
V4 |= dict(model_type="deepseek_v4", head_dim=16, q_lora_rank=12, o_groups=2, o_lora_rank=6, partial_rotary_factor=0.5)
V4 |= dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, swiglu_limit=0.5, sliding_window=7)
V4 |= dict(index_n_heads=16, index_head_dim=12, index_topk=3, hc_mult=3, routed_scaling_factor=1.25)
V4 |= dict(compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 8})
V4_KINDS = ["heavily_compressed_attention", "compressed_sparse_attention"]
V4_MAIN, V4_COMPRESS = (rope(theta=theta, partial_rotary_factor=0.25) for theta in (100.0, 800.0))
DEEPSEEK = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2, n_group=4)
DEEPSEEK |= dict(
    topk_group=2, routed_scaling_factor=1.5, norm_topk_prob=True, first_k_dense_replace=1, num_hidden_layers=3
)

LATENT = dict(
    kv_lora_rank=12, q_lora_rank=20, qk_rope_head_dim=8, v_head_dim=10, qk_nope_head_dim=6, num_key_value_heads=4
)
YARN = rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7)

WHOLE, WINDOW = "full_attention", "sliding_attention"

LONG = rope("longrope", 500.0, short_factor=[1.0, 1.1, 1.5, 2.0], long_factor=[1.0, 2.0, 4.0, 8.0])
LONG |= dict(short_mscale=1.2, long_mscale=1.2, original_max_position_embeddings=16)

HALVES = ((WHOLE, 500.0, 0.5), (WINDOW, 100.0, 0.25))
LAGUNA_YARN = rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5)

M3 = dict(RMS, num_hidden_layers=4, head_dim=12, intermediate_size=24, dense_intermediate_size=48, num_local_experts=6)
M3 |= dict(num_experts_per_tok=2, shared_intermediate_size=40, routed_scaling_factor=1.5, swiglu_alpha=1.3)
M3 |= dict(swiglu_limit=0.9, index_n_heads=2, index_head_dim=10, index_block_size=4, index_topk_blocks=3)
M3 |= dict(index_local_blocks=1, mlp_layer_types=["dense", "sparse", "sparse", "sparse"])
M3 |= dict(
    layer_types=[WHOLE, *["minimax_m3_sparse"] * 3], rope_parameters=rope(theta=500.0, partial_rotary_factor=0.5)
)

CASES: dict[str, dict[str, Any]] = {
    "aria_text": dict(RMS, model_type="aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=2)
    | dict(attention_bias=True, head_dim=12, intermediate_size=24, rope_parameters=rope(theta=500.0)),
    "llama4": dict(RMS, model_type="llama4_text", head_dim=16, num_hidden_layers=5, attention_bias=True)
    | dict(no_rope_layers=[1, 1, 0, 1, 0], layer_types=None, attention_chunk_size=7, floor_scale=4, attn_scale=0.5)
    | dict(num_local_experts=4, num_experts_per_tok=2, moe_layers=[1, 2, 3, 4], intermediate_size_mlp=40)
    | dict(rope_parameters=rope(theta=500_000.0)),
    "llama4_interleaved": dict(
        RMS, model_type="llama4_text", head_dim=16, num_hidden_layers=4, intermediate_size_mlp=40
    )
    | dict(num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=7)
    | dict(rope_parameters=rope(theta=500_000.0)),
    "deepseek_v2": dict(RMS, model_type="deepseek_v2", topk_method="group_limited_greedy")
    | DEEPSEEK
    | LATENT
    | {"rope_parameters": rope()},
    "deepseek_v3": dict(RMS, model_type="deepseek_v3") | DEEPSEEK | LATENT | {"rope_parameters": YARN},
    "deepseek_v4": V4
    | dict(layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"] + V4_KINDS)
    | dict(mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 3, num_hidden_layers=5, hc_sinkhorn_iters=3, hc_eps=1e-2)
    | dict(
        rope_parameters=rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16), compress_rope_theta=500.0
    ),
    # The published order of layers, angles of each kind of layers, and a tied head.
    "deepseek_v4_tied": V4
    | dict(num_hidden_layers=4, hc_mult=2, hc_sinkhorn_iters=1, scoring_func="sigmoid", tie_word_embeddings=True)
    | dict(rope_parameters=dict(main=V4_MAIN, compress=V4_COMPRESS), sliding_window=3, o_groups=4, index_topk=512),
    "deepseek_v32": dict(RMS, model_type="deepseek_v32", index_topk=7, index_n_heads=16, index_head_dim=12)
    | DEEPSEEK
    | LATENT
    | {"rope_parameters": YARN},
    "glm_moe_dsa": dict(RMS, model_type="glm_moe_dsa", index_topk=7, index_n_heads=16, index_head_dim=12)
    | DEEPSEEK
    | LATENT
    | {"rope_parameters": rope()},
    "youtu": dict(RMS, model_type="youtu", tie_word_embeddings=True)
    | LATENT
    | {"q_lora_rank": None, "rope_interleave": False, "rope_parameters": rope()},
    "dots1": dict(RMS, model_type="dots1", attention_bias=True, head_dim=16, sliding_window=8, max_window_layers=2)
    | DEEPSEEK
    | {"rope_parameters": rope()},
    "glm4_moe": dict(RMS, model_type="glm4_moe", attention_bias=True, use_qk_norm=True, head_dim=16)
    | DEEPSEEK
    | {"rope_parameters": rope(partial_rotary_factor=0.5)},
    "flex_olmo": dict(
        RMS, model_type="flex_olmo", num_experts=4, num_experts_per_tok=2, rope_parameters=rope(theta=500.0)
    ),
    "granitemoe": dict(RMS, model_type="granitemoe", num_local_experts=4, num_experts_per_tok=2, attention_bias=True)
    | FACTORS
    | {"rope_parameters": rope()},
    "minimax_m2": dict(RMS, model_type="minimax_m2", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.5)},
    "olmoe": dict(RMS, model_type="olmoe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, clip_qkv=0.8)
    | {"rope_parameters": rope()},
    "qwen2_moe": dict(RMS, model_type="qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    | {"shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    | {"rope_parameters": rope()},
    "mellum": dict(RMS, model_type="mellum", head_dim=12, sliding_window=5, moe_intermediate_size=24, num_experts=5)
    | {"num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True}
    | {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["sparse", "sparse"]}
    | {"rope_parameters": {"full_attention": rope(theta=500.0), "sliding_attention": rope(theta=100.0)}},
    "glm4_moe_lite": dict(RMS, model_type="glm4_moe_lite", mlp_layer_types=["dense", "sparse", "sparse"])
    | DEEPSEEK
    | LATENT
    | {"rope_parameters": YARN},
    "granitemoeshared": dict(RMS, model_type="granitemoeshared", num_local_experts=4, num_experts_per_tok=2)
    | FACTORS
    | {"attention_bias": True, "shared_intermediate_size": 40, "rope_parameters": rope()},
    "exaone_moe": dict(RMS, model_type="exaone_moe", sliding_window=5, num_experts=8, num_shared_experts=2)
    | DEEPSEEK
    | {"num_hidden_layers": 4, "layer_types": [WINDOW, WINDOW, WINDOW, WHOLE], "first_k_dense_replace": 2}
    | {"rope_parameters": rope(theta=500.0)},
    "ernie4_5_moe": dict(RMS, model_type="ernie4_5_moe", num_hidden_layers=3, moe_num_experts=8, moe_k=2)
    | {"moe_intermediate_size": 24, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
    | {"rope_parameters": rope(theta=500.0), "tie_word_embeddings": True},
    "hunyuan_v1_moe": dict(
        RMS, model_type="hunyuan_v1_moe", head_dim=12, num_experts=4, moe_topk=2, attention_bias=True
    )
    | {"rope_parameters": rope("dynamic", theta=500.0, factor=1.0, alpha=20.0)},
    "solar_open": dict(RMS, model_type="solar_open", head_dim=12, attention_bias=True)
    | DEEPSEEK
    | {"num_hidden_layers": 2, "rope_parameters": YARN},
    "sarvam_mla": dict(RMS, model_type="sarvam_mla") | DEEPSEEK | LATENT | {"rope_parameters": YARN},
    "sarvam_moe": dict(RMS, model_type="sarvam_moe", attention_bias=True, use_qk_norm=True, head_dim=16)
    | DEEPSEEK
    | {"rope_parameters": rope(theta=500.0)},
    "mistral4": dict(RMS, model_type="mistral4")
    | DEEPSEEK
    | LATENT
    | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8}},
    "dbrx": dict(model_type="dbrx", vocab_size=96, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
    | {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": rope()}
    | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10_000.0}}
    | {"ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2}},
    "phimoe": dict(RMS, model_type="phimoe", num_local_experts=5, attention_bias=True, lm_head_bias=True)
    | {"router_jitter_noise": 0.2, "sliding_window": 12, "rope_parameters": LONG},
    "afmoe": dict(RMS, model_type="afmoe", num_hidden_layers=4, head_dim=12, sliding_window=5, attention_bias=True)
    | {
        "layer_types": [WINDOW, WINDOW, WINDOW, WHOLE],
        "num_dense_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    }
    | {"moe_intermediate_size": 24, "num_shared_experts": 2, "route_scale": 1.5, "mup_enabled": True}
    | {"rope_parameters": rope(theta=500.0)},
    "minicpm3": dict(
        RMS, model_type="minicpm3", scale_emb=3, scale_depth=0.7, dim_model_base=8, tie_word_embeddings=True
    )
    | LATENT
    | {"rope_parameters": LONG},
    "hy_v3": dict(RMS, model_type="hy_v3", num_hidden_layers=3, head_dim=12, num_experts=6, num_experts_per_tok=2)
    | {"num_shared_experts": 2, "moe_intermediate_size": 24, "router_scaling_factor": 1.5, "attention_bias": True}
    | {"mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": rope(theta=500.0)},
    "cohere2_moe": dict(LAYER, model_type="cohere2_moe", num_hidden_layers=4, head_dim=12, logit_scale=0.25)
    | {"sliding_window": 5, "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "attention_bias": True}
    | {"prefix_dense_intermediate_size": 40, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    | {
        "layer_types": [WHOLE, WINDOW, WHOLE, WINDOW],
        "tie_word_embeddings": True,
        "rope_parameters": rope(theta=500.0),
    },
    "cohere2_moe_sigmoid": dict(
        RMS, model_type="cohere2_moe", num_hidden_layers=3, head_dim=8, logit_scale=0.25, sliding_window=5
    )
    | {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "expert_selection_fn": "sigmoid"}
    | {"norm_topk_prob": False, "shared_expert_combination_strategy": "sum"}
    | {"first_k_dense_replace": 1, "prefix_dense_sliding_window_pattern": 2, "rope_parameters": rope(theta=500.0)},
    "granitemoe_swa": dict(RMS, model_type="granitemoe_swa", num_hidden_layers=4, num_local_experts=4)
    | FACTORS
    | {"num_experts_per_tok": 2, "shared_intermediate_size": 40, "attention_bias": True, "sliding_window": 5}
    | {"layer_types": [WHOLE, WINDOW, WINDOW, WHOLE], "layer_rope_theta": [500.0, 100.0, 100.0, 0.0]}
    | {"rope_parameters": rope(theta=500.0)},
    "mimo_v2_flash": dict(RMS, model_type="mimo_v2_flash", num_key_value_heads=1, head_dim=16, v_head_dim=12)
    | DEEPSEEK
    | {
        "num_hidden_layers": 4,
        "layer_types": [WHOLE, WINDOW, WINDOW, WHOLE],
        "sliding_window": 6,
        "attention_bias": True,
    }
    | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "attention_value_scale": 0.6}
    | {"rope_parameters": {kind: rope(theta=theta, partial_rotary_factor=share) for kind, theta, share in HALVES}},
    "laguna": dict(RMS, model_type="laguna", num_hidden_layers=4, head_dim=12, sliding_window=6, attention_bias=True)
    | {"layer_types": [WHOLE, WINDOW, WINDOW, WINDOW], "num_attention_heads_per_layer": [4, 6, 6, 6]}
    | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.5}
    | {"moe_router_logit_softcapping": 0.8}
    | {"rope_parameters": {WHOLE: LAGUNA_YARN, WINDOW: rope(theta=100.0, partial_rotary_factor=1.0)}},
    "laguna_elements": dict(RMS, model_type="laguna", num_hidden_layers=3, head_dim=16, gating="per-element")
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "axk2": dict(RMS, model_type="axk2", mlp_layer_types=["dense", "sparse", "sparse"], gated_norm_rank=5)
    | DEEPSEEK
    | LATENT
    | {"index_topk": 7, "index_n_heads": 16, "index_head_dim": 12, "rope_parameters": YARN},
    "axk2_ungrouped": dict(RMS, model_type="axk2", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    | LATENT
    | {"first_k_dense_replace": 0, "index_topk": 40, "rope_parameters": rope()},
    "minimax_m3": dict(M3, model_type="minimax_m3_vl_text"),
    "axk1": dict(RMS, model_type="axk1", mlp_layer_types=["dense", "sparse", "sparse"])
    | DEEPSEEK
    | LATENT
    | {"rope_parameters": YARN},
    "kolibri1": dict(RMS, model_type="kolibri1", num_hidden_layers=4, head_dim=12, sliding_window=5, num_experts=6)
    | {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    | {"layer_types": [WINDOW, WINDOW, WINDOW, WHOLE], "rope_parameters": rope(theta=500.0)},
    "kolibri1_whole": dict(RMS, model_type="kolibri1", head_dim=8, num_experts=4, num_experts_per_tok=2)
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "norm_topk_prob": True}
    | {"layer_types": [WHOLE, WHOLE], "tie_word_embeddings": True},
    "flint": dict(RMS, model_type="flint", num_hidden_layers=6, head_dim=12, sliding_window=5, num_experts=6)
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    | {"attention_bias": True, "rope_parameters": rope(theta=500.0)},
    "flint_sparse_steps": dict(
        RMS, model_type="flint", num_hidden_layers=4, head_dim=8, sliding_window=5, num_experts=4
    )
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    | {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [], "rope_parameters": rope(theta=500.0)},
}
