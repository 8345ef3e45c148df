"""Cases of interop/hf/catalog/experts."""

from __future__ import annotations

from typing import Any

from sizes import RMS, rope

CASES: dict[str, dict[str, Any]] = {
    "mellum": dict(RMS, model_type="mellum", head_dim=12, sliding_window=5, moe_intermediate_size=24, num_experts=5)
    | {"num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True}
    | {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["sparse", "sparse"]}
    | {"rope_parameters": {"full_attention": rope(theta=500.0), "sliding_attention": rope(theta=100.0)}},
}
