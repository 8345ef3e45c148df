"""Qwen3-Next and Qwen 3.5 (Alibaba 2025, 2026): Gated DeltaNet, and attention with a gate in every fourth layer."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout import mtp
from capibara.interop.hf.layout.family import KEYS, MTP_KEY, SILU, Family, Values, recurrent, write_recurrent
from capibara.interop.hf.layout.rows import (
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    QWEN_SHARED_EXPERTS,
    A,
    L,
    Names,
    rows,
    without,
)
from capibara.models.api import DecoderConfig, GatedDelta, TransformerConfig

_X = "layers/mixer/"
_QKV, _CONVS = f"{_X}query {_X}key {_X}value", f"{_X}query_conv {_X}key_conv {_X}value_conv"
LAYOUTS = {
    **dict.fromkeys((_X + "query", _X + "gate", _X + "strength", _X + "decay"), "ldnh"),
    _X + "query_conv": "lnhk",
    **dict.fromkeys((_X + "decay_log", _X + "decay_bias"), "ln"),
    _X + "norm/scale": "lh",
    _X + "out": "lnhd",
    A + "gate": "ldnh",
}
_SHARED = rows(
    [
        (L + "self_attn.q_proj.weight", "nh d", f"{A}query {A}gate", "h"),
        (L + "linear_attn.conv1d.weight", "nh u k", _CONVS, "nh"),
        (L + "linear_attn.A_log", "n", _X + "decay_log"),
        (L + "linear_attn.dt_bias", "n", _X + "decay_bias"),
        (L + "linear_attn.norm.weight", "h", _X + "norm/scale"),
        (L + "linear_attn.out_proj.weight", "d nh", _X + "out"),
    ],
    LAYOUTS,
)
_NEXT = rows(
    [
        (L + "linear_attn.in_proj_qkvz.weight", "nh d", f"{_QKV} {_X}gate", "h"),
        (L + "linear_attn.in_proj_ba.weight", "nh d", f"{_X}strength {_X}decay", "h"),
    ],
    LAYOUTS,
)
_OF_35 = rows(
    [
        (L + "linear_attn.in_proj_qkv.weight", "nh d", _QKV, "nh"),
        (L + "linear_attn.in_proj_z.weight", "nh d", _X + "gate"),
        (L + "linear_attn.in_proj_b.weight", "nh d", _X + "strength"),
        (L + "linear_attn.in_proj_a.weight", "nh d", _X + "decay"),
    ],
    LAYOUTS,
)
_BASE = without(LLAMA, "q_proj", ".mlp.") + QK_NORM + _SHARED
_MLP = tuple(row for row in LLAMA if ".mlp." in row.name)
SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


def _prepare(values: Values) -> Values:
    if values.get("layer_types") is not None:
        return values
    every, layers = values.get("full_attention_interval", 4), range(values["num_hidden_layers"])
    if not isinstance(every, int) or every < 1:
        raise UserError(f"config.json has full_attention_interval = {every!r}, must be at least 1: try 4")
    return {**values, "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]}


def _read(values: Values) -> dict[str, Any]:
    mixer = GatedDelta(**{ours: values[theirs] for ours, theirs in SIZES.items()})
    return recurrent(values, "linear_attention") | {"mixer": mixer}


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    if not isinstance(config.mixer, GatedDelta):
        return {}
    sizes = {theirs: getattr(config.mixer, ours) for ours, theirs in SIZES.items()}
    return write_recurrent(config, "linear_attention") | sizes


_COMMON: dict[str, Any] = dict(
    fixed={"norm_scale": "offset", "qk_norm": "head", "attention_gate": "sigmoid"},
    only={"attention_bias": (False, None), "hidden_act": ("silu", "swish")},  # of the mixers, too
    fraction=0.25,
    partial=True,
    mixer_keys=SIZES,
    prepare=_prepare,
    read=_read,
    write=_write,
)
_DEFAULTS = SILU | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
_DEFAULTS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
_MTP_KEY = "mtp_num_hidden_layers"
_READ_KEYS = ("layer_types", "full_attention_interval")

FAMILIES = (
    (
        Family(
            model_type="qwen3_next",
            architectures=("Qwen3NextForCausalLM",),
            keys=KEYS | {"mlp_dim": "moe_intermediate_size"},
            defaults=_DEFAULTS
            | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}
            | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}
            | {"output_router_logits": False},
            read_keys=_READ_KEYS,
            mtp_key=MTP_KEY,
            experts="num_experts",
            moe={"shared_experts": 1, "shared_gate": "sigmoid"},
            moe_keys={"shared_dim": "shared_expert_intermediate_size"},
            **_COMMON | {"only": _COMMON["only"] | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}},
        ),
        Names(_BASE + _NEXT + QWEN_SHARED_EXPERTS, *LLAMA_LIKE, mtp=mtp.QWEN),
    ),
    (
        Family(
            model_type="qwen3_5_text",
            architectures=("Qwen3_5ForCausalLM",),
            keys=KEYS,
            defaults=_DEFAULTS | {"num_key_value_heads": 4},
            read_keys=_READ_KEYS,
            mtp_key=_MTP_KEY,
            **_COMMON,
        ),
        Names(_BASE + _OF_35 + _MLP, *LLAMA_LIKE, mtp=mtp.QWEN),
    ),
    (
        Family(
            model_type="qwen3_5_moe_text",
            architectures=("Qwen3_5MoeForCausalLM",),
            keys=KEYS | {"mlp_dim": "moe_intermediate_size"},
            defaults=_DEFAULTS
            | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001}
            | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "output_router_logits": False},
            read_keys=_READ_KEYS,
            mtp_key=_MTP_KEY,
            experts="num_experts",
            moe={"gates": "normalized", "shared_experts": 1, "shared_gate": "sigmoid"},
            moe_keys={"shared_dim": "shared_expert_intermediate_size"},
            **_COMMON,
        ),
        Names(_BASE + _OF_35 + QWEN_SHARED_EXPERTS, *LLAMA_LIKE, mtp=mtp.QWEN),
    ),
)
