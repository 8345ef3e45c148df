"""Qwen2-MoE (Alibaba 2024, arXiv:2407.10671): experts beside a shared one with a gate."""

from __future__ import annotations

from capibara.interop.hf.layout.family import KEYS, QWEN_WINDOW, SILU, Family
from capibara.interop.hf.layout.rows import (
    EXPERTS,
    LLAMA_LIKE,
    QWEN2,
    QWEN_EXPERTS,
    L,
    M,
    Names,
    rows,
    shared_experts,
    without,
)

_QWEN2_MOE = (
    without(QWEN2, ".mlp.")
    + QWEN_EXPERTS
    + shared_experts("mlp.shared_expert")
    + rows([(L + "mlp.shared_expert_gate.weight", "s d", M + "shared_switch")], EXPERTS)
)

FAMILIES = (
    (
        Family(
            model_type="qwen2_moe",
            architectures=("Qwen2MoeForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}
            | {"mlp_dim": "moe_intermediate_size"},
            defaults=SILU
            | QWEN_WINDOW
            | {"num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "output_router_logits": False}
            | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True}
            | {"num_key_value_heads": 16, "router_aux_loss_coef": 0.001},
            read_keys=("head_dim",),
            only={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
            biases={"qkv_bias": "qkv"},
            window="types",
            experts="num_experts",
            moe={"shared_experts": 1, "shared_gate": "sigmoid"},
            moe_keys={"shared_dim": "shared_expert_intermediate_size"},
        ),
        Names(_QWEN2_MOE, *LLAMA_LIKE),
    ),
)
