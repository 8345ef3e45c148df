"""The metadata of a GGUF file of a declared family, from our configuration and back."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.gguf.layout import foreign
from capibara.interop.gguf.layout import rope as gguf_rope
from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes, Window
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import families as hf_families
from capibara.interop.hf.layout import rope as hf_rope
from capibara.models.api import DecoderConfig, LatentAttention, Mixer, Moe, Rope

_SIZES = {
    "embed_dim": "embedding_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "mlp_dim": "feed_forward_length",
}
_EPS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
_MOE = {"num_experts": "expert_count", "top_k": "expert_used_count"}
_WINDOW, _PATTERN, _LENGTH = "attention.sliding_window", "attention.sliding_window_pattern", "context_length"
NEXTN = "nextn_predict_layers"
# Of multi-head latent attention, which llama.cpp computes as if all heads shared one key.
_LATENT = {"kv_rank": "attention.kv_lora_rank", "query_rank": "attention.q_lora_rank"}
_LATENT |= {"value_dim": "attention.value_length_mla", "rotary_dim": "rope.dimension_count"}
_LATENT_HEAD = "attention.key_length_mla"
_HEADS = ("num_heads", "num_kv_heads", "head_dim")
_OPTIONAL = ("num_kv_heads", "head_dim")
# A tensor of the first layer that has a bias -> the projections of which it is one.
_BIASES = {
    "attn_q.bias": "qkv",
    "attn_qkv.bias": "qkv",
    "attn_output.bias": "out",
    "ffn_up.bias": "mlp",
}
_KV_HEADS, _WIDTH = _SIZES["num_kv_heads"], _SIZES["mlp_dim"]
_HEADS_OF_MIXERS = (("heads", "head_dim"), ("value_heads", "value_dim"))
_INTERVAL = "full_attention_interval"
_CLOSE = 1e-6  # metadata are float32
_VALUE_SIZE = "attention.value_length"
_FURTHER_SIZES = (_VALUE_SIZE, "rope.dimension_count", "expert_feed_forward_length", NEXTN, _INTERVAL)
_NO_SIZES = ("gates", "scale")  # of experts
_COUNTS = (_LENGTH, _WINDOW, "rope.scaling.original_context_length", "vocab_size")  # that no tensor bounds
_NEVER_ZERO = ("embedding_length", "block_count", "attention.head_count", _LENGTH, _INTERVAL)
_BY_LAYER = ("attention.head_count", _KV_HEADS, _WIDTH)
_UNREAD = ("use_parallel_residual",)  # llama.cpp decides by the tensors, or it is read here too
_MOST_EXPERTS = 1_000_000  # of all layers: each has names of its own


def write(config: Fields, family: Family) -> dict[str, Any]:
    """The metadata of a model, without the architecture that every key begins with; a value's type is the stored one.

    Warns where llama.cpp will not compute what the model does beyond some length.

    Args:
      config: config.json.

    Raises:
      UserError: llama.cpp cannot compute this model, or a value is missing.
    """
    model = family.model(config)
    model = model if family.fold is None else family.fold(model)[0]
    if family.square and model.head_size * model.num_heads != model.embed_dim:
        raise _refused("head_dim", model.head_size, model.embed_dim // model.num_heads, family)
    longest = _longest(config, model, family)
    values: dict[str, Any] = {"vocab_size": model.vocab_size, _LENGTH: longest}
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    fields |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    fields |= {"attention_scale": model.head_size**-0.5 if model.attention_scale is None else model.attention_scale}
    for name, key in _keys(family).items():
        values |= _stored(key, fields[name], name in family.inverse)
    if "attention.key_length" in values:
        values[_VALUE_SIZE] = values["attention.key_length"]
    if model.latent is not None:
        values |= _write_latent(model, model.latent)
    values |= _norm(model)
    if model.moe is not None:
        values |= _write_moe(model, model.moe, family)
    if family.window is not Window.NONE and model.window is not None:
        values[_WINDOW] = model.window
    if family.window is Window.LISTED and model.window is not None:
        values[_PATTERN] = [kind == "local" for kind in model.kinds]
    if model.mixer is not None:
        values |= _write_mixer(model, model.mixer, family)
    if family.rope_switch:
        values[family.rope_switch] = model.positions == "rope"
    if model.positions == "rope":
        rotary = _rotary(model, family) | {"max_position_embeddings": longest}
        values |= gguf_rope.to_metadata({**config, **rotary}, family)
    values |= dict(family.constants) | ({} if family.write is None else family.write(model))
    _check(config, model, values, family)
    return values


def _rotary(model: DecoderConfig, family: Family) -> dict[str, Any]:
    """The values of config.json about rotary positions."""
    return hf_rope.write(model, dataclasses.replace(family.hf, rope=model.positions == "rope"))


def _keys(family: Family) -> dict[str, str]:
    """Fields of the configuration that are metadata -> key."""
    absent = {"head_dim"} if family.square else {"num_kv_heads", "head_dim"} if family.latent else set()
    absent |= {*_HEADS, "mlp_dim"} & {*family.hf.fixed}
    absent |= {*_HEADS} if "num_heads" in absent else set()
    return {name: key for name, key in (_SIZES | dict(family.keys)).items() if name not in absent}


def _stored(key: str, value: object, inverse: bool) -> dict[str, Any]:
    """A value under its key; nothing if it is None."""
    if value is None:
        return {}
    return {key: gguf_rope.tidy(1 / value if inverse else value) if isinstance(value, float) else value}


def _write_latent(model: DecoderConfig, latent: LatentAttention) -> dict[str, Any]:
    values = {key: getattr(latent, name) or 0 for name, key in _LATENT.items()}
    return values | {
        _KV_HEADS: 1,
        _LATENT_HEAD: model.head_size,
        _SIZES["head_dim"]: latent.kv_rank + latent.rotary_dim,
        _VALUE_SIZE: latent.kv_rank,
    }


def _read_latent(values: Metadata, family: Family) -> dict[str, Any]:
    missing = [key for key in (*_LATENT.values(), _LATENT_HEAD) if key not in values and key != _LATENT["query_rank"]]
    if missing or values.get(_KV_HEADS) != 1:
        raise UserError(
            f"the file has no {family.arch}.{missing[0] if missing else _KV_HEADS + ' = 1'}: it is an old file, take a newer one"
        )
    sizes: dict[str, Any] = {name: values[key] for name, key in _LATENT.items() if values.get(key)}
    latent = LatentAttention(**sizes)
    width = values.get(_SIZES["head_dim"], latent.kv_rank + latent.rotary_dim)
    if width != latent.kv_rank + latent.rotary_dim:
        raise UserError(
            f"{family.arch}.{_SIZES['head_dim']} is {width}, must be {latent.kv_rank + latent.rotary_dim}: take another file"
        )
    if not math.isclose(eps := values.get(_EPS["rms"], latent.norm_eps), latent.norm_eps, rel_tol=_CLOSE):
        raise UserError(
            f"rms_norm_eps of the {family.model_type} model is {eps}, llama.cpp computes the latents' norms with it too, which "
            f"have {latent.norm_eps}: it has no GGUF form"
        )
    return {"latent": latent, "head_dim": values[_LATENT_HEAD]}


def _norm(model: DecoderConfig) -> dict[str, float]:
    kind = "rms" if model.norm == "rms" else "layer"
    return {_EPS[kind]: gguf_rope.tidy(model.norm_eps)}


def _longest(config: Fields, model: DecoderConfig, family: Family) -> int:
    key = _longest_key(family)
    longest = model.max_length or config.get(key) or family.hf.defaults.get(key) or family.longest
    if not isinstance(longest, int):
        raise UserError(f"config.json of the {family.model_type} model has no {key}")
    if family.window is Window.IGNORED and model.window is not None and model.window < longest:
        warnings.warn(
            f"llama.cpp has no sliding window for {family.model_type} models: rows longer than {model.window} tokens get "
            "other answers there",
            stacklevel=4,
        )
    return longest


def _write_mixer(model: DecoderConfig, mixer: Mixer, family: Family) -> dict[str, Any]:
    """The metadata of recurrent layers, which have no heads of keys in the list of all layers."""
    fields = vars(mixer) | _inner(vars(mixer))
    values = {key: fields[name] for name, key in family.mixer_keys.items()}
    if family.recurrent_key:
        values[family.recurrent_key] = [kind == "recurrent" for kind in model.kinds]
    elif any(kind.attends for kind in model.kinds) and "recurrent" in model.kinds:
        values[_KV_HEADS] = [model.kv_heads if kind.attends else 0 for kind in model.kinds]
    if "feed_forward" in model.kinds:
        values[_WIDTH] = [model.mlp_dim if kind == "feed_forward" else 0 for kind in model.kinds]
    return values


def _inner(fields: Fields) -> dict[str, Any]:
    """The width of all heads of a mixer that has heads."""
    for heads, size in _HEADS_OF_MIXERS:
        if heads in fields:
            return {"inner_dim": fields[heads] * fields[size]}
    return {}


def _write_moe(model: DecoderConfig, moe: Moe, family: Family) -> dict[str, Any]:
    values: dict[str, Any] = {}
    fields = {field.name: getattr(moe, field.name) for field in dataclasses.fields(moe)}
    fields |= {"expert_dim": moe.expert_dim or model.mlp_dim, "first_dense": len(model.dense_layers)}
    fields["gates"] = moe.gates == "normalized"
    fields["shared_width"] = moe.shared_experts * (moe.shared_dim or fields["expert_dim"])
    if "groups" in family.moe_keys and moe.groups > 1 and moe.top_groups == moe.groups:  # it ends with an assertion
        raise _refused("top_groups", moe.top_groups, f"less than {moe.groups}", family)
    for name, key in (_MOE | dict(family.moe_keys)).items():
        values |= _stored(key, fields[name], inverse=False)
    return values


def read(values: Metadata, shapes: Shapes, factors: np.ndarray | None, family: Family) -> dict[str, Any]:
    """A config.json of the metadata of a file.

    Args:
      values: the metadata whose keys begin with the architecture, without it.
      shapes: of the tensors of the file, by their names in it, slowest dimension first.
      factors: of rotary frequencies that the file has; None: it has none.

    Raises:
      UserError: a value is missing, is not known in the family, or varies from layer to layer.
    """
    _check_numbers(values, shapes, family)
    if factors is not None and not family.factors:
        raise UserError(f"{gguf_rope.FACTORS} is there, and llama.cpp reads none of {family.arch}: take another file")
    if family.nextn:
        values = {**values, "block_count": values["block_count"] - len(left_out(values, family))}
    longest = values.get(_LENGTH)
    foreign.check(family.arch, family.model_type, values, _supported(family), longest=longest, fixed=family.constants)
    for key, constant in family.constants.items():
        if values.get(key, constant) != constant:
            raise UserError(f"{family.arch}.{key} is {limits.shortened(values[key])}, must be {constant}")
    model = _model(values, shapes, factors, family)
    _check_unread(values, model, family)
    like = {"model_type": family.model_type}
    config = hf_config.to_hf(model, like)
    if config["model_type"] != family.model_type:
        raise UserError(
            f"its metadata say a model that is no {family.model_type}: it is corrupted, or take another file"
        )
    known = "max_length" in family.hf.keys or longest == family.longest
    return config if known else config | {_longest_key(family): longest}


def _supported(family: Family) -> set[str]:
    """The metadata that are read."""
    supported = {*_keys(family).values(), *(_MOE | dict(family.moe_keys)).values(), *_EPS.values(), *family.constants}
    supported |= {*family.mixer_keys.values(), family.rope_switch, family.recurrent_key}
    supported |= {_INTERVAL} if family.recurrent_key else set()
    supported |= {_LENGTH, *gguf_rope.KEYS, *family.ignored}
    supported |= {NEXTN} if family.nextn else set()
    supported |= {_SIZES["head_dim"]} if family.square else set()
    latent = {*_LATENT.values(), _LATENT_HEAD, _KV_HEADS, _SIZES["head_dim"], gguf_rope.LOG_MULTIPLIER}
    supported |= latent if family.latent else set()
    supported |= {_WINDOW} if family.window is not Window.NONE else set()
    supported |= {_PATTERN} if family.window is Window.LISTED else set()
    return supported


def left_out(values: Metadata, family: Family) -> tuple[str, ...]:
    """Beginnings of the names of tensors of layers that predict several tokens, which are left out: one a layer."""
    count, last = values.get(NEXTN) or 0, values.get("block_count", 0)
    if not family.nextn or not count:
        return ()
    if type(count) is not int or not 0 < count < last:
        raise UserError(f"{family.arch}.{NEXTN} is {count}, must be 0 to {last - 1} by {family.arch}.block_count")
    return tuple(f"blk.{layer}." for layer in range(last - count, last))


def _longest_key(family: Family) -> str:
    return family.hf.aliases.get("max_position_embeddings", "max_position_embeddings")


def _model(values: Metadata, shapes: Shapes, factors: np.ndarray | None, family: Family) -> DecoderConfig:
    """Our configuration of the metadata."""
    fields: dict[str, Any] = {"vocab_size": shapes["token_embd.weight"][0]}
    if family.latent:
        fields |= _read_latent(values, family)
    if family.mixer is not None:
        fields |= _read_mixer(values, shapes, family)
        listed = {key: max(of) for key in (_KV_HEADS, _WIDTH) if isinstance(of := values.get(key), list) and of}
        values = {**values, **listed}
    if isinstance(widths := values.get(_WIDTH), list) and len(set(widths)) == 1:
        values = {**values, _WIDTH: widths[0]}
    for name, key in _keys(family).items():
        value = values.get(key)
        if isinstance(value, list):
            raise UserError(f"{family.arch}.{key} varies from layer to layer: such models are not known here")
        if value is None and name in _SIZES and name not in _OPTIONAL:
            raise UserError(f"the file has no {family.arch}.{key}: it is corrupted, or no {family.arch} model")
        if value == 0 and name in family.inverse:
            raise UserError(f"{family.arch}.{key} is 0, must be another number: take another file")
        if value is not None:
            fields[name] = 1 / value if name in family.inverse else value
    fields |= {"max_length": values[_LENGTH]} if "max_length" in family.hf.keys else {}
    if family.square and "num_heads" in fields:
        _check_heads(values, fields, family)
    fields |= _read_norm(values, family)
    fields |= {"bias": _bias(shapes, family), "head": "separate" if "output.weight" in shapes else "tied"}
    fields |= _layers(values, fields, family)
    if _flag(values, family.rope_switch, True, family) if family.rope_switch else family.hf.rope:
        fields |= _rope(values, fields, factors, family)
    elif family.rope_switch:
        fields["positions"] = "none"
    if (count := values.get(_MOE["num_experts"])) is not None:
        fields["moe"] = _read_moe(values, family) if count > 1 else None  # Jamba's dense models have one
    # Of biases interop.hf fixes those that no key has.
    fields |= {name: value for name, value in family.hf.fixed.items() if name != "bias"} | dict(family.fixed)
    fields |= {} if family.read is None else family.read(fields, values, shapes)
    return (family.hf.config or DecoderConfig)(**fields)


def _check_heads(values: Metadata, fields: Fields, family: Family) -> None:
    """Raises unless heads are as wide as the model together."""
    size = fields["embed_dim"] // fields["num_heads"]
    if (other := values.get(_SIZES["head_dim"], size)) != size:
        raise UserError(
            f"{family.arch}.{_SIZES['head_dim']} is {other}, llama.cpp computes {family.model_type} models with {size} alone"
        )


def _flag(values: Metadata, key: str, default: bool, family: Family) -> bool:
    value = values.get(key, default)
    if type(value) is not bool:
        raise UserError(f"{family.arch}.{key} is {limits.shortened(value)}, must be true or false: take another file")
    return value


def _flags(value: object, key: str, layers: int, family: Family) -> list[bool]:
    """A list of the metadata with true or false for each layer."""
    if not isinstance(value, list) or len(value) != layers or not all(flag in (0, 1) for flag in value):
        raise UserError(
            f"{family.arch}.{key} is {limits.shortened(value)}, must be a list with one entry for each of {layers} layers, true or "
            "false: take another file"
        )
    return value


def _read_mixer(values: Metadata, shapes: Shapes, family: Family) -> dict[str, Any]:
    """The mixer, and which layers are recurrent."""
    assert family.mixer is not None, "the caller sees to it"
    missing = [key for key in family.mixer_keys.values() if key not in values]
    if missing:
        raise UserError(f"the file has no {family.arch}.{missing[0]}: it is corrupted, or no {family.arch} model")
    fields = {name: values[key] for name, key in family.mixer_keys.items()}
    for heads, size in _HEADS_OF_MIXERS:
        if heads in fields and "inner_dim" in fields:
            fields[size] = fields.pop("inner_dim") // fields[heads]
    if hasattr(family.mixer, "bias"):
        fields["bias"] = "conv" if any(name.endswith("ssm_conv1d.bias") for name in shapes) else "none"
    return {"mixer": family.mixer(**fields)} | _recurrent(values, family)


def _recurrent(values: Metadata, family: Family) -> dict[str, Any]:
    """Which layers are recurrent."""
    count = values["block_count"]
    if not family.recurrent_key:
        heads, widths = values.get(_KV_HEADS), values.get(_WIDTH)
        listed = (
            list(zip(heads, widths if isinstance(widths, list) else [0] * count)) if isinstance(heads, list) else []
        )
        kinds = ["feed_forward" if width else "global" if of_keys else "recurrent" for of_keys, width in listed]
    elif family.recurrent_key in values:
        flags = _flags(values[family.recurrent_key], family.recurrent_key, count, family)
        kinds = ["recurrent" if is_recurrent else "global" for is_recurrent in flags]
    else:
        every = values.get(_INTERVAL, 4)
        kinds = ["recurrent" if (layer + 1) % every else "global" for layer in range(count)]
    return {"layer_pattern": tuple(kinds)} if kinds else {}


def _read_norm(values: Metadata, family: Family) -> dict[str, Any]:
    if "norm_eps" in family.hf.fixed:
        return {}
    kinds = ("rms", "layer") if family.hf.fixed.get("norm", "rms") == "rms" else ("layer", "rms")
    keys = [_EPS[kind] for kind in kinds if _EPS[kind] in values]
    if not keys:
        raise UserError(f"the file has no {family.arch}.{_EPS[kinds[0]]}: it is corrupted, or no {family.arch} model")
    return {"norm_eps": values[keys[0]]}


def _bias(shapes: Shapes, family: Family) -> str:
    """Our `bias` for the tensors of the file."""
    parts = {_BIASES[part] for name in shapes if (part := name.split(".", 2)[-1]) in _BIASES} & family.biases
    return next(ours for ours, of in hf_families.BIASED.items() if of == parts)


def _layers(values: Metadata, fields: Fields, family: Family) -> dict[str, Any]:
    """The kinds of layers, and their window."""
    window, whole = values.get(_WINDOW), family.hf.kinds["full_attention"]
    if family.window is Window.NONE or not window:
        return {}
    if family.window is Window.IGNORED:
        return {"layer_pattern": ("local",), "window": window}
    listed, count = values.get(_PATTERN, family.period), fields["num_layers"]
    if type(listed) is int:
        listed = [(layer + 1) % listed != 0 if listed else True for layer in range(count)]
    listed = _flags(listed, _PATTERN, count, family)
    return {"layer_pattern": tuple("local" if local else whole for local in listed), "window": window}


def _rope(values: Metadata, fields: Fields, factors: np.ndarray | None, family: Family) -> dict[str, Any]:
    """Rotary positions, and what their scaling makes of attention's."""
    latent = fields.get("latent")
    head_dim = fields.get("head_dim") or fields["embed_dim"] // fields["num_heads"]
    head_dim = head_dim if latent is None else latent.rotary_dim
    config = gguf_rope.from_metadata(values, family, head_dim, factors)
    sizes: dict[str, Any] = {"head_dim": fields.get("head_dim"), "hidden_size": fields["embed_dim"]}
    sizes |= {"num_attention_heads": fields["num_heads"], "max_position_embeddings": values.get(_LENGTH)}
    sizes["rope_local_base_freq"] = None  # rope_parameters have it
    dims = values.get("rope.dimension_count", head_dim)
    sizes |= {family.hf.share: dims / head_dim} if family.hf.partial else {}
    rope = Rope(**hf_rope.read(family.hf.defaults | config | sizes, family.hf))
    if int(head_dim * rope.fraction) != dims:
        raise UserError(
            f"{family.arch}.rope.dimension_count is {dims}, {family.model_type} models rotate whole heads of {head_dim}"
        )
    factor = hf_rope.mscale(config) if family.hf.mscale else 1.0
    return {"rope": rope} | ({} if factor == 1 else {"attention_scale": fields["head_dim"] ** -0.5 * factor})


