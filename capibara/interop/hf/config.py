"""Converts between config.json of Hugging Face transformers and our model configurations.

Reads files of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters); writes files that suit both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf import families, gemma3n, keys, tables, wrappers
from capibara.interop.hf.families import FAMILIES
from capibara.interop.hf.layout import rope as hf_rope
from capibara.interop.hf.layout.family import LATENT_SIZES, Family, Kind
from capibara.models.api import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    Gemma3nConfig,
    LayerKind,
    Moe,
    Mtp,
    Rope,
    TransformerConfig,
)

Values = Mapping[str, Any]

# Values of a config.json without a counterpart in our configurations; they are preserved.
_CARRIED = (
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "initializer_range",
)  # fmt: skip
# Our fields that affect computation or training, but do not define the model.
_OURS_ALONE = ("dtype", "attention", "layer_loop", "quantization", "dropout_rate")


def from_hf(values: Values, *, dtype: str = "bfloat16") -> TransformerConfig:
    """The configuration of a model, from the values of its config.json.

    Args:
      values: of config.json; for a multimodal model those of its text model are used.
      dtype: compute dtype; the file names only that of the stored tensors.

    Raises:
      UserError: the architecture is unknown, or has a feature that we do not support.
    """
    values = text_part(values)
    try:
        return _from_hf(values, FAMILIES[values["model_type"]], dtype)
    except UserError:
        raise
    # Errors here are the file's fault: the code expects valid values.
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        cause = f"{type(error).__name__}: {limits.cause(error)}"
        raise UserError(f"config.json cannot be read ({cause}): copy the file again") from error


def _from_hf(values: Values, family: Family, dtype: str) -> TransformerConfig:
    if values.get("quantization_config"):
        raise UserError("config.json has a quantization_config: only tensors of f32, f16 and bf16 are supported")
    older, depth = values.get("num_hidden_layers"), values.get("num_decoder_layers")
    if "num_decoder_layers" in keys.read(family) and older is not None and depth is None:
        raise UserError(
            f"config.json has num_hidden_layers = {older} without num_decoder_layers, and transformers takes it for the encoder "
            "alone: write num_layers and num_decoder_layers"
        )
    values = {**family.defaults, **keys.canonical(values, family)}
    values = values if family.prepare is None else family.prepare(values)
    for key, allowed in family.only.items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"config.json has {key} = {values[key]!r}, capibara's {family.model_type} has {allowed[0]!r} alone"
            )
    missing = [key for key in family.keys.values() if values.get(key) is None and key not in families.OPTIONAL]
    if missing:
        raise UserError(f"config.json of a {family.model_type} has no {missing[0]}: it is cut short, or another file")
    fields = {ours: values[theirs] for ours, theirs in family.keys.items() if theirs in values} | family.fixed
    fields |= {"head": families.head(values, family), "activation": families.activation(values, family)}
    if family.kind == Kind.DECODER and "head_dim" not in fields and values.get("head_dim"):
        fields["head_dim"] = values["head_dim"]  # no key of the family's class, and read where a file has it
    if family.transform:
        fields["transform_activation"] = families.plain(values, family.transform)
    if (bias := families.bias(values, family)) is not None:
        fields["bias"] = bias
    if family.model_type in families.T5S and family.kind == Kind.ENCODER_DECODER and fields["head"] == "tied":
        fields["head_scale"] = families.head_scale(values)
    if fields.get("mlp_dim") is None:
        fields["mlp_dim"] = 4 * fields["embed_dim"]  # GPT-2's default
    try:
        return _config(values, family, fields | {"dtype": dtype})
    except UserError as error:
        raise _with_hf_names(error, values, family) from None


def _with_hf_names(error: UserError, values: Values, family: Family) -> UserError:
    """An error about fields of our configuration, with transformers' names for them."""
    if (message := str(error)).startswith("config.json"):
        return error
    names = family.keys | {"kv_heads": "num_key_value_heads", "top_k": "num_experts_per_tok"}
    if "num_heads" in names:
        names = {"head_dim": "{embed_dim} / {num_heads}".format(**names)} | names
    names |= family.moe_keys | family.mixer_keys | LATENT_SIZES
    names |= {"activation": family.activation} if family.activation else {}
    names |= {"window": "sliding_window"} | ({"num_experts": family.experts} if family.experts else {})
    if "num_layers" not in family.keys:
        names |= {"num_layers": "num_decoder_layers" if values.get("num_decoder_layers") else "num_layers"}
    others = {key: [alias for alias, of in family.aliases.items() if of == key] for key in names.values()}
    theirs = [
        f"{ours} is {' or '.join([key, *others[key]])}"
        for ours, key in names.items()
        if (ours != key or others[key]) and re.search(rf"\b{ours}\b", message)
    ]
    return UserError(f"{message} (in transformers' words {', '.join(theirs)})" if theirs else message)


