"""Decoders of mixers alone: Mamba and Mamba 2 (Gu and Dao 2023 and 2024), and Falcon Mamba (TII 2024)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.hf.catalog.hybrid.mamba2 import BIASES, mixer_rows, steps, write_steps
from capibara.interop.hf.layout.family import KEYS, ONLY_SILU, Family, Values
from capibara.interop.hf.layout.rows import L, Names, Rows, norm, renamed, rows
from capibara.models.api import Mamba, Mamba2, TransformerConfig

BACKBONE = ("model.layers.", "backbone.layers.")
# Of a checkpoint without its head, and of the first ones.
BACKBONE_NAMES = (
    (r"^(?=(?:layers|embeddings?|norm_f)\.)", "backbone."),
    (r"^backbone\.embedding\.", "backbone.embeddings."),
)
AROUND = rows(
    [
        ("backbone.embeddings.weight", "v d", "embedding"),
        norm("backbone.layers.{l}.norm", "layers/branch_norm")[0],
        norm("backbone.norm_f", "final_norm")[0],
        ("lm_head.weight", "v d", "output"),
    ]
)
_X = "layers/mixer/"
_LAYOUTS = {
    **dict.fromkeys((f"{_X}gate", f"{_X}value"), "ldf"),
    **dict.fromkeys((f"{_X}gate_bias", f"{_X}value_bias", f"{_X}value_conv_bias"), "lf"),
    **dict.fromkeys((f"{_X}time_bias", f"{_X}skip"), "lf"),
    **dict.fromkeys((f"{_X}step_down", f"{_X}key", f"{_X}query", f"{_X}decay_log"), "lfs"),
    **{f"{_X}value_conv": "lfk", f"{_X}step_up": "lsf", f"{_X}out": "lfd", f"{_X}out_bias": "ld"},
    **dict.fromkeys((f"{_X}{by.name}_norm/scale" for by in projections.SSM_NORMED), "ls"),
}


def selective_rows(module: str) -> Rows:
    """The rows of a Mamba, by the name of its module in a layer; Jamba has the norms."""
    X = f"{L}{module}."
    return rows(
        [
            (X + "in_proj.weight", "f d", f"{_X}value {_X}gate", "f"),
            (X + "in_proj.bias", "f", f"{_X}value_bias {_X}gate_bias", "f"),
            (X + "conv1d.weight", "f u k", _X + "value_conv"),
            (X + "conv1d.bias", "f", _X + "value_conv_bias"),
            (X + "x_proj.weight", "s f", f"{_X}step_down {_X}key {_X}query", "s"),
            (X + "dt_layernorm.weight", "s", _X + "step_down_norm/scale"),
            (X + "b_layernorm.weight", "s", _X + "key_norm/scale"),
            (X + "c_layernorm.weight", "s", _X + "query_norm/scale"),
            (X + "dt_proj.weight", "f s", _X + "step_up"),
            (X + "dt_proj.bias", "f", _X + "time_bias"),
            (X + "A_log", "f s", _X + "decay_log"),
            (X + "D", "f", _X + "skip"),
            (X + "out_proj.weight", "d f", _X + "out"),
            (X + "out_proj.bias", "d", _X + "out_bias"),
        ],
        _LAYOUTS,
    )


def step_rank(rank: object, width: int, key: str) -> int:
    """The rank of the steps' projection, for which a file may say "auto".

    Raises:
      UserError: it is no number above 0.
    """
    rank = math.ceil(width / 16) if rank == "auto" else rank
    if type(rank) is not int or rank < 1:
        raise UserError(f"config.json has {key} = {str(rank)[:60]}, must be a number above 0 or 'auto': try 'auto'")
    return rank


def expansion(inner_dim: int, width: int) -> int | float:
    """How many times the model's width the channels are."""
    return inner_dim / width if inner_dim % width else inner_dim // width