def _read_moe(values: Metadata, family: Family) -> Moe:
    keys = _MOE | dict(family.moe_keys)
    fields = {name: values[key] for name, key in keys.items() if key in values}
    if "gates" in keys:
        fields["gates"] = "normalized" if _flag(values, keys["gates"], False, family) else "scores"
    width = fields.pop("shared_width", None)
    fields |= {"shared_experts": 1, "shared_dim": width} if width else {}
    if not fields.get("scale"):  # 0 is none
        fields.pop("scale", None)
    return Moe(**fields | dict(family.hf.moe) | dict(family.moe))


def _check_numbers(values: Metadata, shapes: Shapes, family: Family) -> None:
    """Raises where a number is none that could be computed with, or promises more than the file's tensors could hold."""
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    largest = dict.fromkeys(_sizes(family), widest) | {"block_count": len(shapes)} | dict.fromkeys(_COUNTS, math.inf)
    least = dict.fromkeys({*_NEVER_ZERO, *family.mixer_keys.values()} - {*family.constants}, 1)
    lists = {_PATTERN, family.recurrent_key, *family.ignored}
    layers, experts = values.get("block_count"), values.get(_MOE["num_experts"])
    numbers = ({*_supported(family)} | {*_COUNTS}) - {"rope.scaling.type"}
    for key, value in values.items():
        entries, low = value if isinstance(value, list) else [value], least.get(key, 0)
        if key in largest and not all(type(entry) is int and low <= entry <= largest[key] for entry in entries):
            bound = "or more" if key in _COUNTS else f"to {largest[key]} by the tensors of the file"
            raise UserError(f"{family.arch}.{key} is {limits.shortened(value)}, must be {low} {bound}")
        if key not in numbers - lists:
            continue
        if isinstance(value, list) and not (key in _BY_LAYER and len(value) == layers):
            each = f", or one for each of {layers} layers" if key in _BY_LAYER else ""
            shown = limits.shortened(value)
            raise UserError(f"{family.arch}.{key} is {shown}, must be one number{each}: take another file")
        if any(isinstance(entry, str) or not math.isfinite(entry) for entry in entries):
            raise UserError(f"{family.arch}.{key} is {limits.shortened(value)}, must be a finite number")
    needed = ("block_count", _LENGTH, *([_MOE["top_k"]] if experts else []))
    if missing := [key for key in needed if key not in values]:
        raise UserError(f"the file has no {family.arch}.{missing[0]}: it is corrupted, or no {family.arch} model")
    if (used := values.get(_MOE["top_k"])) and not experts:
        raise UserError(f"{family.arch}.{_MOE['top_k']} is {used}, must be 0 without experts: take another file")
    if (of_all := (layers or 1) * (experts or 1)) > _MOST_EXPERTS:
        raise UserError(f"{family.arch} says {of_all:,} experts in all, must have at most {_MOST_EXPERTS:,}")


