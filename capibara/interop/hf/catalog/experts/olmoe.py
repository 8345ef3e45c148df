"""OLMoE (AI2 2024, arXiv:2409.02060) and FlexOlmo (AI2 2025, arXiv:2507.07024): experts in OLMo's blocks."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    LLAMA,
    LLAMA_LIKE,
    OUTPUT_NORMS,
    QWEN_EXPERTS,
    WHOLE_NORMS,
    Names,
    without,
)

_KEYS = {ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}
_DEFAULTS = SILU | {"norm_topk_prob": False, "output_router_logits": False, "router_aux_loss_coef": 0.01}
_OLMOE = without(LLAMA, ".mlp.") + ATTENTION_BIASES + WHOLE_NORMS + QWEN_EXPERTS

FAMILIES = (
    (
        Family(
            model_type="olmoe",
            architectures=("OlmoeForCausalLM",),
            keys=_KEYS | {"attention_clip": "clip_qkv"},
            fixed={"qk_norm": "whole"},
            defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64},
            read_keys=("head_dim",),
            biases=ATTENTION_BIAS,
            aliases={"num_local_experts": "num_experts"},
            experts="num_experts",
        ),
        Names(_OLMOE, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="flex_olmo",
            architectures=("FlexOlmoForCausalLM",),
            keys=_KEYS,
            fixed={"qk_norm": "whole", "norm_placement": "output"},
            defaults=_DEFAULTS | {"rope_theta": 500_000.0, "num_experts_per_tok": 5, "num_experts": 7},
            read_keys=("head_dim",),
            biases=ATTENTION_BIAS,
            aliases={"num_local_experts": "num_experts"},
            experts="num_experts",
        ),
        Names(without(_OLMOE, "layernorm") + OUTPUT_NORMS, *LLAMA_LIKE),
    ),
)