# Of a decoder in which no layer attends, and none has an MLP.
ALONE: dict[str, Any] = {
    "activation": "swiglu",
    "num_heads": 1,
    "mlp_dim": 0,
    "positions": "none",
    "layer_pattern": ("recurrent",),
}
_KEYS = {name: KEYS[name] for name in ("vocab_size", "embed_dim", "num_layers")} | {"norm_eps": "layer_norm_epsilon"}
_DEFAULTS: dict[str, Any] = {"layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4}
_DEFAULTS |= {"use_bias": False, "use_conv_bias": True}
_SIZES = {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32, "state_size": 16}
_MAMBA = {"state_dim": "state_size", "taps": "conv_kernel"}


def _read(values: Values) -> dict[str, Any]:
    fields: dict[str, Any] = {ours: values[theirs] for ours, theirs in _MAMBA.items()}
    fields |= {"inner_dim": int(values["expand"] * values["hidden_size"])}
    fields |= {"step_rank": step_rank(values["time_step_rank"], values["hidden_size"], "time_step_rank")}
    fields |= {"bias": BIASES[bool(values["use_conv_bias"]), bool(values["use_bias"])]}
    return {"mixer": Mamba(**fields), "layer_pattern": ("recurrent",)}


def _read_falcon(values: Values) -> dict[str, Any]:
    fields = _read(values)
    mixer = dataclasses.replace(fields["mixer"], norms="unscaled", norms_eps=values["mixer_rms_eps"])
    return fields | {"mixer": mixer}


def _write(config: TransformerConfig) -> dict[str, Any]:
    mixer = config.mixer
    if not isinstance(mixer, Mamba):
        return {}
    written = {theirs: getattr(mixer, ours) for ours, theirs in _MAMBA.items()}
    written |= {"expand": expansion(mixer.inner_dim, config.embed_dim), "time_step_rank": mixer.step_rank}
    return written | {"use_conv_bias": mixer.bias.of_conv, "use_bias": mixer.bias.of_projections}


def _write_falcon(config: TransformerConfig) -> dict[str, Any]:
    mixer = config.mixer
    return _write(config) | ({"mixer_rms_eps": mixer.norms_eps} if isinstance(mixer, Mamba) else {})


_MAMBA_2 = {"heads": "num_heads", "head_dim": "head_dim", "groups": "n_groups", "state_dim": "state_size"}
_MAMBA_2 |= {"taps": "conv_kernel"}


def _read_2(values: Values) -> dict[str, Any]:
    width = int(values["expand"] * values["hidden_size"])
    if values["num_heads"] * values["head_dim"] != width:
        raise UserError(
            f"config.json has num_heads = {values['num_heads']} of head_dim = {values['head_dim']}, must be expand "
            f"({values['expand']}) x hidden_size ({values['hidden_size']}) together: copy the file again"
        )
    fields: dict[str, Any] = {ours: values[theirs] for ours, theirs in _MAMBA_2.items()}
    fields |= {"bias": BIASES[bool(values["use_conv_bias"]), bool(values["use_bias"])]}
    return {"mixer": Mamba2(**fields | steps(values["time_step_limit"])), "layer_pattern": ("recurrent",)}


def _write_2(config: TransformerConfig) -> dict[str, Any]:
    mixer = config.mixer
    if not isinstance(mixer, Mamba2):
        return {}
    written = {theirs: getattr(mixer, ours) for ours, theirs in _MAMBA_2.items()}
    written |= {"expand": expansion(mixer.heads * mixer.head_dim, config.embed_dim)}
    written |= {"use_conv_bias": mixer.bias.of_conv, "use_bias": mixer.bias.of_projections}
    return written | {"time_step_limit": write_steps(mixer)}


def _family(model_type: str, architecture: str, **different: Any) -> Family:
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        keys=_KEYS,
        fixed=ALONE,
        only=ONLY_SILU,
        activation="",
        rope=False,
        **different,
    )


_SELECTIVE = AROUND + renamed(selective_rows("mixer"), BACKBONE)
FAMILIES = (
    (
        _family(
            "mamba",
            "MambaForCausalLM",
            defaults=_DEFAULTS | _SIZES | {"time_step_rank": "auto"},
            mixer_keys=_MAMBA,
            tied=True,
            read=_read,
            write=_write,
        ),
        Names(_SELECTIVE, BACKBONE_NAMES),
    ),
    (
        _family(
            "falcon_mamba",
            "FalconMambaForCausalLM",
            defaults=_DEFAULTS | _SIZES | {"time_step_rank": "auto", "mixer_rms_eps": 1e-6},
            mixer_keys=_MAMBA | {"norms_eps": "mixer_rms_eps"},
            tied=True,
            read=_read_falcon,
            write=_write_falcon,
        ),
        Names(_SELECTIVE, BACKBONE_NAMES),
    ),
    (
        _family(
            "mamba2",
            "Mamba2ForCausalLM",
            defaults=_DEFAULTS
            | {"vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "state_size": 128, "num_heads": 128}
            | {"head_dim": 64, "n_groups": 8, "time_step_limit": [0.0, {"__float__": "Infinity"}]},
            mixer_keys=_MAMBA_2,
            read=_read_2,
            write=_write_2,
        ),
        Names(AROUND + renamed(mixer_rows("mixer"), BACKBONE), BACKBONE_NAMES),
    ),
)