def _config(values: Values, family: Family, fields: dict[str, Any]) -> TransformerConfig:
    match family.kind:
        case Kind.DECODER:
            fields |= _decoder(values, family, fields["num_layers"])
            fields |= {} if family.read is None else family.read(values)
            if family.mscale and (scale := hf_rope.mscale(values)) != 1:
                fields["attention_scale"] = fields["head_dim"] ** -0.5 * scale
            if family.mtp_key and (count := values.get(family.mtp_key)):
                fields["mtp"] = _mtp(count, family, fields["layer_pattern"][0])
            return (family.config or DecoderConfig)(**fields)
        case Kind.ENCODER:
            fields |= _layers(values, family, fields["num_layers"])
            return EncoderConfig(**fields | ({} if family.read is None else family.read(values)))
        case _:
            if "num_layers" not in fields:
                fields["num_layers"] = values.get("num_decoder_layers") or values["num_layers"]
            if family.rope:
                fields["rope"] = Rope(**hf_rope.read(values, family))
            return EncoderDecoderConfig(**fields | ({} if family.read is None else family.read(values)))


def _mtp(count: int, family: Family, first_kind: str) -> Mtp:
    """The modules that predict further tokens; those with windows follow the first layer (K-EXAONE)."""
    fixed = dict(family.mtp)
    if fixed.get("kind") == LayerKind.LOCAL and first_kind != LayerKind.LOCAL:
        del fixed["kind"]
    names = tables.NAMES[family.model_type].mtp
    if names is not None and count > names.most:
        raise UserError(f"config.json has {family.mtp_key} = {count}, must be at most {names.most} in capibara")
    return Mtp(layers=count, **fixed)


def kept_by_run(text: bytes) -> dict[str, Any]:
    """The language model's config.json that a run folder keeps from its initial weights; empty if it has none.

    Raises:
      UserError: it cannot be read.
    """
    try:
        values = limits.parse_json(text, unlimited=True)
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except (limits.Refused, ValueError) as error:
        raise UserError(f"origin/config.json cannot be read ({limits.cause(error)}): restore it") from None
    return text_part(values) if values else {}


def text_part(values: Values) -> dict[str, Any]:
    """The values of the language model only, with its model_type.

    Raises:
      UserError: the architecture is unknown.
    """
    text = wrappers.text_part(values)
    model_type, names = values.get("model_type"), values.get("architectures") or []
    model_types = (name for name in FAMILIES if name != tables.T5X_DECODER_TYPE)
    known = ", ".join([*model_types, *(f"{name} (its text)" for name in wrappers.WRAPPERS)])
    if text.get("model_type") not in FAMILIES:
        raise UserError(f"config.json has model_type {model_type!r}, must be one of {known}")
    classes = wrappers.architectures(values)
    if names and names[0] not in (*classes, families.score_architecture(FAMILIES[text["model_type"]])):
        raise UserError(
            f"config.json has architectures {names}, must be {classes[0]} for {model_type}: "
            f"the head of {names[0]} is not read, take the folder of the language model that it was made of"
        )
    return text


def longest(values: Values) -> int | None:
    """Longest row in tokens according to a config.json; None: it does not say."""
    return hf_rope.longest(text_part(values))


