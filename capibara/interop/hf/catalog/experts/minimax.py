"""MiniMax's mixtures: MiniMax-Text-01, most of whose layers have lightning attention, and MiniMax-M2 (both 2025)."""

from __future__ import annotations

from typing import Any

from capibara.core import projections
from capibara.interop.hf.layout.family import KEYS, ONLY_SILU, SILU, Family, Values, recurrent, write_recurrent
from capibara.interop.hf.layout.rows import (
    BARE,
    BUFFERS,
    EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    WHOLE_NORMS,
    L,
    M,
    Names,
    experts,
    rows,
    without,
)
from capibara.models.api import DecoderConfig, Lightning, Multipliers, Rope, TransformerConfig

_BLOCK = "block_sparse_moe."
_ROWS = without(LLAMA, ".mlp.") + experts(
    _BLOCK + "gate.weight", *(f"{_BLOCK}experts.{{e}}.{name}.weight" for name in ("w1", "w3", "w2"))
)
_ALIASES = {"num_experts": "num_local_experts"}
_DEFAULTS = SILU | {"num_key_value_heads": 8, "router_aux_loss_coef": 0.001, "output_router_logits": False}

# --- MiniMax-Text-01 ----------------------------------------------------------------------------------------------

_X = "layers/mixer/"
_MIXER_ROWS = rows(
    [
        (L + "self_attn.qkv_proj.weight", "nih d", " ".join(_X + by.name for by in projections.LIGHTNING), "i"),
        (L + "self_attn.output_gate.weight", "nh d", f"{_X}{projections.LIGHTNING_GATE.name}"),
        (L + "self_attn.norm.weight", "nh", _X + "out_norm/scale"),
        (L + "self_attn.out_proj.weight", "d nh", _X + "out"),
    ],
    {
        **dict.fromkeys((f"{_X}{by.name}" for by in (*projections.LIGHTNING, projections.LIGHTNING_GATE)), "ldnh"),
        _X + "out_norm/scale": "lnh",
        _X + "out": "lnhd",
    },
)
# They follow from the numbers of heads, layers and block_size, and transformers computes them where they are missing.
_DECAYS = r"\.self_attn\.(?:slope_rate|query_decay|key_decay|diagonal_decay)$"
_OF_ATTENTION = {"attention_residual": "full_attn_alpha_factor", "attention_output": "full_attn_beta_factor"}
_OF_MIXER = {"mixer_residual": "linear_attn_alpha_factor", "mixer_output": "linear_attn_beta_factor"}
_OF_MLP = {"mlp_residual": "mlp_alpha_factor", "mlp_output": "mlp_beta_factor"}
_MULTIPLIERS = _OF_ATTENTION | _OF_MIXER | _OF_MLP


def _prepare(values: Values) -> Values:
    if values.get("layer_types") is not None:
        return values
    layers = range(values.get("num_hidden_layers") or 0)
    return {**values, "layer_types": ["linear_attention" if i % 2 else "full_attention" for i in layers]}


def _read(values: Values) -> dict[str, Any]:
    pattern = recurrent(values, "linear_attention", both=False)["layer_pattern"]
    used = dict(_OF_MLP)
    fields: dict[str, Any] = {}
    if "recurrent" in pattern:
        heads = values["num_attention_heads"]
        size = values.get("head_dim") or values["hidden_size"] // heads
        used |= _OF_MIXER
        fields["mixer"] = Lightning(heads=heads, head_dim=size)
    if "global" in pattern:
        used |= _OF_ATTENTION
        fields["window"] = window = values.get("sliding_window")
        pattern = pattern if window is None else tuple("local" if kind == "global" else kind for kind in pattern)
    else:
        fields |= {"positions": "none", "rope": Rope()}
    multipliers = Multipliers(**{ours: values[theirs] for ours, theirs in used.items()})
    return fields | {"layer_pattern": pattern, "multipliers": multipliers}


def _write(config: TransformerConfig) -> dict[str, Any]:
    if not (isinstance(config, DecoderConfig) and isinstance(config.mixer, Lightning | None)):
        return {}
    written = write_recurrent(config, "linear_attention") | {"sliding_window": config.window}
    return written | {theirs: getattr(config.multipliers, ours) for ours, theirs in _MULTIPLIERS.items()}


# --- MiniMax-M2 ---------------------------------------------------------------------------------------------------

_MINIMAX_M2 = _ROWS + WHOLE_NORMS + rows([(L + _BLOCK + "e_score_correction_bias", "e", M + "correction")], EXPERTS)

FAMILIES = (
    (
        Family(
            model_type="minimax",
            architectures=("MiniMaxForCausalLM",),
            keys=KEYS,
            fixed={"activation": "swiglu", "norm_placement": "stream"},
            activation="",
            defaults=_DEFAULTS
            | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_local_experts": 8}
            | dict.fromkeys(_MULTIPLIERS.values(), 1.0),
            only=ONLY_SILU,
            aliases=_ALIASES,
            experts="num_local_experts",
            moe={"gates": "normalized"},
            mixer_keys=_MULTIPLIERS,
            read_keys=("layer_types", "sliding_window", "block_size"),
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(_ROWS + _MIXER_ROWS, (BARE,), f"{BUFFERS}|{_DECAYS}"),
    ),
    (
        Family(
            model_type="minimax_m2",
            architectures=("MiniMaxM2ForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "whole"},
            defaults=_DEFAULTS
            | {"rope_theta": 5_000_000.0, "head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 256},
            aliases=_ALIASES,
            experts="num_local_experts",
            moe={"score": "sigmoid", "gates": "normalized", "correction": "expert"},
            partial=True,
        ),
        Names(_MINIMAX_M2, *LLAMA_LIKE),
    ),
)
