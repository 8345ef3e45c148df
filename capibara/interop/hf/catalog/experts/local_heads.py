"""Mixtures whose layers with a window have other heads: MiMo-V2-Flash (Xiaomi 2026) and Laguna (Poolside 2026)."""

from __future__ import annotations

import re
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.experts.glm import (
    DEEPSEEK_KEYS,
    DEEPSEEK_MOE,
    read_mlp_types,
    with_mlp_types,
    write_mlp_types,
)
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values, rope_by_kind, typed
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    DEEPSEEK_EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    SINKS,
    A,
    L,
    Names,
    renamed,
    rows,
    with_attention_of,
    without,
)
from capibara.models.api import DecoderConfig, LocalHeads, Multipliers, TransformerConfig

_WHOLE, _WINDOW = "full_attention", "sliding_attention"
# What transformers reads of rope_parameters alone.
_BESIDE_ROPE = ("rope_scaling", "partial_rotary_factor")


def _with_kinds(values: Values, rope: Values) -> Values:
    """The values, whose layer_types are there, with a kind of MLP and rotary positions for each layer.

    Raises:
      UserError: layers with a window have no sliding_window.
    """
    if _WINDOW in values["layer_types"] and not values.get("sliding_window"):
        raise UserError(
            f"config.json of a {values['model_type']} has sliding_window = {values.get('sliding_window')} for layer_types "
            f"{_WINDOW!r}, must be at least 1: try 128"
        )
    values = {key: value for key, value in values.items() if key not in _BESIDE_ROPE}
    return with_mlp_types({**rope_by_kind(values, rope, "rope_theta"), "first_k_dense_replace": 1})


# --- MiMo-V2-Flash: twice the key/value heads in layers with a window, and sinks ------------------------------------

_SINKS = (".self_attn.sinks", ".self_attn.attention_sink_bias")  # in transformers' memory, and in files
_VALUE_SCALE = "attention_value_scale"
_MIMO_ROPE = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
    for kind, theta in ((_WHOLE, 5_000_000.0), (_WINDOW, 10_000.0))
}


def _prepare_mimo(values: Values) -> Values:
    if values.get("sliding_window_size") is not None:
        values = {**values, "sliding_window": values["sliding_window_size"] + 1}
    return _with_kinds(typed(values, lambda layer: layer == 0 or (layer + 1) % 6 == 0), _MIMO_ROPE)


def _read_mimo(values: Values) -> dict[str, Any]:
    kinds, scale = {*values["layer_types"]}, values[_VALUE_SCALE]
    fields: dict[str, Any] = {"multipliers": Multipliers(attention_output=1.0 if scale is None else scale)}
    twice = {"num_kv_heads": 2 * values["num_key_value_heads"], "attention_sinks": "head"}
    if _WINDOW not in kinds:
        return fields
    return fields | ({"local_heads": LocalHeads(**twice)} if _WHOLE in kinds else twice)


def _write_mimo(config: TransformerConfig) -> dict[str, Any]:
    heads = config.kv_heads if "global" in config.kinds else config.kv_heads // 2
    written = {"num_key_value_heads": heads, "v_head_dim": config.value_size}
    return written | {_VALUE_SCALE: config.multipliers.attention_output} | write_mlp_types(config)


_MIMO = (
    with_attention_of(
        "local",
        without(LLAMA, ".mlp.") + without(ATTENTION_BIASES, "o_proj") + renamed(SINKS, _SINKS),
    )
    + DEEPSEEK_EXPERTS
)

# --- Laguna: other query heads in layers with a window, gates of heads ----------------------------------------------