def to_hf(config: TransformerConfig, like: Values | None = None, *, dtype: str = "float32") -> dict[str, Any]:
    """The config.json with which transformers computes what our model does.

    Args:
      config: of our model.
      like: a config.json whose model_type is used if it fits, and whose other values (token ids, ...) are preserved.
      dtype: of the stored tensors: "float32", "bfloat16" or "float16".

    Raises:
      UserError: no architecture of transformers that we write computes this; names the unsupported fields.
    """
    like = wrappers.text_part(like or {})
    ours, best = resolved(config), None
    order = sorted(FAMILIES.values(), key=lambda family: family.model_type != like.get("model_type"))
    for family in order:
        if type(config) is not (family.config or _CLASSES[family.kind]):
            continue
        values = _written(config, family)
        different = _inexpressible_fields(values, ours, family)
        if not different:
            about = {"architectures": values.get("architectures", [family.architectures[0]])}
            about |= {"dtype": dtype, "torch_dtype": dtype}
            about |= {"model_type": family.model_type}
            values |= _sides_like(like, values, family)
            defaults = families.written_defaults(config, family)
            if like.get("model_type") != family.model_type:
                return defaults | _without_old_names(_preserved_values(like)) | values | about
            if _describes(like, config):  # keep its own form
                return defaults | values | like | about
            return defaults | _without_old_names(like) | values | about
        if best is None or len(different) < len(best[1]):
            best = (family.model_type, different)
    if best is None:
        raise UserError(
            f"no Hugging Face architecture has this model: none is of {type(config).__name__}; add a Family with this config"
        )
    nearest, fields = best
    shown = ", ".join(f"{name} = {_shown(ours.get(name))}" for name in fields)
    raise UserError(f"no Hugging Face architecture has this model: {nearest} is the nearest, without {shown}")


def _describes(like: Values, config: TransformerConfig) -> bool:
    """Whether a config.json describes our model as it is, in any version's form for T5."""
    if isinstance(config, EncoderDecoderConfig):
        return False
    try:
        return not differences(like, config)
    except UserError:
        return False


def differences(values: Values, config: TransformerConfig) -> dict[str, tuple[Any, Any]]:
    """Differences between a config.json and our configuration: field -> (ours, that of the config.json)."""
    ours, theirs = resolved(config), resolved(from_hf(values))
    names = [name for name in ours if ours[name] != theirs.get(name)]
    return {name: (ours[name], theirs.get(name)) for name in names}


def resolved(config: TransformerConfig) -> dict[str, Any]:
    """A configuration's effective fields: defaults are resolved, fields without effect on results are removed."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _OURS_ALONE}
    fields |= {"num_kv_heads": config.kv_heads, "head_dim": config.head_size}
    if fields["attention_scale"] is None:
        fields["attention_scale"] = config.head_size**-0.5
    if config.moe is not None:
        moe = fields["moe"] = {name: getattr(config.moe, name) for name in _MOE_FIELDS}
        moe["expert_dim"] = config.moe.expert_dim or config.mlp_dim
        moe["dense_layers"] = config.dense_layers
        moe["hash_layers"] = min(config.moe.hash_layers, config.num_layers)
        if not config.dense_layers:  # there are no other MLPs
            fields["mlp_dim"] = moe["expert_dim"]
        if config.moe.groups == 1:
            del moe["group_score"], moe["outside"]
        width = moe["expert_dim"] if config.moe.shared_dim is None else config.moe.shared_dim
        moe["shared_width"] = width * config.moe.shared_experts
    if isinstance(config, DecoderConfig):
        fields["value_dim"] = config.value_size
    if isinstance(config, EncoderDecoderConfig):
        fields["num_encoder_layers"] = config.encoder_layers
        fields |= {"layer_pattern": families.kinds(config)}
        if config.positions == "rope":
            fields["rope"] = _resolved_rope(config, "local" in config.kinds, "global" in config.kinds)
        if config.head != "tied":
            del fields["head_scale"]
    if fields.get("positions") != "learned" and not (
        isinstance(config, EncoderDecoderConfig) and config.positions.added
    ):
        del fields["max_length"]  # only a limit
    if isinstance(config, DecoderConfig | EncoderConfig):
        fields["transform_activation"] = config.before_head if config.transform == "dense" else None
    if isinstance(config, DecoderConfig | EncoderConfig):
        kinds = families.kinds(config)
        fields |= {"layer_pattern": kinds, "rope": _resolved_rope(config, "local" in kinds, bool(WHOLE & {*kinds}))}
        fields.pop("first_kinds", None)  # they are among these kinds
    if isinstance(config, Gemma3nConfig):
        fields |= gemma3n.resolved(config)
    if isinstance(config, DecoderConfig) and config.mtp is not None:
        fields["mtp"] = (config.mtp.layers, config.mtp.norm, config.of_mtp.kinds[0], config.of_mtp.moe is None)
    return fields


_MOE_FIELDS = (
    "num_experts", "top_k", "routing", "score", "gates", "correction", "groups", "top_groups",
    "group_score", "scale", "shared_gate", "bias", "closeness", "gate_offset", "weighted",
    "combination", "output_norm", "logit_cap", "outside", "hash_layers",
)  # fmt: skip
_CLASSES = {
    Kind.DECODER: DecoderConfig,
    Kind.ENCODER: EncoderConfig,
    Kind.ENCODER_DECODER: EncoderDecoderConfig,
}


WHOLE = {
    "global",
    "hybrid",
    "sparse",
    "compressed",
    "compressed_sparse",
}  # layers with the rotary positions of the whole row
_ROTATED = {True: LayerKind.LOCAL, False: LayerKind.GLOBAL}


def _resolved_rope(
    config: DecoderConfig | EncoderConfig | EncoderDecoderConfig, has_local: bool, has_global: bool
) -> Any:
    """The effective frequencies and magnitudes, for the kinds of layers that the model has."""
    if config.positions != "rope":
        return None
    rope = config.rope
    sizes = {local: config.attention_of(kind).rotary_size for local, kind in _ROTATED.items()}
    flags = [flag for flag, there in ((True, has_local), (False, has_global)) if there]
    lengths: tuple[int | None, ...] = (None,)
    if rope.scaling.by_length:
        assert rope.original_length is not None, "Rope sees to it"
        lengths = (None, 2 * rope.original_length, 4 * rope.original_length)
    return {
        flag: (
            [rope.frequencies(sizes[flag], local=flag, length=length).tolist() for length in lengths],
            rope.original_length if rope.scaling.by_length else None,
            rope.magnitude(local=flag),
            rope.pairs,
            rope.unscaled_tokens,
        )
        for flag in flags
    }


def _layers(values: Values, family: Family, num_layers: int) -> dict[str, Any]:
    """The layers' kinds, their window, and rotary positions."""
    pattern, window = families.read_pattern(values, family, num_layers)
    fields: dict[str, Any] = {"layer_pattern": pattern, "window": window}
    if family.rope and not values.get(family.rope_unless):
        fields["rope"] = Rope(**hf_rope.read(values, family))
    return fields


