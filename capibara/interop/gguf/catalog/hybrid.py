"""Decoders with recurrent layers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np

from capibara.interop.gguf.catalog.dense import ATTENTION, PAIRED, SCALES, SWIGLU
from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes
from capibara.interop.gguf.layout.tensors import Change, Factor, Take
from capibara.interop.hf import config as hf_config
from capibara.interop.hf.layout.family import expert_layers
from capibara.models.api import DecoderConfig, GatedDelta, Mamba, Mamba2, Multipliers, ShortConv

_NONE: frozenset[str] = frozenset()
_SHARED_WIDTH = "expert_shared_feed_forward_length"
_LONGEST = 2**20  # of models whose state has no length
_SSM = {"taps": "ssm.conv_kernel", "state_dim": "ssm.state_size", "inner_dim": "ssm.inner_size"}
_MAMBA = _SSM | {"step_rank": "ssm.time_step_rank"}
_MAMBA2 = _SSM | {"heads": "ssm.time_step_rank", "groups": "ssm.group_count"}
_DELTA = {
    "taps": "ssm.conv_kernel",
    "key_dim": "ssm.state_size",
    "key_heads": "ssm.group_count",
    "value_heads": "ssm.time_step_rank",
    "inner_dim": "ssm.inner_size",
}
_WIDTH = {"expert_dim": "expert_feed_forward_length"}
_ALONE = {"feed_forward_length": 0, "attention.head_count": 0}
_MAMBA_CHANGES = {"conv1d.weight": Change.CHANNELS, "A_log": Change.DECAY}
_MAMBA2_CHANGES = {
    "conv1d.weight": Change.CHANNELS,
    "A_log": Change.DECAY_COLUMN,
    "mixer.D": Change.COLUMN,
    "mamba.D": Change.COLUMN,
    "mixer.norm": Change.GROUPS,
    "mamba.norm": Change.GROUPS,
}
_TIME_BIAS = {".dt_bias": ".dt_proj.bias"}


def _twice_as_wide(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {"mixer": dataclasses.replace(fields["mixer"], inner_dim=2 * fields["embed_dim"])}


def _falcon_norms(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    """One epsilon is that of all norms."""
    mixer = _twice_as_wide(fields, values, shapes)["mixer"]
    return {"mixer": dataclasses.replace(mixer, norms="unscaled", norms_eps=fields["norm_eps"])}


def _mixer_heads(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {"head_dim": fields["mixer"].head_dim}  # the key has one name


_MAMBA_1 = Family(
    model_type="mamba",
    arch="mamba",
    mixer=Mamba,
    mixer_keys=_MAMBA,
    longest=_LONGEST,
    changes=_MAMBA_CHANGES,
    constants=_ALONE,
    read=_twice_as_wide,
)
_LFM2 = Family(
    model_type="lfm2",
    arch="lfm2",
    mixer=ShortConv,
    mixer_keys={"taps": "shortconv.l_cache"},
    biases=_NONE,
    square=True,
    changes={"conv.conv": Change.CHANNELS},
)


def _joined_heads(config: DecoderConfig) -> dict[str, tuple[Take, ...]]:
    """A head's queries, keys, values and gates are beside each other; in a file those of all heads, the gates apart."""
    mixer = config.mixer
    assert isinstance(mixer, GatedDelta), "the family's mixer"
    values = mixer.value_heads // mixer.key_heads * mixer.value_dim
    rows = np.arange(mixer.key_heads * 2 * (mixer.key_dim + values)).reshape(mixer.key_heads, -1)
    ends = np.cumsum([mixer.key_dim, mixer.key_dim, values])
    *joined, gates = (part.ravel() for part in np.split(rows, ends, axis=1))
    return {"in_proj_qkvz": (Take("attn_qkv.weight", np.concatenate(joined)), Take("attn_gate.weight", gates))}


def _tiled_values(config: DecoderConfig) -> dict[str, tuple[Take, ...]]:
    """The values of a head of keys are beside each other; in a file the first ones of all heads, then the second ones."""
    mixer = config.mixer
    assert isinstance(mixer, GatedDelta), "the family's mixer"
    heads = np.arange(mixer.value_heads).reshape(mixer.key_heads, -1).T.ravel()
    values = np.arange(mixer.value_heads * mixer.value_dim).reshape(mixer.value_heads, -1)[heads].ravel()
    before = 2 * mixer.key_heads * mixer.key_dim
    joined = Take("", np.concatenate([np.arange(before), before + values]))
    by_head: dict[str, tuple[Take, ...]] = dict.fromkeys(
        ("in_proj_b.", "in_proj_a.", "A_log", "dt_bias"), (Take("", heads),)
    )
    by_value: dict[str, tuple[Take, ...]] = {
        "in_proj_z.": (Take("", values),),
        "linear_attn.out_proj": (Take("", values, 1),),
    }
    return by_head | by_value | dict.fromkeys(("in_proj_qkv.", "linear_attn.conv1d"), (joined,))


