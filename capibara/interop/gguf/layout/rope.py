"""Rotary positions: the rope_parameters of a config.json, and the metadata and factors of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError

FACTORS = "rope_freqs.weight"  # divisors of the frequencies: the llama3 scaling has no metadata
# llama.cpp's default for layers of Gemma 3 with a window, in files that do not set it.
_LOCAL_THETA = 10_000.0
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# The only values that it supports for these families: it reads no metadata for them.
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
# Metadata of rotary positions that are read here.
KEYS = frozenset(
    ("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "rope.scaling.type")
    + ("rope.scaling.factor", "rope.scaling.attn_factor")
    + tuple(f"rope.scaling.yarn_{name}" for name in ("ext_factor", "attn_factor", *_BETAS))
)
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"  # a tenth of mscale_all_dim, of latent attention
_WITH_LOCAL = ("gemma3_text", "gemma3n_text", "olmo3")  # their layers with a window have frequencies of their own


class Rotary(Protocol):
    """What rotary positions depend on: a family."""

    @property
    def model_type(self) -> str: ...

    @property
    def arch(self) -> str: ...

    @property
    def factors(self) -> bool:
        """Whether llama.cpp reads factors of frequencies."""

    @property
    def latent(self) -> bool:
        """Whether it has multi-head latent attention."""

    def rotary_size(self, config: Mapping[str, object]) -> int: ...


def to_metadata(config: Mapping[str, object], family: Rotary) -> dict[str, Any]:
    """The metadata, without the architecture prefix of every key."""
    rope, local = parameters(config)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)))
    values: dict[str, Any] = {
        "rope.dimension_count": int(family.rotary_size(config) * share),
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }
    if local is not None:
        if _kind(local) != "default":
            raise UserError(
                f"rope_parameters scale the local layers by {_kind(local)}, GGUF scales the global ones alone"
            )
        values["rope.freq_base_swa"] = float(local.get("rope_theta", _LOCAL_THETA))
    match _kind(rope):
        case "default":
            pass
        case "linear" if not family.latent:
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(_needed(rope, "factor"))}
        case "llama3" if family.factors:
            original = [_needed(rope, name) for name in _LLAMA3][-1]
            values["rope.scaling.original_context_length"] = int(original)
        case "yarn":
            values |= _yarn(rope, config, family)
        case other:
            raise UserError(
                f"rope_type {other!r} of a {family.model_type} model has no GGUF form here: try {'' if family.latent else 'linear or '}yarn"
            )
    return values


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any], family: Rotary) -> dict[str, Any]:
    factor = float(_needed(rope, "factor"))
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    values: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(original),
    }
    for name, usual in _BETAS.items():
        if rope.get(name) not in (usual, None):
            raise UserError(
                f"{name} of the yarn scaling is {rope[name]}, llama.cpp computes it with {usual}: no GGUF form"
            )
    # llama.cpp rounds YaRN's bounds for all models, gpt-oss too, which was trained without rounding: that is its
    # behaviour.
    if bool(rope.get("truncate", True)) is (family.model_type == "gpt_oss"):
        truncate = rope.get("truncate", True)
        raise UserError(
            f"truncate of the yarn scaling is {truncate}, of a {family.model_type} model it has no GGUF form"
        )
    if family.latent:
        if rope.get("attention_factor") != 1 or not rope.get("mscale_all_dim"):
            raise UserError(
                f"mscale and mscale_all_dim of the {family.model_type} model's yarn scaling must be equal and above 0, llama.cpp "
                "computes it so: it has no GGUF form"
            )
        values[LOG_MULTIPLIER] = tidy(0.1 * rope["mscale_all_dim"])
    elif rope.get("attention_factor") is not None:
        # llama.cpp multiplies the default factor by it.
        values["rope.scaling.attn_factor"] = float(rope["attention_factor"]) / (0.1 * math.log(factor) + 1)
    return values


def parameters(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The rope_parameters of a config.json, new or old: of the global layers, and of local ones if they differ."""
    rope = config.get("rope_parameters")
    if rope is None:  # before transformers 5
        scaling = dict(config.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        theta = config.get("rope_theta", config.get("rotary_emb_base", 10_000.0))
        local = config.get("rope_local_base_freq")
        return {"rope_theta": theta} | scaling, None if local is None else {"rope_theta": local}
    if "full_attention" in rope:
        return rope["full_attention"] or {}, rope.get("sliding_attention")
    return rope, None


def _needed(rope: Mapping[str, object], name: str) -> Any:
    if not isinstance(rope.get(name), int | float):
        raise UserError(f"rope_parameters of config.json have no {name}, which {_kind(rope)} scaling needs")
    return rope[name]


def _kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or "default"


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """The divisor of each frequency, float32 [head_dim / 2] (Llama 3.1).

    Wavelengths above original / low_freq_factor are divided by the factor, those below original / high_freq_factor are
    unchanged, those between are interpolated.
    """
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    share = np.clip((_turns(rope["rope_theta"], head_dim, original) - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def factors(config: Mapping[str, object], family: Rotary) -> np.ndarray | None:
    """The frequency factors that a GGUF file of this model needs; None: none."""
    rope, _ = parameters(config)
    if _kind(rope) != "llama3":
        return None
    return llama3_factors({"rope_theta": 10_000.0} | dict(rope), family.rotary_size(config))


def _turns(theta: float, head_dim: int, length: float) -> np.ndarray:
    """Number of turns of each frequency over `length` positions."""
    return length * float(theta) ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)


def from_metadata(
    values: Mapping[str, Any], family: Rotary, head_dim: int, divided: np.ndarray | None
) -> dict[str, Any]:
    """The rope_parameters (and related values) of the metadata; `divided` are the file's factors."""
    for key in ("rope.freq_base", "rope.freq_base_swa"):
        if type(theta := values.get(key, 1.0)) not in (int, float) or theta <= 0:
            raise UserError(f"{family.arch}.{key} is {limits.shortened(theta)}, must be above 0: take another file")
    theta = values.get("rope.freq_base", 10_000.0)
    original = values.get("rope.scaling.original_context_length")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind, factor = _scaling(values, family)
    if divided is not None and not np.all(divided == 1):
        if kind != "none":
            raise UserError(
                f"{family.arch}.rope.scaling.type is {kind!r} beside {FACTORS}, must be none: take another file"
            )
        rope |= _llama3_of(divided, theta, head_dim, original)
    elif kind == "linear":
        if family.latent:
            raise UserError(f"{family.arch}.rope.scaling.type is linear, must be none or yarn: take another file")
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope |= {"truncate": False} if family.model_type == "gpt_oss" else {}
        if family.latent:
            rope |= _latent_scales(values, family)
        elif "rope.scaling.attn_factor" in values:
            rope["attention_factor"] = tidy(values["rope.scaling.attn_factor"] * (0.1 * math.log(factor) + 1))
    share = values.get("rope.dimension_count", head_dim) / head_dim
    more = {}
    if share != 1:
        rope["partial_rotary_factor"] = share
    if family.model_type == "gpt_neox":
        more["rotary_pct"] = share
    if family.model_type in _WITH_LOCAL:
        usual = theta if family.model_type == "olmo3" else _LOCAL_THETA
        local = {"rope_type": "default", "rope_theta": values.get("rope.freq_base_swa", usual)}
        return {"rope_parameters": {"sliding_attention": local, "full_attention": rope}}
    return {"rope_parameters": rope} | more


def _latent_scales(values: Mapping[str, Any], family: Rotary) -> dict[str, float]:
    """Mscale and mscale_all_dim, which llama.cpp has equal."""
    for key, usual in ((LOG_MULTIPLIER, None), ("rope.scaling.attn_factor", 1)):
        value = values.get(key, usual)
        if type(value) not in (int, float) or (value <= 0 if usual is None else value != usual):
            must = "above 0" if usual is None else f"{usual}"
            raise UserError(f"{family.arch}.{key} is {value}, must be {must} with yarn scaling: take another file")
    scale = tidy(10 * tidy(values[LOG_MULTIPLIER]))
    return {"mscale": scale, "mscale_all_dim": scale}


def _scaling(values: Mapping[str, Any], family: Rotary) -> tuple[str, float]:
    """The kind of scaling and its factor, as llama.cpp reads them: a factor without a kind is that of linear scaling.

    Raises:
      UserError: they are not supported, or something else than them scales the positions.
    """
    kind = values.get("rope.scaling.type", "linear")
    least = 1.0 if values.get("rope.scaling.type", "none") == "none" else None
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", least))  # the latter in old files
    if kind not in ("none", "linear", "yarn"):
        raise UserError(
            f"{family.arch}.rope.scaling.type is {limits.shortened(kind)}, must be none, linear or yarn: take another file"
        )
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise UserError(f"{family.arch}.rope.scaling.factor is {factor}, must be a number above 0: take another file")
    kind = "none" if kind == "linear" and factor == 1 else kind
    usual: dict[str, tuple[float, ...]] = {
        "rope.scaling.yarn_ext_factor": (-1, 1),
        "rope.scaling.yarn_attn_factor": (0, 1),
    }
    usual |= {f"rope.scaling.yarn_{name}": (value,) for name, value in _BETAS.items()}
    usual |= {} if kind == "yarn" else {"rope.scaling.attn_factor": (0, 1)}
    usual |= (
        {} if family.model_type in _WITH_LOCAL else {"rope.freq_base_swa": (values.get("rope.freq_base", 10_000.0),)}
    )
    for key, same in usual.items():
        if values.get(key, same[0]) not in same:
            raise UserError(
                f"{family.arch}.{key} is {values[key]}, must be {same[-1]} with {kind} scaling: take another file"
            )
    return kind, factor


def _llama3_of(divided: np.ndarray, theta: float, head_dim: int, original: int | None) -> dict[str, Any]:
    """The llama3 scaling that yields these factors.

    They determine only original / low and original / high, so low_freq_factor is set to 1, as in all published models.
    """
    divided = divided.astype(np.float64)
    factor = tidy(divided.max())
    usual = [(float(4), length) for length in (original, 8192) if length]
    between = np.flatnonzero((divided > 1 + 1e-3) & (divided < factor - 1e-3))
    if len(between) > 1:
        # (turns - 1) / (high - 1) is the share, and turns are proportional to the original length.
        share = (1 / divided[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(_turns(theta, head_dim, 1.0)[between], share, 1)
        if start < 0:
            usual.append((round(1 - 1 / start, 3), round(-slope / start)))
    for high, length in usual:
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": high, "original_max_position_embeddings": length}
        if divided.shape == (head_dim // 2,) and np.allclose(llama3_factors(rope, head_dim), divided, rtol=1e-4):
            return rope
    raise UserError(
        f"{FACTORS} holds factors that no llama3 scaling yields: this file's rotary positions are not supported"
    )


def tidy(value: float) -> float:
    """The shortest decimal that is equal in float32: files hold float32, people write 1e-5."""
    return float(str(np.float32(value)))