def _decoder(values: Values, family: Family, num_layers: int) -> dict[str, Any]:
    fields = _layers(values, family, num_layers)
    scalar = values.get("query_pre_attn_scalar")
    if scalar is not None and scalar != values.get("head_dim"):
        fields["attention_scale"] = scalar**-0.5
    if family.model_type == tables.T5X_DECODER_TYPE:
        tied = families.head(values, family) == "tied"
        fields |= {"logit_scale": values["d_model"] ** -0.5 if tied else 1.0}
        fields |= {"inputs_attention": values["inputs_attention"]}
    if family.model_type == "gpt_neox":
        fields["residual"] = "parallel" if values.get("use_parallel_residual", True) else "sequential"
    if family.experts:
        count = values.get(family.experts) or values.get("num_local_experts")  # the name depends on the version
        if not count:
            raise UserError(f"config.json of a {family.model_type} has no {family.experts}: it is cut short")
        normalized = values.get("norm_topk_prob", family.model_type in ("mixtral", "gpt_oss"))
        balance_loss = values.get("router_aux_loss_coef", 0.001)
        if not values.get("output_router_logits", True):  # then router_aux_loss_coef is unused, as in published gpt-oss
            balance_loss = 0.0 if family.model_type == "gpt_oss" else balance_loss
        experts = {"num_experts": count, "top_k": values["num_experts_per_tok"], "balance_loss": balance_loss}
        experts |= {"gates": "normalized" if normalized else "scores"}
        experts |= {"bias": "all" if family.model_type == "gpt_oss" else "mlp"}
        experts |= {ours: values[theirs] for ours, theirs in family.moe_keys.items() if values.get(theirs) is not None}
        experts |= family.moe | ({} if family.read_moe is None else family.read_moe(values))
        fields["moe"] = Moe(**experts)
    return fields


