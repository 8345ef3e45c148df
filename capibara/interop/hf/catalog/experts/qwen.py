"""Qwen2-MoE (Alibaba 2024, arXiv:2407.10671): experts beside a shared one with a gate."""

from __future__ import annotations

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import KEYS, QWEN_WINDOW, SILU, Family, Values, typed
from capibara.interop.hf.layout.rows import (
    LLAMA_LIKE,
    QWEN2,
    QWEN_SHARED_EXPERTS,
    Names,
    without,
)

_QWEN2_MOE = without(QWEN2, ".mlp.") + QWEN_SHARED_EXPERTS


def _prepare(values: Values) -> Values:
    """Of the first max_window_layers every second layer has a window, from the first; in Qwen 2 the others have one."""
    used, first = values["use_sliding_window"], values["max_window_layers"]
    values = typed(values, lambda i: not used or i % 2 == 1 or i >= first)
    if "sliding_attention" in values["layer_types"] and not (used and values.get("sliding_window")):
        raise UserError(
            f"config.json has layer_types 'sliding_attention' with use_sliding_window = {used} and sliding_window = "
            f"{values.get('sliding_window')}, must be true and a number: take another model"
        )
    return values


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
            prepare=_prepare,
        ),
        Names(_QWEN2_MOE, *LLAMA_LIKE),
    ),
)
