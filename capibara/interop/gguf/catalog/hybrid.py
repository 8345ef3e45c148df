"""Decoders with recurrent layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.interop.gguf.catalog.dense import ATTENTION, PAIRED, SCALES
from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes
from capibara.interop.gguf.layout.tensors import Change
from capibara.models.api import Mamba, Mamba2, ShortConv

_NONE: frozenset[str] = frozenset()
_SHARED_WIDTH = "expert_shared_feed_forward_length"
_LONGEST = 2**20  # of models whose state has no length
_SSM = {"taps": "ssm.conv_kernel", "state_dim": "ssm.state_size", "inner_dim": "ssm.inner_size"}
_MAMBA = _SSM | {"step_rank": "ssm.time_step_rank"}
_MAMBA2 = _SSM | {"heads": "ssm.time_step_rank", "groups": "ssm.group_count"}
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

FAMILIES = (
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