_PER_LAYER, _CAP = "num_attention_heads_per_layer", "moe_router_logit_softcapping"
_LAGUNA_ROPE = {
    _WHOLE: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    _WINDOW: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
_LAGUNA_NAMES = (
    (".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias"),
    (".mlp.shared_experts.", ".mlp.shared_expert."),
)
_GATES = rows(
    [(L + "self_attn.g_proj.weight", "n d", A + "head_gate"), (L + "self_attn.g_proj.weight", "nh d", A + "gate")],
    {A + "head_gate": "ldn", A + "gate": "ldnh"},
)


def _read_laguna(values: Values) -> dict[str, Any]:
    """The fields of ours.

    Raises:
      UserError: layers of a kind have not the same number of heads.
    """
    types, counts = values["layer_types"], values.get(_PER_LAYER)
    counts = counts or [values["num_attention_heads"]] * len(types)
    heads = dict(zip(types, counts, strict=True)) if len(types) == len(counts) else {}
    if any(heads.get(kind) != count for kind, count in zip(types, counts, strict=False)) or not heads:
        raise UserError(
            f"config.json has {_PER_LAYER} {str(counts[:8])}, must be one for each of {len(types)} layers, and the same for all of a "
            "kind (layer_types): take another model"
        )
    whole = heads.get(_WHOLE, heads.get(_WINDOW))
    fields = {"num_heads": whole, "attention_gate": "softplus"}
    if values["gating"] in (True, "per-head"):
        fields["attention_gate"] = "head_softplus"
    if heads.get(_WINDOW, whole) != whole:
        fields["local_heads"] = LocalHeads(num_heads=heads[_WINDOW])
    return fields


def _read_laguna_moe(values: Values) -> dict[str, Any]:
    cap = values[_CAP]
    return read_mlp_types(values) | {"logit_cap": cap if cap > 0 else None}


def _write_laguna(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    if config.moe is None:  # the family is only compared, as one that may be the nearest
        return {}
    return write_mlp_types(config) | {
        _PER_LAYER: [config.attention_of(kind).num_heads for kind in config.kinds],
        "gating": "per-head" if config.attention_gate.of_heads else "per-element",
        _CAP: config.moe.logit_cap or 0.0,
    }


_LAGUNA = with_attention_of("local", without(LLAMA, ".mlp.") + ATTENTION_BIASES + QK_NORM + _GATES)
_LAGUNA += renamed(DEEPSEEK_EXPERTS, *_LAGUNA_NAMES)

FAMILIES = (
    (
        Family(
            model_type="mimo_v2_flash",
            architectures=("MiMoV2FlashForCausalLM",),
            keys=KEYS | {"value_dim": "v_head_dim"},
            defaults=SILU
            | {
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 4,
                "head_dim": 192,
                "v_head_dim": 128,
                "sliding_window": 129,
            }
            | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1}
            | {"topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, _VALUE_SCALE: 0.707}
            | {"rope_local_base_freq": 10_000.0},
            biases={"attention_bias": "qkv"},
            aliases={"num_local_experts": "n_routed_experts"},
            window="types",
            rope_by_layer=True,
            old_rope=False,
            partial=True,
            fraction=0.334,
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys={ours: DEEPSEEK_KEYS[ours] for ours in ("expert_dim", "groups", "top_groups", "scale")},
            mixer_keys={"attention_output": _VALUE_SCALE},
            read_moe=read_mlp_types,
            read_keys=("mlp_layer_types", "sliding_window_size"),
            prepare=_prepare_mimo,
            read=_read_mimo,
            write=_write_mimo,
        ),
        # The layers that predict several tokens, which transformers leaves out.
        Names(_MIMO, (*LLAMA_LIKE[0], (r"\.self_attn\.sinks$", _SINKS[1])), LLAMA_LIKE[1], r"^model\.mtp\."),
    ),
    (
        Family(
            model_type="laguna",
            architectures=("LagunaForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "head"},
            defaults=SILU
            | {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 512, "moe_intermediate_size": 512}
            | {"shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "gating": True}
            | {"moe_routed_scaling_factor": 1.0, _CAP: 0.0, "rope_local_base_freq": 10_000.0}
            | {"router_aux_loss_coef": 0.001, "output_router_logits": False},
            only={"moe_apply_router_weight_on_input": (False, None)},
            biases=ATTENTION_BIAS,
            window="types",
            rope_by_layer=True,
            old_rope=False,
            partial=True,
            experts="num_experts",
            moe=DEEPSEEK_MOE | {"gates": "normalized", "shared_experts": 1},
            moe_keys={
                "expert_dim": "moe_intermediate_size",
                "shared_dim": "shared_expert_intermediate_size",
                "scale": "moe_routed_scaling_factor",
            },
            read_moe=_read_laguna_moe,
            read_keys=("mlp_layer_types", _PER_LAYER),
            prepare=lambda values: _with_kinds(typed(values, lambda _: True), _LAGUNA_ROPE),
            read=_read_laguna,
            write=_write_laguna,
        ),
        Names(_LAGUNA, (*LLAMA_LIKE[0], *((re.escape(old), new) for old, new in _LAGUNA_NAMES)), LLAMA_LIKE[1]),
    ),
)
