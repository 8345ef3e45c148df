"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and a Mamba 2 side by side in each layer, with constant factors."""

from __future__ import annotations

from typing import Any

from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.hf.catalog.hybrid.mamba2 import (
    ENDS,
    FEED_FORWARD,
    MIXER,
    MIXER_DEFAULTS,
    mixer_rows,
    read_mixer,
    write_mixer,
)
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, ONLY_SILU, SILU, Family, Values
from capibara.interop.hf.layout.rows import BUFFERS, LLAMA_BIASED, Names, renamed
from capibara.models.api import DecoderConfig, Mamba2, Multipliers, TransformerConfig

_MULTIPLIERS = {"attention_input": "attention_in_multiplier", "attention_output": "attention_out_multiplier"}
_MULTIPLIERS |= {"mixer_input": "ssm_in_multiplier", "mixer_output": "ssm_out_multiplier"}
_NAMED = {"mlp_gate": "mlp_multipliers", "mlp_output": "mlp_multipliers", "attention_scale": "key_multiplier"}
_NAMED |= {"projection_multipliers": "ssm_multipliers"}


def _factors(values: Values, key: str, count: int) -> tuple[float, ...]:
    """So many factors of a list, 1 where there is none.

    Raises:
      UserError: it is no list of so many numbers.
    """
    factors = values.get(key)
    if factors is None:
        return (1.0,) * count
    if (
        not isinstance(factors, list)
        or len(factors) != count
        or not all(type(factor) in (int, float) for factor in factors)
    ):
        raise UserError(
            f"config.json has {key} = {str(factors)[:60]}, must be a list of {count} numbers: copy the file again"
        )
    return tuple(map(float, factors))


def _read(values: Values) -> dict[str, Any]:
    before, behind = values["mamba_proj_bias"], values["projectors_bias"]
    if bool(before) != bool(behind):
        raise UserError(
            f"config.json has mamba_proj_bias = {before} and projectors_bias = {behind}, must be equal: take another model"
        )
    norm = "before" if values["mamba_norm_before_gate"] else "after"
    ssm: dict[str, Any] = {"norm": norm if values["mamba_rms_norm"] else "none"}
    ssm["projection_multipliers"] = _factors(values, "ssm_multipliers", len(projections.MAMBA))
    gate, down = _factors(values, "mlp_multipliers", 2)
    of_branches = {ours: values[theirs] for ours, theirs in _MULTIPLIERS.items()}
    fields: dict[str, Any] = {"layer_pattern": ("hybrid",), "mixer": read_mixer(values, **ssm)}
    fields["multipliers"] = Multipliers(**of_branches, mlp_gate=gate, mlp_output=down)
    if (factor := values["key_multiplier"]) != 1:
        size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        fields["attention_scale"] = size**-0.5 * factor
    return fields


def _write(config: TransformerConfig) -> dict[str, Any]:
    mixer = config.mixer
    if not (isinstance(config, DecoderConfig) and isinstance(mixer, Mamba2)):
        return {}
    written = write_mixer(config, mixer) | {"mamba_d_ssm": mixer.heads * mixer.head_dim}
    del written["mamba_expand"]  # mamba_d_ssm comes first
    written |= {"projectors_bias": mixer.bias.of_projections, "mamba_rms_norm": mixer.norm != "none"}
    written |= {"mamba_norm_before_gate": mixer.norm != "after"}
    written |= {theirs: getattr(config.multipliers, ours) for ours, theirs in _MULTIPLIERS.items()}
    written["ssm_multipliers"] = list(mixer.projection_multipliers)
    written["mlp_multipliers"] = [config.multipliers.mlp_gate, config.multipliers.mlp_output]
    scale = config.attention_scale
    return written | {"key_multiplier": 1.0 if scale is None else round(scale * config.head_size**0.5, 12)}


FAMILIES = (
    (
        Family(
            model_type="falcon_h1",
            architectures=("FalconH1ForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}
            | {"embedding_multiplier": "embedding_multiplier", "logit_scale": "lm_head_multiplier"},
            fixed={"activation": "swiglu"},
            activation="",
            defaults=SILU
            | MIXER_DEFAULTS
            | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "vocab_size": 128_000, "mamba_d_ssm": 1024}
            | {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "projectors_bias": False}
            | {"mamba_rms_norm": False, "mamba_norm_before_gate": True}
            | dict.fromkeys((*_MULTIPLIERS.values(), "key_multiplier"), 1.0),
            only=ONLY_SILU,
            mixer_keys=MIXER | _MULTIPLIERS | _NAMED,
            read_keys=("head_dim",),
            biases=ATTENTION_BIAS | {"mlp_bias": "mlp"},
            read=_read,
            write=_write,
        ),
        Names(renamed(LLAMA_BIASED, *FEED_FORWARD) + mixer_rows("mamba"), (ENDS,), BUFFERS),
    ),
)
