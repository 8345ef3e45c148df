"""Converts rotary positions between config.json of transformers 4 and 5 and our Rope."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig

Values = Mapping[str, Any]

_FREQUENCIES = 2**14
_SCALINGS = {"default": "none"} | {
    name: name for name in ("linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
}
# Parameters of scalings: our field -> theirs.
_OF_SCALING = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
    "dynamic": {"factor": "factor"},
    "longrope": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "attention_factor": "attention_factor",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
    },
    "proportional": {"factor": "factor"},
}
# Defaults of transformers for gpt-oss.
_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read(values: Values, family: Family) -> dict[str, Any]:
    """Fields of our Rope, as transformers 5.24 reads them (RotaryEmbeddingConfigMixin).

    Raises:
      UserError: the scaling is not supported.
    """
    full, local = _parameters(values, family)
    kind = _kind(full, family)
    if local.get("rope_type", local.get("type", "default")) != "default":
        raise UserError(
            f"config.json has rope_type {local.get('rope_type')!r} for sliding_attention, must be 'default': take another model"
        )
    rope = {"theta": full["rope_theta"], "fraction": _fraction(values, family, full, kind)}
    if (pairs := family.pairs if values.get(family.pairs_key, True) else "halves") != "halves":
        rope["pairs"] = pairs
    if "rope_theta" in local:
        rope["local_theta"] = local["rope_theta"]
    if family.rope_by_layer and family.partial:
        rope["local_fraction"] = _fraction(values, family, local, "default")
    if kind == "yarn" and not full.get("truncate", True):
        rope["yarn_bounds"] = "exact"
    rope["scaling"] = _SCALINGS[kind]
    longest = values.get("max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):
        full.setdefault("original_max_position_embeddings", longest)
    if kind == "yarn":
        full |= _yarn(full)
    if kind == "longrope":
        full |= _long(full, longest)
    if kind == "dynamic":
        rope["original_length"] = longest
    for ours, theirs in _OF_SCALING.get(kind, {}).items():
        if full.get(theirs) is not None:
            rope[ours] = full[theirs]
    return rope


def mscale(values: Values) -> float:
    """The factor of the scores that mscale_all_dim of YaRN stands for, as DeepSeek's models compute it."""
    parameters = _object(values, "rope_scaling") or _object(values, "rope_parameters")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    over, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if kind == "default" or not over or not factor or factor <= 1:
        return 1.0
    return (0.1 * over * math.log(factor) + 1.0) ** 2


