"""Small models of MaxText: settings of base.yml, by name."""

from __future__ import annotations

SIZES = {
    "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 16, "base_mlp_dim": 48,
    "base_num_decoder_layers": 4, "vocab_size": 128, "max_target_length": 32, "per_device_batch_size": 1,
    "dtype": "float32", "weight_dtype": "float32", "attention": "dot_product", "matmul_precision": "highest", "logits_dot_in_fp32": True,
}  # fmt: skip
SILU = {"mlp_activations": ["silu", "linear"], "normalization_layer_epsilon": 1e-5, "logits_via_embedding": False}
GEMMA = {"mlp_activations": ["gelu", "linear"], "normalization_layer_epsilon": 1e-6, "logits_via_embedding": True}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 24,
    "base_mlp_dim": 24,
    "sparse_matmul": False,
    "capacity_factor": -1.0,
}
CASES: dict[str, dict[str, object]] = {
    "llama3": SILU | {"decoder_block": "llama2", "rope_max_timescale": 500_000},
    "llama3.1": SILU | {"decoder_block": "llama2", "rope_max_timescale": 500_000, "rope_type": "llama3.1"},
    "llama3.1_unscaled": SILU | {"decoder_block": "llama2", "rope_type": "llama3.1", "rope_use_scale": False},
    "llama_unscanned": SILU | {"decoder_block": "llama2", "scan_layers": False},
    "llama_tied": SILU | {"decoder_block": "llama2", "logits_via_embedding": True},
    "mistral": SILU | {"decoder_block": "mistral"},
    "mixtral": SILU | EXPERTS | {"decoder_block": "mixtral"},
    "mixtral_unscanned": SILU | EXPERTS | {"decoder_block": "mixtral", "scan_layers": False},
    "gemma": GEMMA | {"decoder_block": "gemma"},
    "gemma2": GEMMA | {
        "decoder_block": "gemma2", "final_logits_soft_cap": 30.0, "attn_logits_soft_cap": 50.0, "sliding_window_size": 8,
        "use_post_attn_norm": True, "use_post_ffw_norm": True,
    },
    "gemma2_unscanned": GEMMA | {
        "decoder_block": "gemma2", "sliding_window_size": 8, "use_post_attn_norm": True, "use_post_ffw_norm": True,
        "scan_layers": False,
    },
    "gemma3": GEMMA | {
        "decoder_block": "gemma3", "base_num_decoder_layers": 8, "sliding_window_size": 8, "use_post_attn_norm": True,
        "use_post_ffw_norm": True, "local_rope_max_timescale": 10_000, "rope_max_timescale": 1_000_000,
        "model_name": "gemma3-4b", "override_model_config": True, "use_multimodal": False,
    },
    "qwen2": SILU | {"decoder_block": "qwen2", "attention_bias": True, "rope_max_timescale": 1_000_000},
    "qwen3": SILU | {"decoder_block": "qwen3", "use_qk_norm": True, "rope_max_timescale": 1_000_000},
    "qwen3_tied": SILU | {
        "decoder_block": "qwen3", "use_qk_norm": True, "logits_via_embedding": True, "normalize_embedding_logits": False,
    },
    "qwen3_unscanned": SILU | {"decoder_block": "qwen3", "use_qk_norm": True, "scan_layers": False},
    "qwen3_moe": SILU | EXPERTS | {"decoder_block": "qwen3_moe", "use_qk_norm": True, "norm_topk_prob": True},
    "olmo3": SILU | {
        "decoder_block": "olmo3", "model_name": "olmo3-7b-pt", "override_model_config": True, "sliding_window_size": 8,
    },
}  # fmt: skip
