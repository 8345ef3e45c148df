"""Llama 4 (Meta 2025): attention in blocks, layers without rotary positions, experts whose inputs are weighted.

Aria's language model (Rhymes 2024, arXiv:2410.05993) is Llama with experts, whose weights are stored turned around as Llama 4's.
"""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import (
    ATTENTION_BIAS,
    KEYS,
    ONLY_SILU,
    SILU,
    Family,
    Values,
    expert_layers,
    unrotated,
)
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    EXPERTS,
    FIRST_MLP,
    LLAMA,
    LLAMA_LIKE,
    L,
    M,
    Names,
    renamed,
    rows,
    shared_experts,
    without,
)
from capibara.models.api import DecoderConfig, TransformerConfig

_LLAMA4 = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + renamed(FIRST_MLP, (".mlp.", ".feed_forward."))
    + shared_experts("feed_forward.shared_expert")
    + rows(
        [
            (L + "feed_forward.router.weight", "e d", M + "router"),
            (L + "feed_forward.experts.gate_up_proj", "e d f", f"{M}gate {M}up", "f"),
            (L + "feed_forward.experts.down_proj", "e f d", M + "down"),
        ],
        EXPERTS,
    )
)
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_READ_KEYS = (
    "no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size", "moe_layers",
    "interleave_moe_layer_step", "use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale",
)  # fmt: skip


def _rotated(values: Values) -> list[float]:
    """For each layer, whether it has rotary positions."""
    count, rotated, every = values["num_hidden_layers"], values.get("no_rope_layers"), values["no_rope_layer_interval"]
    if rotated:
        if len(rotated) < count:
            raise UserError(
                f"config.json has {len(rotated)} no_rope_layers, must be one for each of {count} layers: copy the file again"
            )
        return list(rotated[:count])
    if not every or every < 1:
        raise UserError(f"config.json has no_rope_layer_interval = {every}, must be at least 1: try 4")
    return [float((layer + 1) % every != 0) for layer in range(count)]


def _read(values: Values) -> dict[str, Any]:
    rotated, chunk = _rotated(values), values["attention_chunk_size"]
    types = values.get("layer_types") or [_CHUNKED if turned and chunk else _FULL for turned in rotated]
    if len(types) != len(rotated):
        raise UserError(f"config.json has {len(types)} layer_types, must be one for each of {len(rotated)} layers")
    if unknown := [name for name in types if name not in (_CHUNKED, _FULL)]:
        raise UserError(f"config.json has layer_types {unknown[0]!r}, must be one of {_CHUNKED}, {_FULL}")
    local = ["sliding_attention" if name == _CHUNKED else name for name in types]
    fields = unrotated(local, rotated, chunk, "no_rope_layers")
    fields["qk_norm"] = "unit" if values["use_qk_norm"] else "none"
    if fields["window"]:
        fields["window_kind"] = "block"
    if values["attn_temperature_tuning"] and values["attn_scale"] and "unrotated" in fields["layer_pattern"]:
        growth = {"query_growth": values["attn_scale"], "query_growth_length": values["floor_scale"]}
        fields |= growth | {"query_growth_layers": "unrotated"}
    return fields


def _read_moe(values: Values) -> dict[str, Any]:
    count, chosen, step = values["num_hidden_layers"], values.get("moe_layers"), values["interleave_moe_layer_step"]
    if chosen is None and not (step and step > 0):
        raise UserError(f"config.json has interleave_moe_layer_step = {step}, must be at least 1: copy the file again")
    sparse = range(step - 1, count, step) if chosen is None else chosen
    of = f"moe_layers = {chosen} and interleave_moe_layer_step = {step}"
    return expert_layers([layer in sparse for layer in range(count)], of)


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    kinds = [str(kind) for kind in config.kinds]
    return {
        "no_rope_layers": [int(kind != "unrotated") for kind in kinds],
        "layer_types": [_CHUNKED if kind == "local" else _FULL for kind in kinds],
        "attention_chunk_size": config.window,
        "use_qk_norm": config.qk_norm == "unit",
        "attn_temperature_tuning": config.query_growth > 0,
        "attn_scale": config.query_growth,
        "floor_scale": config.query_growth_length or 8192,
        "moe_layers": sorted({*range(config.num_layers)} - {*config.dense_layers}),
    }


_ARIA = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + shared_experts("mlp.shared_experts")
    + rows(
        [
            (L + "mlp.router.weight", "e d", M + "router"),
            (L + "mlp.experts.fc1.weight", "e d f", f"{M}gate {M}up", "f"),
            (L + "mlp.experts.fc2.weight", "e f d", M + "down"),
        ],
        EXPERTS,
    )
)

FAMILIES = (
    (
        Family(
            model_type="llama4_text",
            architectures=("Llama4ForCausalLM",),
            keys=KEYS | {"mlp_dim": "intermediate_size_mlp"},
            defaults=SILU
            | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}
            | {"intermediate_size_mlp": 16_384, "num_local_experts": 16, "num_experts_per_tok": 1}
            | {"interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192}
            | {"use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}
            | {"router_aux_loss_coef": 0.001, "output_router_logits": False},
            read_keys=_READ_KEYS,
            biases=ATTENTION_BIAS,
            pairs="adjacent",
            experts="num_local_experts",
            moe={"score": "sigmoid", "gates": "scores", "weighted": "inputs", "shared_experts": 1},
            moe_keys={"expert_dim": "intermediate_size"},
            read_moe=_read_moe,
            read=_read,
            write=_write,
        ),
        Names(_LLAMA4, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="aria_text",
            architectures=("AriaTextForCausalLM",),
            keys=KEYS,
            defaults=SILU
            | {"intermediate_size": 4096, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
            # Experts have no biases, and only shared ones another activation.
            only=ONLY_SILU | {"mlp_bias": (False, None)},
            biases=ATTENTION_BIAS,
            divides=True,
            experts="moe_num_experts",
            moe={"gates": "normalized"},
            moe_keys={"top_k": "moe_topk", "shared_experts": "moe_num_shared_experts"},
            prepare=lambda values: {**values, "num_experts_per_tok": values["moe_topk"]},
        ),
        Names(_ARIA, *LLAMA_LIKE),
    ),
)