def _sizes(family: Family) -> set[str]:
    """Metadata that are sizes of tensors, or numbers of parts of them."""
    of_family = {key for name, key in family.moe_keys.items() if name not in _NO_SIZES} | {*family.mixer_keys.values()}
    return {*_SIZES.values(), *_MOE.values(), *_LATENT.values(), _LATENT_HEAD, *_FURTHER_SIZES} | of_family


def _check_unread(values: Metadata, model: DecoderConfig, family: Family) -> None:
    """Raises where metadata contradict the model that the others and the tensors say, as it would be written."""
    fields = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    names = {name: key for name, key in _keys(family).items() if name not in family.inverse}
    says = {key: fields.get(name, getattr(model, name)) for name, key in names.items()}
    if model.mixer is not None:
        of_mixer = vars(model.mixer) | _inner(vars(model.mixer))
        says |= {key: of_mixer[name] for name, key in family.mixer_keys.items()}
    if any(kind.attends for kind in model.kinds):
        says[_VALUE_SIZE] = model.head_size if model.latent is None else model.latent.kv_rank
    says |= {} if family.write is None else family.write(model)
    for key, value in says.items():
        stored = values.get(key)
        if key in _UNREAD or key in family.constants or stored is None or value is None:
            continue
        if isinstance(stored, list) and key in _BY_LAYER:
            continue
        if not _equal(value, stored):
            raise UserError(
                f"{family.arch}.{key} is {limits.shortened(stored)}, must be {limits.shortened(value)} by the rest of the file: "
                "take another file"
            )


