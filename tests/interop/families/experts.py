"""Cases of interop/hf/catalog/experts."""

from __future__ import annotations

from typing import Any

from sizes import RMS, rope

FACTORS = dict(embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, attention_multiplier=0.2)

CASES: dict[str, dict[str, Any]] = {
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
    | {"shared_expert_intermediate_size": 40, "rope_parameters": rope()},
}