def _one_size(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    mixer = fields["mixer"]
    return {"mixer": dataclasses.replace(mixer, value_dim=mixer.key_dim)}


def _sections(config: DecoderConfig) -> dict[str, Any]:
    """How many pairs are turned by time, height and width, which take turns; of text all have the same position.

    A pair beyond its kind's count would be turned by a fourth position, which is 0 for text.
    """
    pairs = config.rope.rotated_dims(config.head_size) // 2
    return {"rope.dimension_sections": [*((pairs + rest) // 3 for rest in (2, 1, 0)), 0]}


_QWEN_NEXT = Family(
    model_type="qwen3_next",
    arch="qwen3next",
    moe_keys=_WIDTH | {"shared_dim": _SHARED_WIDTH},
    mixer=GatedDelta,
    mixer_keys=_DELTA,
    recurrent_key="attention.recurrent_layers",
    fixed=SWIGLU,
    moe={"gates": "normalized"},
    biases=_NONE,
    nextn=True,
    changes={
        "linear_attn.norm": Change.NONE,
        "norm.weight": Change.PLUS_ONE,
        "conv1d.weight": Change.CHANNELS,
        "A_log": Change.DECAY,
        "shared_expert_gate": Change.ROW,
    },
    renamed=_TIME_BIAS,
    takes=_joined_heads,
    read=_one_size,
)
_QWEN_35 = dataclasses.replace(
    _QWEN_NEXT,
    model_type="qwen3_5_moe_text",
    arch="qwen35moe",
    takes=_tiled_values,
    ignored=("rope.dimension_sections",),
    write=_sections,
)


def _jamba_layers(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    """Layers have experts if they have a router."""
    mixer = dataclasses.replace(_twice_as_wide(fields, values, shapes)["mixer"], norms="scaled")
    layers = {"mixer": dataclasses.replace(mixer, norms_eps=fields["norm_eps"])}
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in shapes for layer in range(fields["num_layers"])]
    if fields.get("moe") is None or not any(sparse):
        return layers | {"moe": None}
    return layers | {"moe": dataclasses.replace(fields["moe"], **expert_layers(sparse, "ffn_gate_inp.weight"))}


def _side_by_side(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    norm = "after" if "blk.0.ssm_norm.weight" in shapes else "none"
    return {"layer_pattern": ("hybrid",), "mixer": dataclasses.replace(fields["mixer"], norm=norm)}


def _without_factors(config: DecoderConfig) -> tuple[DecoderConfig, dict[str, Factor]]:
    """Falcon-H1's factors are in the weights of a file, whose model has none."""
    mixer, of = config.mixer, config.multipliers
    assert isinstance(mixer, Mamba2), "the family's mixer"
    keys = 1.0 if config.attention_scale is None else config.attention_scale * config.head_size**0.5
    inner, grouped = mixer.heads * mixer.head_dim, mixer.groups * mixer.state_dim
    into = np.repeat(mixer.projection_multipliers, [inner, inner, grouped, grouped, mixer.heads])
    factors: dict[str, Factor] = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.logit_scale,
        "q_proj.weight": of.attention_input,
        "k_proj.weight": of.attention_input * keys,
        "k_proj.bias": keys,
        "v_proj.weight": of.attention_input,
        "o_proj.weight": of.attention_output,
        "mamba.in_proj": of.mixer_input * into,
        "mamba.out_proj": of.mixer_output,
        "gate_proj": of.mlp_gate,
        "down_proj": of.mlp_output,
    }
    mixer = dataclasses.replace(mixer, projection_multipliers=(1.0,) * len(mixer.projection_multipliers))
    config = dataclasses.replace(config, mixer=mixer, multipliers=Multipliers(), attention_scale=None)
    return dataclasses.replace(config, embedding_multiplier=1.0, logit_scale=1.0), factors


def _without_least_step(config: DecoderConfig) -> tuple[DecoderConfig, dict[str, Factor]]:
    mixer = config.mixer
    if not isinstance(mixer, Mamba2) or not mixer.least_step:
        return config, {}
    warnings.warn(
        f"llama.cpp has no least step (time_step_min): steps below {mixer.least_step} get other values there",
        stacklevel=2,
    )
    return dataclasses.replace(config, mixer=dataclasses.replace(mixer, least_step=0.0)), {}


def _both_epsilons(config: DecoderConfig) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": config.norm_eps}


_NEMOTRON = Family(
    model_type="nemotron_h",
    arch="nemotron_h",
    mixer=Mamba2,
    mixer_keys=_MAMBA2,
    fixed={"activation": "relu2"},
    biases=frozenset({"qkv", "out", "mlp"}),
    longest=_LONGEST,
    changes=PAIRED | _MAMBA2_CHANGES,
    renamed=_TIME_BIAS,
    fold=_without_least_step,
    write=_both_epsilons,
)

FAMILIES = (
    Family(
        model_type="jamba",
        arch="jamba",
        mixer=Mamba,
        mixer_keys=_MAMBA,
        moe={"gates": "scores"},
        biases=_NONE,
        square=True,
        longest=_LONGEST,
        changes=_MAMBA_CHANGES,
        places={
            "feed_forward.experts.{e}.gate_proj": ("ffn_gate_exps.weight",),
            "feed_forward.experts.{e}.up_proj": ("ffn_up_exps.weight",),
            "feed_forward.experts.{e}.down_proj": ("ffn_down_exps.weight",),
        },
        read=_jamba_layers,
    ),
    Family(
        model_type="falcon_h1",
        arch="falcon-h1",
        mixer=Mamba2,
        mixer_keys=_MAMBA2,
        fixed={"head": "separate"},
        biases=frozenset({"qkv", "mlp"}),
        changes=_MAMBA2_CHANGES,
        renamed=_TIME_BIAS,
        fold=_without_factors,
        read=_side_by_side,
    ),
    dataclasses.replace(
        _NEMOTRON,
        arch="nemotron_h_moe",
        applies=lambda config: hf_config.from_hf(config).moe is not None,
        moe_keys=_WIDTH
        | {"shared_width": _SHARED_WIDTH, "scale": "expert_weights_scale", "gates": "expert_weights_norm"}
        | {"groups": "expert_group_count", "top_groups": "expert_group_used_count"},
        moe={"score": "sigmoid", "correction": "expert"},
        biases=frozenset({"qkv", "out"}),
        places={
            "mixer.experts.{e}.up_proj": ("ffn_up_exps.weight",),
            "mixer.experts.{e}.down_proj": ("ffn_down_exps.weight",),
        },
        ignored=("expert_shared_count",),
        nextn=True,
    ),
    _NEMOTRON,
    _QWEN_NEXT,
    _QWEN_35,
    dataclasses.replace(_QWEN_35, model_type="qwen3_5_text", arch="qwen35", moe_keys={}, moe={}),
    _MAMBA_1,
    dataclasses.replace(
        _MAMBA_1,
        model_type="falcon_mamba",
        when="ssm.dt_b_c_rms",
        constants=_ALONE | {"ssm.dt_b_c_rms": True},
        read=_falcon_norms,
    ),
    Family(
        model_type="mamba2",
        arch="mamba2",
        mixer=Mamba2,
        mixer_keys=_MAMBA2,
        longest=_LONGEST,
        changes=_MAMBA2_CHANGES,
        renamed=_TIME_BIAS,
        constants=_ALONE,
        read=_mixer_heads,
    ),
    _LFM2,
    dataclasses.replace(
        _LFM2,
        model_type="lfm2_moe",
        arch="lfm2moe",
        moe_keys={"expert_dim": "expert_feed_forward_length", "first_dense": "leading_dense_block_count"},
        moe={"score": "sigmoid", "correction": "expert", "gates": "normalized", "gate_offset": 1e-6},
        constants={"expert_gating_func": 2},
        renamed={"expert_bias": "expert_bias.bias"},
        places={
            "feed_forward.experts.{e}.w1": ("ffn_gate_exps.weight",),
            "feed_forward.experts.{e}.w2": ("ffn_down_exps.weight",),
            "feed_forward.experts.{e}.w3": ("ffn_up_exps.weight",),
        },
    ),
    Family(
        model_type="granitemoehybrid",
        arch="granitehybrid",
        keys=SCALES,
        moe_keys={"shared_width": _SHARED_WIDTH},
        mixer=Mamba2,
        mixer_keys=_MAMBA2,
        inverse=("logit_scale",),
        moe={"gates": "normalized"},
        biases=ATTENTION,
        rope_switch="rope.scaling.finetuned",
        changes=PAIRED | _MAMBA2_CHANGES,
        renamed=_TIME_BIAS,
        places={
            "block_sparse_moe.input_linear": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            "shared_mlp.input_linear.weight layers/mlp/shared_gate": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
            "shared_mlp.input_linear.weight layers/mlp/gate": ("ffn_gate.weight", "ffn_up.weight"),
            "shared_mlp.output_linear.weight layers/mlp/down": ("ffn_down.weight",),
        },
    ),
)
