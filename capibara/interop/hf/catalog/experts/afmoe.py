"""AFMoE (Arcee 2025): attention with a gate and rotary positions in windows alone, sigmoid scores, norms on both sides."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values, last_of
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    DEEPSEEK_EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    A,
    L,
    Names,
    renamed,
    rows,
    without,
)
from capibara.models.api import DecoderConfig, TransformerConfig

_AFMOE = (
    without(LLAMA, ".mlp.", "post_attention_layernorm")
    + ATTENTION_BIASES
    + QK_NORM
    + rows(
        [
            (L + "self_attn.gate_proj.weight", "nh d", A + "gate"),
            (L + "post_attention_layernorm.weight", "d", "layers/attention_post_norm/scale"),
            (L + "pre_mlp_layernorm.weight", "d", "layers/mlp_norm/scale"),
            (L + "post_mlp_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
        ],
        {A + "gate": "ldnh"},
    )
    + renamed(
        DEEPSEEK_EXPERTS,
        ("mlp.gate.weight", "mlp.router.gate.weight"),
        ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
    )
)


def _prepare(values: Values) -> Values:
    every = values["global_attn_every_n_layers"]
    if not every or every < 1:
        raise UserError(
            f"config.json has global_attn_every_n_layers = {every}, must be at least 1: copy the file again"
        )
    values = last_of(every)(values)
    if values.get("sliding_window") is None and "sliding_attention" in values["layer_types"]:
        raise UserError(
            "config.json has layer_types 'sliding_attention' and sliding_window = null, must be a number: copy the file again"
        )
    return values


def _read(values: Values) -> dict[str, Any]:
    """Layers without a window have no rotary positions, even if no layer has a window."""
    scale = {"embedding_scale": "sqrt_dim" if values["mup_enabled"] else "none"}
    return scale | ({"layer_pattern": ("unrotated",)} if values.get("sliding_window") is None else {})


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    return {"mup_enabled": config.embedding_scale == "sqrt_dim"}


FAMILIES = (
    (
        Family(
            model_type="afmoe",
            architectures=("AfmoeForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "head", "norm_placement": "sandwich", "attention_gate": "sigmoid"},
            defaults=SILU
            | {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4}
            | {"moe_intermediate_size": 1408, "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6}
            | {"num_shared_experts": 2, "route_scale": 1.0, "mup_enabled": False},
            biases=ATTENTION_BIAS,
            window="types",
            kinds={"full_attention": "unrotated", "sliding_attention": "local"},
            experts="num_experts",
            moe={"score": "sigmoid", "gates": "normalized", "correction": "expert"},
            moe_keys={"expert_dim": "moe_intermediate_size", "first_dense": "num_dense_layers"}
            | {"shared_experts": "num_shared_experts", "scale": "route_scale"},
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(_AFMOE, *LLAMA_LIKE),
    ),
)
