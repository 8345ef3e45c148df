"""ERNIE 4.5's mixtures of experts (Baidu 2025): softmax scores with a correction of the choice, shared experts."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout import mtp
from capibara.interop.hf.layout.family import KEYS, MTP_KEY, SILU, Family, Values, expert_layers
from capibara.interop.hf.layout.rows import (
    DEEPSEEK_EXPERTS,
    EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    L,
    M,
    Names,
    rows,
    without,
)
from capibara.models.api import TransformerConfig

_CORRECTION = "mlp.moe_statics.e_score_correction_bias"
_LAYERS = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
_ERNIE = (
    without(LLAMA, ".mlp.")
    + without(DEEPSEEK_EXPERTS, "e_score_correction_bias")
    + rows([(L + _CORRECTION, "i e", M + "correction", "i")], EXPERTS)
)


def _read_moe(values: Values) -> dict[str, Any]:
    count = values["num_hidden_layers"]
    start, end, every = (values[key] for key in _LAYERS)
    end = count - 1 if end == -1 else end
    if every < 1:
        raise UserError(f"config.json has moe_layer_interval = {every}, must be at least 1: copy the file again")
    sparse = [(layer + 1) % every == 0 and start <= layer <= end for layer in range(count)]
    return expert_layers(sparse, ", ".join(f"{key} = {values[key]}" for key in _LAYERS))


def _write(config: TransformerConfig) -> dict[str, Any]:
    if config.moe is None:
        return {}
    sparse = sorted({*range(config.num_layers)} - {*config.dense_layers})
    every = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return dict(zip(_LAYERS, (sparse[0], sparse[-1], every)))


FAMILIES = (
    (
        Family(
            model_type="ernie4_5_moe",
            architectures=("Ernie4_5_MoeForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
            defaults=SILU
            | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "moe_num_experts": 64}
            | {"moe_intermediate_size": 1536, "num_experts_per_tok": 6, "moe_num_shared_experts": 2, "moe_k": 6}
            | dict(zip(_LAYERS, (1, -1, 1)))
            | {"router_aux_loss_coef": 0.001, "output_router_logits": False},
            # Biases of all MLPs but the experts' own; the least sum that weights are divided by.
            only={"use_bias": (False, None), "moe_norm_min": (1e-12,)},
            aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
            read_keys=("head_dim",),
            pairs="adjacent",
            tied=True,
            experts="moe_num_experts",
            moe={"gates": "normalized", "correction": "expert"},
            moe_keys={
                "expert_dim": "moe_intermediate_size",
                "shared_experts": "moe_num_shared_experts",
                "top_k": "moe_k",
            },
            read_moe=_read_moe,
            mtp_key=MTP_KEY,
            mtp={"mlp": "dense", "norm": "none"},
            write=_write,
        ),
        Names(
            _ERNIE,
            (*LLAMA_LIKE[0], (r"mlp\.gate\.moe_statics\.", "mlp.moe_statics.")),
            LLAMA_LIKE[1],
            mtp=mtp.ERNIE,
        ),
    ),
)
