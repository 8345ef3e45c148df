"""Lara mini (Translated 2026): Gated DeltaNet, windows with rotary positions and whole rows without, experts in all layers."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.hybrid.qwen import LAYOUTS, SIZES
from capibara.interop.hf.layout.family import KEYS, NO_BIAS, ONLY_SILU, SILU, Family, Values, shortest
from capibara.interop.hf.layout.rows import LLAMA, LLAMA_LIKE, QK_NORM, L, Names, rows, shared_experts, without
from capibara.interop.hf.tables import FUSED_EXPERTS
from capibara.models.api import DecoderConfig, GatedDelta, TransformerConfig

_X, _D = "layers/mixer/", f"{L}linear_attn."
_ALL = f"{_X}query {_X}key {_X}value {_X}gate {_X}strength {_X}decay"
_CONVS = f"{_X}query_conv {_X}key_conv {_X}value_conv"
_ROWS = (
    without(LLAMA, ".mlp.")
    + QK_NORM
    + rows(
        [
            (f"{_D}in_proj.weight", "nh d", _ALL, "nh"),
            (f"{_D}conv1d.weight", "nh u k", _CONVS, "nh"),
            (f"{_D}A_log", "n", f"{_X}decay_log"),
            (f"{_D}dt_bias", "n", f"{_X}decay_bias"),
            (f"{_D}out_norm.weight", "h", f"{_X}norm/scale"),
            (f"{_D}out_proj.weight", "d nh", f"{_X}out"),
        ],
        LAYOUTS,
    )
    + FUSED_EXPERTS
    + shared_experts("mlp.shared_expert")
)
_KINDS = {"linear_attention": "recurrent", "sliding_attention": "local", "full_attention": "unrotated"}
_USUAL = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def _read(values: Values) -> dict[str, Any]:
    count = values["num_hidden_layers"]
    types = values.get("layer_types") or [_USUAL[layer % len(_USUAL)] for layer in range(count)]
    if unknown := [kind for kind in types if kind not in _KINDS]:
        raise UserError(f"config.json has layer_types {unknown[0]!r}, must be one of {', '.join(_KINDS)}")
    if len(types) != count or "linear_attention" not in types:
        raise UserError(
            f"config.json has layer_types {str(types)[:60]}, must be one for each of {count} layers, and have linear_attention"
        )
    pattern = shortest([_KINDS[kind] for kind in types])
    mixer = GatedDelta(**{ours: values[theirs] for ours, theirs in SIZES.items()})
    return {
        "layer_pattern": pattern,
        "mixer": mixer,
        "window": values["sliding_window"] if "local" in pattern else None,
    }


def _write(config: TransformerConfig) -> dict[str, Any]:
    if not isinstance(config, DecoderConfig) or not isinstance(config.mixer, GatedDelta):
        return {}
    names = {ours: theirs for theirs, ours in _KINDS.items()}
    written: dict[str, Any] = {"layer_types": [names.get(str(kind)) for kind in config.kinds]}
    written |= {} if config.window is None else {"sliding_window": config.window}
    return written | {theirs: getattr(config.mixer, ours) for ours, theirs in SIZES.items()}


FAMILIES = (
    (
        Family(
            model_type="lara_mini",
            architectures=("LaraMiniForCausalLM",),
            keys=KEYS | {"mlp_dim": "moe_intermediate_size"},
            fixed={"qk_norm": "head"},
            defaults=SILU
            | {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 512, "moe_intermediate_size": 512}
            | {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128}
            | {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 128, "num_experts_per_tok": 4}
            | {"norm_topk_prob": True, "shared_expert_intermediate_size": 512},
            only=ONLY_SILU | NO_BIAS,
            tied=True,
            experts="num_experts",
            moe={"shared_experts": 1},
            moe_keys={"shared_dim": "shared_expert_intermediate_size"},
            mixer_keys=SIZES,
            read_keys=("layer_types",),
            read=_read,
            write=_write,
        ),
        Names(_ROWS, *LLAMA_LIKE),
    ),
)
