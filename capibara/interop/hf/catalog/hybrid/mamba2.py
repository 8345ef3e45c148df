"""Decoders whose recurrent layers are Mamba 2: Granite 4 (IBM 2025) and Bamba (IBM, Princeton, CMU and UIUC 2024)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.hf.catalog.dense.granite import FACTORS, FACTORS_READ, read_factors, write_factors
from capibara.interop.hf.layout import rope as hf_rope
from capibara.interop.hf.layout.family import (
    ATTENTION_BIAS,
    KEYS,
    ONLY_SILU,
    SILU,
    Family,
    Values,
    recurrent,
    write_recurrent,
)
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    EXPERTS,
    LLAMA,
    LLAMA_BIASED,
    LLAMA_LIKE,
    L,
    M,
    Names,
    Rows,
    renamed,
    rows,
    without,
)
from capibara.models.api import DecoderConfig, Mamba2, Moe, Rope, TransformerConfig

_X = "layers/mixer/"
_INTO = " ".join(f"{_X}{projection.name}" for projection in projections.MAMBA)
_CONVS = " ".join(f"{_X}{projection.name}_conv" for projection in projections.MAMBA_CONVOLVED)
_LAYOUTS = {
    **{f"{_X}{projections.MAMBA_GATE.name}{part}": layout for part, layout in (("", "ldnh"), ("_bias", "lnh"))},
    _X + "value_conv": "lnhk",
    _X + "value_conv_bias": "lnh",
    **dict.fromkeys((_X + "decay_log", _X + "time_bias", _X + "skip"), "ln"),
    _X + "out_norm/scale": "lnh",
    _X + "out": "lnhd",
    _X + "out_bias": "ld",
}


def _biased(paths: str) -> str:
    return " ".join(f"{path}_bias" for path in paths.split())


def mixer_rows(module: str) -> Rows:
    """The rows of a Mamba 2, by the name of its module in a layer."""
    X = f"{L}{module}."
    return rows(
        [
            (X + "in_proj.weight", "nh d", _INTO, "nh"),
            (X + "in_proj.bias", "nh", _biased(_INTO), "nh"),
            (X + "conv1d.weight", "nh u k", _CONVS, "nh"),
            (X + "conv1d.bias", "nh", _biased(_CONVS), "nh"),
            (X + "dt_bias", "n", _X + "time_bias"),
            (X + "A_log", "n", _X + "decay_log"),
            (X + "D", "n", _X + "skip"),
            (X + "norm.weight", "nh", _X + "out_norm/scale"),
            (X + "out_proj.weight", "d nh", _X + "out"),
            (X + "out_proj.bias", "d", _X + "out_bias"),
        ],
        _LAYOUTS,
    )


# Whether the convolution and the projections have biases.
BIASES = {(False, False): "none", (True, False): "conv", (False, True): "projections", (True, True): "all"}


def steps(limit: object) -> dict[str, float]:
    """Our limits of a step for time_step_limit, in whose files infinity is an object or a name.

    Raises:
      UserError: it is no pair of numbers.
    """
    pair = limit if isinstance(limit, list | tuple) else ()
    ends = [math.inf if isinstance(item, dict) and item.get("__float__") == "Infinity" else item for item in pair]
    if len(ends) != 2 or not all(type(item) in (int, float) for item in ends):
        raise UserError(
            f"config.json has time_step_limit = {str(limit)[:60]}, must be a pair of numbers: try [0.0, 1e30]"
        )
    return {"least_step": float(ends[0]), "most_step": float(ends[1])}


def write_steps(mixer: Mamba2) -> list[Any]:
    """The way back."""
    ends = (mixer.least_step, mixer.most_step)
    return [{"__float__": "Infinity"} if math.isinf(item) else item for item in ends]


MIXER = {"heads": "mamba_n_heads", "groups": "mamba_n_groups", "state_dim": "mamba_d_state", "taps": "mamba_d_conv"}
MIXER_DEFAULTS: dict[str, Any] = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
MIXER_DEFAULTS |= {"mamba_expand": 2, "mamba_d_head": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False}
MIXER_DEFAULTS |= {"time_step_limit": [0.0, {"__float__": "Infinity"}]}


def read_mixer(values: Values, **further: object) -> Mamba2:
    """The mixer, whose heads have mamba_d_ssm channels together, or else mamba_expand times the model's width.

    Args:
      values: of config.json.
      further: fields of the mixer that only some families have.

    Raises:
      UserError: mamba_d_head says otherwise.
    """
    width, heads, size = values.get("mamba_d_ssm"), values["mamba_n_heads"], values["mamba_d_head"]
    of = f"mamba_d_ssm ({width})"
    if width is None:
        width = values["mamba_expand"] * values["hidden_size"]
        of = f"mamba_expand ({values['mamba_expand']}) x hidden_size ({values['hidden_size']})"
    size = width // heads if size == "auto" else size
    if size * heads != width:
        raise UserError(
            f"config.json has mamba_n_heads = {heads} of mamba_d_head = {size}, must be {of} together: copy the file again"
        )
    fields: dict[str, Any] = {ours: values[theirs] for ours, theirs in MIXER.items()}
    fields |= {"bias": BIASES[bool(values["mamba_conv_bias"]), bool(values["mamba_proj_bias"])], "head_dim": size}
    return Mamba2(**fields | steps(values["time_step_limit"]) | further)


def write_mixer(config: DecoderConfig, mixer: Mamba2) -> dict[str, Any]:
    """The way back."""
    written = {theirs: getattr(mixer, ours) for ours, theirs in MIXER.items()}
    written |= {"mamba_expand": mixer.heads * mixer.head_dim // config.embed_dim, "mamba_d_head": mixer.head_dim}
    written |= {"mamba_conv_bias": mixer.bias.of_conv, "mamba_proj_bias": mixer.bias.of_projections}
    return written | {"time_step_limit": write_steps(mixer)}


# --- Granite 4 ----------------------------------------------------------------------------------------------------


def _prepare_granite(values: Values) -> Values:
    result = {**values}
    if not result["num_local_experts"]:
        result["intermediate_size"] = result["shared_intermediate_size"]
    if result.get("layer_types") is None:
        result["layer_types"] = ["linear_attention"] * result["num_hidden_layers"]
    return result


def _read_granite(values: Values) -> dict[str, Any]:
    fields = read_factors(values) | recurrent(values, "linear_attention", both=False)
    if "recurrent" in fields["layer_pattern"]:
        fields["mixer"] = read_mixer(values)
    if values.get("position_embedding_type") == "rope" and "global" in fields["layer_pattern"]:
        fields["rope"] = Rope(**hf_rope.read(values, _GRANITE))
    else:
        fields["positions"] = "none"
    if count := values["num_local_experts"]:
        experts: dict[str, Any] = {"num_experts": count, "top_k": values["num_experts_per_tok"], "gates": "normalized"}
        experts |= {"shared_experts": 1, "shared_dim": values["shared_intermediate_size"]}
        fields["moe"] = Moe(**experts, balance_loss=values["router_aux_loss_coef"])
    return fields


def _write_granite(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    mixer = config.mixer
    if not isinstance(mixer, Mamba2 | None):
        return {}
    written = write_factors(config) | write_recurrent(config, "linear_attention")
    # transformers checks these sizes even if no layer has them.
    written |= {"mamba_n_heads": 1, "mamba_d_head": "auto"} if mixer is None else write_mixer(config, mixer)
    if config.positions == "rope":
        written |= {"position_embedding_type": "rope"} | hf_rope.write(config, dataclasses.replace(_GRANITE, rope=True))
    moe = config.moe
    if moe is None:
        return written | {"num_local_experts": 0, "shared_intermediate_size": config.mlp_dim}
    width = moe.expert_dim or config.mlp_dim
    written |= {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}
    written |= {"shared_intermediate_size": moe.shared_dim or width, "intermediate_size": width}
    return written | {"router_aux_loss_coef": moe.balance_loss}


ENDS = (r"^(?=(?:layers|embed_tokens|norm|final_layernorm)\.)", "model.")  # of a checkpoint without its head
# What differs from Llama's names in Bamba and Jamba.
FEED_FORWARD = (
    (".mlp.", ".feed_forward."),
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("model.norm.", "model.final_layernorm."),
)
_GRANITE_MLP = rows(
    [
        (L + "shared_mlp.input_linear.weight", "f d", f"{M}gate {M}up", "f"),
        (L + "shared_mlp.output_linear.weight", "d f", M + "down"),
    ]
)
_GRANITE_EXPERTS = rows(
    [
        (L + "block_sparse_moe.router.layer.weight", "e d", M + "router"),
        (L + "block_sparse_moe.input_linear.weight", "e f d", f"{M}gate {M}up", "f"),
        (L + "block_sparse_moe.output_linear.weight", "e d f", M + "down"),
        (L + "shared_mlp.input_linear.weight", "f d", f"{M}shared_gate {M}shared_up", "f"),
        (L + "shared_mlp.output_linear.weight", "d f", M + "shared_down"),
    ],
    EXPERTS,
)
_GRANITE_BASE = without(LLAMA, ".mlp.") + ATTENTION_BIASES + mixer_rows("mamba")
_GRANITE = Family(
    model_type="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    keys={ours: theirs for ours, theirs in (KEYS | FACTORS).items() if ours != "head_dim"},
    fixed={"activation": "swiglu"},
    activation="",
    rope=False,
    defaults=SILU
    | FACTORS_READ
    | MIXER_DEFAULTS
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
    | {"shared_intermediate_size": 1024, "intermediate_size": 11008},
    only=ONLY_SILU,
    mixer_keys=MIXER,
    read_keys=("layer_types", "position_embedding_type", "head_dim", "rope_parameters", "rope_scaling")
    + ("max_position_embeddings", "partial_rotary_factor", "output_router_logits"),
    aliases={"num_experts": "num_local_experts", "layers_block_type": "layer_types"},
    biases=ATTENTION_BIAS,
    prepare=_prepare_granite,
    read=_read_granite,
    write=_write_granite,
)


# --- Bamba --------------------------------------------------------------------------------------------------------


def _prepare_bamba(values: Values) -> Values:
    indices, layers = values.get("attn_layer_indices"), range(values["num_hidden_layers"])
    attending = {*layers} & {*(indices or ())}
    if not attending or len(attending) == len(layers):
        raise UserError(
            f"config.json has attn_layer_indices = {str(indices)[:60]}, must name some of the "
            f"num_hidden_layers ({len(layers)}): take another model"
        )
    types = ["full_attention" if i in attending else "linear_attention" for i in layers]
    # transformers has this share of a head rotated whatever partial_rotary_factor is outside of rope_parameters.
    return {**values, "layer_types": types, "partial_rotary_factor": 0.5}


def _read_bamba(values: Values) -> dict[str, Any]:
    return recurrent(values, "linear_attention") | {"mixer": read_mixer(values)}


def _write_bamba(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    if not isinstance(config.mixer, Mamba2):
        return {}
    attending = [i for i, kind in enumerate(config.kinds) if kind != "recurrent"]
    return write_mixer(config, config.mixer) | {"attn_layer_indices": attending}


_BAMBA = Family(
    model_type="bamba",
    architectures=("BambaForCausalLM",),
    keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
    fixed={"activation": "swiglu"},
    activation="",
    defaults=SILU | MIXER_DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "vocab_size": 128_000},
    only=ONLY_SILU,
    mixer_keys=MIXER,
    read_keys=("attn_layer_indices", "head_dim"),
    biases=ATTENTION_BIAS | {"mlp_bias": "mlp"},
    fraction=0.5,
    partial=True,
    prepare=_prepare_bamba,
    read=_read_bamba,
    write=_write_bamba,
)

FAMILIES = (
    (
        _GRANITE,
        Names(
            _GRANITE_BASE,
            *LLAMA_LIKE,
            chosen=lambda shapes: _GRANITE_BASE + (_GRANITE_EXPERTS if M + "router" in shapes else _GRANITE_MLP),
        ),
    ),
    (_BAMBA, Names(renamed(LLAMA_BIASED, *FEED_FORWARD) + mixer_rows("mamba"), (ENDS,), LLAMA_LIKE[1])),
)