def _check(config: Fields, model: DecoderConfig, values: Metadata, family: Family) -> None:
    """Raises where the file would say another model than config.json, as llama.cpp reads it."""
    if family.mixer is not None and not isinstance(model.mixer, family.mixer):
        raise UserError(f"layer_types of the {family.model_type} model has no recurrent layers: it has no GGUF form")
    shapes = {tensor.stored: tensor.stored_shape for tensor in family.tensors(config) if not tensor.listed}
    factors = gguf_rope.factors({**config, **_rotary(model, family)}, family)
    ours, theirs = (_plain(of) for of in (model, _model(values, shapes, factors, family)))
    for name in dict.fromkeys((*ours, *theirs)):
        mine, other = ours.get(name), theirs.get(name)
        if _equal(mine, other):
            continue
        if isinstance(mine, Mapping) and isinstance(other, Mapping) and name != "rope":
            name = next(part for part in mine if not _equal(mine[part], other.get(part)))
            mine, other = mine[name], other.get(name)
        key = _hf_name(name, family)
        raise _refused(
            name, config[key] if isinstance(config.get(key), str | int | float | list) else mine, other, family
        )


def _refused(name: str, mine: object, other: object, family: Family) -> UserError:
    shown = f" is {limits.shortened(mine)}, llama.cpp computes it with {other}"
    shown = " are none that llama.cpp computes" if name == "rope" else shown  # long lists of frequencies
    return UserError(f"{_hf_name(name, family)} of the {family.model_type} model{shown}: it has no GGUF form")


