"""GLM 4.5 (Z.ai 2025, arXiv:2508.06471) and dots.llm1 (rednote 2025, arXiv:2506.05767): DeepSeek-V3's experts, plain attention."""

from __future__ import annotations

from typing import Any

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    DEEPSEEK_EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    Names,
    without,
)
from capibara.models.api import TransformerConfig

DEEPSEEK_KEYS = {
    "expert_dim": "moe_intermediate_size",
    "first_dense": "first_k_dense_replace",
    "shared_experts": "n_shared_experts",
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
}
DEEPSEEK_MOE = {"score": "sigmoid", "correction": "expert"}
_GLM4_MOE = without(LLAMA, ".mlp.") + without(ATTENTION_BIASES, "o_proj") + QK_NORM + DEEPSEEK_EXPERTS
_DOTS1 = without(LLAMA, ".mlp.") + ATTENTION_BIASES + QK_NORM + DEEPSEEK_EXPERTS


def _read(values: Values) -> dict[str, Any]:
    return {"qk_norm": "head" if values.get("use_qk_norm") else "none"}


def _write(config: TransformerConfig) -> dict[str, Any]:
    return {"use_qk_norm": config.qk_norm == "head"}


FAMILIES = (
    (
        Family(
            model_type="glm4_moe",
            architectures=("Glm4MoeForCausalLM",),
            keys=KEYS,
            defaults=SILU
            | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 8, "n_routed_experts": 128}
            | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1}
            | {"topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "use_qk_norm": False},
            biases={"attention_bias": "qkv"},
            aliases={"num_local_experts": "n_routed_experts"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys=DEEPSEEK_KEYS,
            partial=True,
            fraction=0.5,
            read=_read,
            write=_write,
        ),
        # The layers after the last one, which predict several tokens: transformers leaves them out by these numbers.
        Names(_GLM4_MOE, *LLAMA_LIKE, parts=r"^model\.layers\.(?:46|92)\."),
    ),
    (
        Family(
            model_type="dots1",
            architectures=("Dots1ForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "head"},
            defaults=SILU
            | {"num_key_value_heads": 32, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
            | {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "sliding_window": 4096, "max_window_layers": 62},
            biases=ATTENTION_BIAS,
            window="types",
            aliases={"num_local_experts": "n_routed_experts"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys=DEEPSEEK_KEYS,
        ),
        Names(_DOTS1, *LLAMA_LIKE),
    ),
)
