"""HunYuan's mixtures of experts (Tencent 2025, 2026): its dense model, and Hy3, whose first layer has an MLP."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.dense.hunyuan import stretched
from capibara.interop.hf.catalog.experts.glm import DEEPSEEK_MOE, read_mlp_types, write_mlp_types
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    DEEPSEEK_EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    QWEN_EXPERTS,
    Names,
    renamed,
    shared_experts,
    without,
)
from capibara.models.api import TransformerConfig

_HUNYUAN = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + renamed(QK_NORM, (".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm."))
    + renamed(QWEN_EXPERTS, ("mlp.gate.weight", "mlp.gate.wg.weight"))
    + shared_experts("mlp.shared_mlp")
)
_HY3 = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + QK_NORM
    + renamed(
        DEEPSEEK_EXPERTS,
        ("mlp.gate.weight", "mlp.router.gate.weight"),
        ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
        ("mlp.shared_experts.", "mlp.shared_mlp."),
    )
)


def _prepare(values: Values) -> Values:
    """A list has the number of experts per token of each layer."""
    chosen = values["moe_topk"]
    if isinstance(chosen, list):
        of_layers = set(chosen[: values["num_hidden_layers"]])
        if len(of_layers) != 1 or len(chosen) < values["num_hidden_layers"]:
            raise UserError(
                f"config.json has moe_topk (num_experts_per_tok) = {str(chosen)[:60]}, must be the same number for all of "
                f"{values['num_hidden_layers']} layers: take another model"
            )
        values = {**values, "moe_topk": of_layers.pop()}
    return stretched(values)


def _read_hy3(values: Values) -> dict[str, Any]:
    """Where no experts are shared, transformers has one of the width of an MLP."""
    shared = {} if values["num_shared_experts"] else {"shared_experts": 1, "shared_dim": values["intermediate_size"]}
    return shared | read_mlp_types(values)


def _write_hy3(config: TransformerConfig) -> dict[str, Any]:
    moe = config.moe
    alone = moe is not None and moe.shared_experts == 1 and moe.shared_dim == config.mlp_dim
    return write_mlp_types(config) | ({"num_shared_experts": 0} if alone else {})


FAMILIES = (
    (
        Family(
            model_type="hunyuan_v1_moe",
            architectures=("HunYuanMoEV1ForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "rotated"},
            defaults=SILU | {"rms_norm_eps": 1e-5, "num_experts": 1, "num_experts_per_tok": 1, "moe_topk": 1},
            biases=ATTENTION_BIAS,
            aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
            experts="num_experts",
            moe={"gates": "normalized", "shared_experts": 1},
            moe_keys={"top_k": "moe_topk"},
            prepare=_prepare,
        ),
        Names(_HUNYUAN, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="hy_v3",
            architectures=("HYV3ForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "head"},
            defaults=SILU
            | {"rope_theta": 11_158_840.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}
            | {"num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536}
            | {"router_scaling_factor": 2.826},
            only={"mlp_bias": (False, None)},
            read_keys=("mlp_layer_types",),
            biases=ATTENTION_BIAS,
            aliases={"num_local_experts": "num_experts"},
            experts="num_experts",
            moe=DEEPSEEK_MOE | {"gates": "normalized", "first_dense": 1},
            moe_keys={
                "expert_dim": "moe_intermediate_size",
                "shared_experts": "num_shared_experts",
                "scale": "router_scaling_factor",
            },
            read_moe=_read_hy3,
            write=_write_hy3,
        ),
        # The layer after the last one, which predicts several tokens: transformers leaves it out by this number.
        Names(
            _HY3,
            (*LLAMA_LIKE[0], (r"mlp\.gate\.weight$", "mlp.router.gate.weight"))
            + ((r"mlp\.e_score_correction_bias$", "mlp.expert_bias"), (r"mlp\.shared_experts\.", "mlp.shared_mlp.")),
            LLAMA_LIKE[1],
            r"^model\.layers\.80",
        ),
    ),
)