def _plain(model: DecoderConfig) -> dict[str, Any]:
    """The effective fields, those of its parts too."""
    mixer = {} if model.mixer is None else {"mixer": vars(model.mixer)}
    fields = hf_config.resolved(model) | mixer | {"multipliers": vars(model.multipliers)}
    if not any(kind.attends for kind in model.kinds):
        del fields["head_dim"]
        del fields["attention_scale"]
    return fields


def _equal(mine: object, other: object) -> bool:
    """Whether they are equal but for rounding to float32."""
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        return mine.keys() == other.keys() and all(_equal(mine[key], other[key]) for key in mine)
    if isinstance(mine, list | tuple) and isinstance(other, list | tuple):
        return len(mine) == len(other) and all(map(_equal, mine, other))
    if isinstance(mine, float) and isinstance(other, float | int):
        return math.isclose(mine, other, rel_tol=_CLOSE)
    return bool(mine == other)


def _hf_name(name: str, family: Family) -> str:
    """A field's name in config.json."""
    hf = family.hf
    names = {"rope": "rope_parameters", "layer_pattern": "layer_types", "window": "sliding_window"}
    names |= {"head": "tie_word_embeddings", "activation": hf.activation, "gates": "norm_topk_prob"}
    names |= {"bias": " or ".join(hf.biases) or "bias", "mlp_dims": hf.keys.get("mlp_dim", "mlp_dims")}
    names |= {"attention_scale": "query_pre_attn_scalar"} if "query_pre_attn_scalar" in hf.defaults else {}
    return (names | hf.keys | hf.moe_keys | hf.mixer_keys).get(name) or name
