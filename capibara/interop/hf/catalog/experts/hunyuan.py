"""HunYuan's mixture of experts (Tencent 2025): its dense model with chosen experts beside one that every token meets."""

from __future__ import annotations

from capibara.core.types import UserError
from capibara.interop.hf.catalog.dense.hunyuan import stretched
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    QWEN_EXPERTS,
    Names,
    renamed,
    shared_experts,
    without,
)

_HUNYUAN = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + renamed(QK_NORM, (".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm."))
    + renamed(QWEN_EXPERTS, ("mlp.gate.weight", "mlp.gate.wg.weight"))
    + shared_experts("mlp.shared_mlp")
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
)