def _written(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """The family's values closest to the configuration; `_inexpressible_fields` checks whether they equal it."""
    values = {theirs: getattr(config, ours) for ours, theirs in family.keys.items()}
    values |= {key: allowed[0] for key, allowed in family.only.items()}
    values |= {family.keys[name]: getattr(config, field) for name, field in _SIZES if name in family.keys}
    if "head_dim" in family.read_keys and config.head_size * config.num_heads != config.embed_dim:
        values["head_dim"] = config.head_size
    values |= families.write_head(config) | families.write_activation(config, family)
    if config.head == "score" and (name := families.score_architecture(family)):
        values["architectures"] = [name]
    if isinstance(config, EncoderDecoderConfig):
        if family.sides:
            return _of_sides(values, config, family)
        values |= {} if family.write is None else family.write(config)
        of_t5 = {"num_layers": config.encoder_layers, "num_decoder_layers": config.num_layers}
        return values | (
            {family.keys["num_encoder_layers"]: config.encoder_layers} if "num_layers" in family.keys else of_t5
        )
    if not isinstance(config, DecoderConfig | EncoderConfig):
        return values
    values |= families.write_pattern(config, family) | hf_rope.write(config, family)
    values |= families.write_bias(config, family)
    values |= {} if family.write is None else family.write(config)
    if "query_pre_attn_scalar" in family.defaults:
        scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
        values["query_pre_attn_scalar"] = round(scale**-2)
    if isinstance(config, DecoderConfig) and family.model_type == tables.T5X_DECODER_TYPE:
        values["inputs_attention"] = str(config.inputs_attention)
    if family.mtp_key:
        values[family.mtp_key] = len(config.mtp_windows)
    if family.model_type == "gpt_neox":
        values["use_parallel_residual"] = config.residual == "parallel"
    if family.experts and config.moe is not None:
        values |= {family.experts: config.moe.num_experts, "num_experts_per_tok": config.moe.top_k}
        values |= {"router_aux_loss_coef": config.moe.balance_loss}
        values |= {theirs: getattr(config.moe, ours) for ours, theirs in family.moe_keys.items()}
        of_experts = family.moe_keys.get("expert_dim", family.keys["mlp_dim"])
        values[of_experts] = config.moe.expert_dim or config.mlp_dim
        if family.model_type == "gpt_oss":
            values["output_router_logits"] = config.moe.balance_loss > 0
        elif "norm_topk_prob" in family.defaults:
            values["norm_topk_prob"] = config.moe.gates == "normalized"
    return values


def _of_sides(values: Values, config: EncoderDecoderConfig, family: Family) -> dict[str, Any]:
    """The values in an object for each stack; those of the head are outside."""
    assert family.write is not None, "it gives what the stacks have"
    outside = families.write_head(config)
    both = {key: value for key, value in values.items() if key not in outside}
    both |= hf_rope.write(config, family) | families.write_bias(config, family)
    return outside | {side: both | of_side for side, of_side in family.write(config).items()}


def _sides_like(like: Values, values: Values, family: Family) -> dict[str, Any]:
    """The objects of a family's stacks with what those of another config.json, or the file itself, have beside them."""
    is_same = like.get("model_type") == family.model_type
    objects = {side: _without_old_names(like.get(side) or {}) if is_same else {} for side in family.sides}
    return {side: _preserved_values(like) | objects[side] | values[side] for side in family.sides}


_SIZES = (("num_kv_heads", "kv_heads"), ("head_dim", "head_size"))


def _inexpressible_fields(values: Values, ours: Mapping[str, Any], family: Family) -> list[str]:
    """Fields that the family's values cannot express; none: they equal the configuration."""
    if family.divides and ours["embed_dim"] % ours["num_heads"]:
        return ["embed_dim", "num_heads"]  # transformers requires a multiple, whatever head_dim is
    try:
        got = resolved(from_hf({**values, "model_type": family.model_type}))
    except (UserError, KeyError):
        return sorted(ours)  # not convertible at all
    return sorted(name for name in ours.keys() | got.keys() if ours.get(name) != got.get(name))


def _preserved_values(like: Values) -> dict[str, Any]:
    return {key: like[key] for key in _CARRIED if key in like}


def _without_old_names(values: Values) -> dict[str, Any]:
    """Removes old names of values that are written under new ones."""
    return {key: value for key, value in values.items() if key not in families.OTHER_NAMES}


def _shown(value: object) -> str:
    return repr(str(value) if isinstance(value, str) else value)[:60]
