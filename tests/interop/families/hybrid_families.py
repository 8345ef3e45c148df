"""Cases of interop/hf/catalog/hybrid."""

from __future__ import annotations

from typing import Any

from family_sizes import RMS, SIZES, rope

DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6)
DELTA |= dict(linear_conv_kernel_dim=3, head_dim=16, num_hidden_layers=5)
DELTA |= dict(layer_types=["linear_attention", "linear_attention", "full_attention"] + ["linear_attention"] * 2)
SHORT = dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40)

CASES: dict[str, dict[str, Any]] = {
    "lfm2": dict(SIZES, model_type="lfm2", norm_eps=1e-5, num_hidden_layers=4, block_multiple_of=8)
    | dict(tie_word_embeddings=True, layer_types=["conv", "full_attention", "conv", "conv"], rope_parameters=rope()),
    "qwen3_next": dict(RMS, model_type="qwen3_next", rope_parameters=rope(partial_rotary_factor=0.5))
    | DELTA
    | EXPERTS
    | SHORT,
    "qwen3_5": dict(RMS, model_type="qwen3_5_text", rope_parameters=rope(partial_rotary_factor=0.5)) | DELTA,
}