def _parameters(values: Values, family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of all layers, or of those without a window, and of those with one, as far as they differ."""
    parameters, old = _object(values, "rope_parameters"), _object(values, "rope_scaling")
    if family.rope_by_layer:
        full, local = _object(parameters, "full_attention") | old, _object(parameters, "sliding_attention")
        full.setdefault("rope_theta", values["rope_theta"])
        return full, {"rope_theta": values["rope_local_base_freq"]} | local
    full = old or parameters  # an old object replaces the new one, whose values do not fill its gaps
    if family.model_type == "gpt_oss" and not full:
        full = dict(_GPT_OSS)
    layers = [key for key, value in full.items() if isinstance(value, Mapping)]
    if layers:
        raise UserError(
            f"config.json has rope_parameters for {layers[0]} alone, transformers' {family.model_type} has one for all layers: "
            "copy the file again"
        )
    full.setdefault("rope_theta", values[family.theta])
    if "original_max_position_embeddings" in values:  # it comes first, whatever the object says
        full["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    return full, {}


def _kind(full: Values, family: Family) -> str:
    """The scaling, by transformers' name for it."""
    kind = full.get("rope_type") or full.get("type") or "default"
    if family.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # under its first names
    if kind not in _SCALINGS:
        raise UserError(
            f"config.json has rope_type {kind!r}, must be one of {', '.join(_SCALINGS)}: take another model"
        )
    return kind


def _fraction(values: Values, family: Family, full: Values, kind: str) -> float:
    """The share of a head that is rotated."""
    fraction = full.get("partial_rotary_factor", values.get(family.share, family.fraction))
    if kind == "proportional" and family.partial:  # these have tables of a part of a head
        raise UserError(
            f"config.json has rope_type 'proportional', which is for models that rotate whole heads, not for {family.model_type}: "
            "take another model"
        )
    if kind == "proportional":
        return full.get("partial_rotary_factor", 1.0)
    if not family.partial:
        if kind != "default" and fraction not in (None, 1):  # transformers rotates whole heads by tables of a part
            raise UserError(
                f"config.json has partial_rotary_factor = {fraction} with rope_type {kind!r}, and transformers' "
                f"{family.model_type} rotates whole heads: leave it out"
            )
        return 1.0
    if family.model_type == "gpt_neox" and values.get("head_dim"):  # transformers rotates a share of it in other heads
        raise UserError(f"config.json of a gpt_neox has head_dim = {values['head_dim']}, must be without: leave it out")
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    size = values.get("head_dim") or (width // heads if heads and width else 0)
    if int(size * fraction) % 2:
        of = "head_dim" if values.get("head_dim") else f"hidden_size {width} / num_attention_heads {heads}"
        raise UserError(
            f"config.json has {family.share} = {fraction} of a head of {size} ({of}), must be an even number of dimensions"
        )
    return fraction


def _yarn(full: Values) -> dict[str, Any]:
    """What transformers puts in the place of parameters of YaRN that are missing."""
    resolved = {key: full.get(key) or default for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    scales = [scale for key in ("mscale", "mscale_all_dim") if (scale := full.get(key))]
    if full.get("attention_factor") is None and len(scales) == 2:
        above, below = (0.1 * scale * math.log(full["factor"]) + 1.0 for scale in scales)
        resolved["attention_factor"] = above / below
    return resolved


def _long(full: Values, longest: int | None) -> dict[str, Any]:
    """The parameters of longrope, with a factor and tuples of numbers."""
    result: dict[str, Any] = {}
    for key in ("short_factor", "long_factor"):
        numbers = full.get(key)
        if not isinstance(numbers, list) or len(numbers) > _FREQUENCIES or not all(map(_is_factor, numbers)):
            raise UserError(
                f"config.json has {key} = {str(numbers)[:60]}, must be a list of numbers: copy the file again"
            )
        result[key] = tuple(map(float, numbers))
    original = full["original_max_position_embeddings"]
    if full.get("factor") is None and longest and original:
        result["factor"] = longest / original
    return result


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e18


def _object(values: Values, key: str) -> dict[str, Any]:
    """An object in a config.json; empty if missing."""
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"config.json has {key} = {value!r}, must be an object or null: copy the file again")
    return dict(value)


_OLD = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


def write(config: DecoderConfig | EncoderConfig | EncoderDecoderConfig, family: Family) -> dict[str, Any]:
    """Values of config.json for transformers 4 and 5."""
    written = _write(config, family)
    return {key: value for key, value in written.items() if family.old_rope or key not in _OLD}


def _write(config: DecoderConfig | EncoderConfig | EncoderDecoderConfig, family: Family) -> dict[str, Any]:
    rope = config.rope
    if not family.rope:
        return {}
    kind = next(theirs for theirs, ours in _SCALINGS.items() if ours == rope.scaling)
    scaling: dict[str, Any] = {"rope_type": kind}
    for ours, theirs in _OF_SCALING.get(kind, {}).items():
        value = getattr(rope, ours)
        if value is not None:
            scaling[theirs] = list(value) if isinstance(value, tuple) else value
    if kind == "yarn" and rope.yarn_bounds == "exact":
        scaling["truncate"] = False
    if family.mscale and config.attention_scale is not None and rope.factor > 1:
        ratio = config.attention_scale * config.head_size**0.5
        scaling["mscale_all_dim"] = round((ratio**0.5 - 1.0) / (0.1 * math.log(rope.factor)), 9)
    turned = {} if rope.fraction == family.fraction == 1 else {"partial_rotary_factor": rope.fraction}
    full = scaling | {"rope_theta": rope.theta} | turned
    if family.pairs_key:
        turned |= {family.pairs_key: rope.pairs == "adjacent"}
    old: dict[str, Any] | None = None if kind == "default" else scaling
    if kind == "longrope" and family.model_type == "phi3":  # transformers 4 rejects other keys
        old = {"type": kind} | {key: scaling[key] for key in ("short_factor", "long_factor")}
    written = {"rope_theta": rope.theta, "rope_scaling": old} | turned
    if kind == "dynamic":  # transformers uses it as the original length
        written["max_position_embeddings"] = rope.original_length
    if kind == "longrope":
        assert rope.original_length is not None, "Rope sees to it"
        written["original_max_position_embeddings"] = rope.original_length
        written["max_position_embeddings"] = round(
            rope.factor * rope.original_length
        )  # what its old form has as the factor
    if family.model_type == "gpt_neox":
        written = {"rotary_emb_base": rope.theta, "rotary_pct": rope.fraction}
        written |= {} if kind == "default" else {"rope_scaling": scaling}
    if not family.rope_by_layer:
        return written | {"rope_parameters": full}
    local_theta = rope.theta if rope.local_theta is None else rope.local_theta
    local = {"rope_type": "default", "rope_theta": local_theta}
    if family.partial:
        full["partial_rotary_factor"] = rope.fraction
        local["partial_rotary_factor"] = rope.fraction if rope.local_fraction is None else rope.local_fraction
    written |= {"rope_local_base_freq": local_theta}
    return written | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def longest(values: Values) -> int | None:
    """Longest row in tokens according to a config.json; with dynamic scaling more than max_position_embeddings."""
    parameters = _object(values, "rope_scaling") or _object(values, "rope_parameters")
    most, factor = values.get("max_position_embeddings"), parameters.get("factor")
    if most is None or "dynamic" not in (parameters.get("rope_type"), parameters.get("type")) or not _is_factor(factor):
        return most
    return int(most * factor)
