"""The values of a config.json, as the metadata of a GGUF file and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf.layout import foreign, gemma3n, metadata
from capibara.interop.gguf.layout import rope as gguf_rope
from capibara.interop.gguf.layout.family import Family as Declared
from capibara.interop.gguf.names import Family

# Name in config.json -> metadata key, without the architecture that it begins with.
FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "use_parallel_residual": "use_parallel_residual",
    **gemma3n.FIELDS,
}
_NULL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "original_max_position_embeddings")
_FLOATS = ("rms_norm_eps", "layer_norm_eps", "attn_logit_softcapping", "final_logit_softcapping")
# Every how many layers one sees the whole row, in llama.cpp.
_PERIODS = {"gemma2": 2, "gemma3_text": 6, gemma3n.MODEL_TYPE: 5, "gpt_oss": 2}
# Layers of the one model whose scores are scaled by the mean width of its heads.
_ODD_SCALE = {"gemma2": 46, "gemma3_text": 62}
_MOST_EXPERTS = 1_000_000  # of all layers: each has names of its own
_WINDOW_LOST = ("mistral", "mixtral", "phi3")
# Those of one family.
_OF_FAMILY = {gemma3n.MODEL_TYPE: ("activation_sparsity_scale",)}


def to_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a model, without the architecture that every key begins with; a value's type is the stored one.

    Warns where llama.cpp will not compute what the model does beyond some length.

    Raises:
      UserError: llama.cpp cannot compute this model, or a value is missing.
    """
    family = gguf_names.of_config(config)
    if isinstance(family, Declared):
        return metadata.write(config, family)
    _check_fixed(config, family)
    values: dict[str, Any] = {"vocab_size": config["vocab_size"]}
    derived: dict[str, Any] = {"num_key_value_heads": family.heads(config)[1], "head_dim": family.head_dim(config)}
    # GPT-2 need not say it; a mixture whose every layer has experts has none.
    wide = 4 * family.get(config, "hidden_size") if family.model_type == "gpt2" else config.get("moe_intermediate_size")
    derived["intermediate_size"] = wide
    for name in family.fields:
        value = family.get(config, name)
        value = derived.get(name) if value is None else value
        value = gemma3n.width(value) if name == "intermediate_size" else value
        if value is None and name not in _NULL:
            raise UserError(f"config.json of the {family.model_type} model has no {family.renamed.get(name, name)}")
        if value is not None:
            values[FIELDS[name]] = float(value) if name in _FLOATS else value
    if "head_dim" in family.fields:
        values["attention.value_length"] = values["attention.key_length"]
    if family.model_type != "gpt2":
        values |= gguf_rope.to_metadata(config, family)
    if family.model_type == gemma3n.MODEL_TYPE:
        values |= gemma3n.metadata(config, _layer_types(config, family))
    window = config.get("sliding_window")
    if family.model_type in _WINDOW_LOST and window and window < config["max_position_embeddings"]:
        warnings.warn(
            f"llama.cpp has no sliding window for {family.model_type} models: rows longer than {window} tokens get other "
            "answers there",
            stacklevel=2,
        )
    if family.model_type == "gemma3_text" and family.get(config, "final_logit_softcapping"):
        raise UserError("final_logit_softcapping of a gemma3_text model is not known to llama.cpp: it must be null")
    return values


def _check_fixed(config: Mapping[str, Any], family: Family) -> None:
    """Raises where the model is none that llama.cpp can compute."""
    fixed = dict(family.fixed)
    if family.model_type in _PERIODS:
        fixed |= _of_layers(config, family)
    for name, value in fixed.items():
        if config.get(name, value) not in (value, None):
            raise UserError(
                f"{name} of the {family.model_type} model is {config[name]!r}, llama.cpp computes it with {value!r}: it "
                "has no GGUF form"
            )


def _of_layers(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """What config.json says of the layers with and without a window, as llama.cpp computes them."""
    scaled = {"query_pre_attn_scalar": _scalar(config, family)} if family.model_type in _ODD_SCALE else {}
    of_each = gemma3n.of_layers(config) if family.model_type == gemma3n.MODEL_TYPE else {}
    return scaled | of_each | {"layer_types": _layer_types(config, family)}


def _scalar(config: Mapping[str, Any], family: Family) -> int:
    if config["num_hidden_layers"] == _ODD_SCALE[family.model_type]:
        return config["hidden_size"] // config["num_attention_heads"]
    return family.head_dim(config)


def _layer_types(config: Mapping[str, Any], family: Family) -> list[str]:
    period, layers = _PERIODS[family.model_type], config["num_hidden_layers"]
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]


def from_metadata(
    arch: Any, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divided: np.ndarray | None
) -> dict[str, Any]:
    """A config.json of the metadata of an architecture.

    Args:
      arch: general.architecture.
      values: the metadata whose keys begin with it, without it.
      shapes: of the tensors of the file, by their names in it, slowest dimension first.
      divided: the factors of rotary frequencies that the file has; None: it has none.

    Raises:
      UserError: the architecture is not known, or a value is missing or varies from layer to layer.
    """
    family = gguf_names.of_arch(arch, values)
    if isinstance(family, Declared):
        return metadata.read(values, shapes, divided, family)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for name in family.fields:
        value = values.get(FIELDS[name])
        if family.model_type == gemma3n.MODEL_TYPE and name == "intermediate_size":
            value = gemma3n.width(value)
        if isinstance(value, list):
            raise UserError(f"{arch}.{FIELDS[name]} varies from layer to layer: such models are not known here")
        if value is None and name not in (*_NULL, "num_key_value_heads", "head_dim"):
            raise UserError(f"the file has no {arch}.{FIELDS[name]}: it is corrupted, or no {arch} model")
        config[family.renamed.get(name, name)] = value or None if name in _NULL else value
    _check_counts(arch, config, shapes, family)
    _check_foreign(arch, values, config, family)
    heads, kv_heads = family.heads(config)
    head_dim = family.head_dim(config)
    config |= {"num_key_value_heads": kv_heads} if "num_key_value_heads" in family.fields else {}
    config |= {"head_dim": head_dim} if "head_dim" in family.fields else {}
    if config.get("n_inner") == 4 * config.get("n_embd", 0):
        config["n_inner"] = None
    config["vocab_size"] = shapes.get("token_embd.weight", (0,))[0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config |= family.fixed
    if family.model_type == gemma3n.MODEL_TYPE:
        config |= gemma3n.from_metadata(values, config)
    if family.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if family.model_type in _PERIODS:
        config |= _of_layers(config, family)
    if family.model_type != "gpt2":
        config |= gguf_rope.from_metadata(values, family, head_dim, divided)
    return config


def _check_counts(arch: Any, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], family: Family) -> None:
    """Raises where a number is corrupted so that all the tensors that it promises could not be named."""
    most = {"num_hidden_layers": len(shapes), "num_experts": max((shape[0] for shape in shapes.values()), default=0)}
    for name, largest in most.items():
        value = family.get(config, name)
        if value is not None and (type(value) is not int or not 0 < value <= largest):
            raise UserError(f"{arch}.{FIELDS[name]} is {value}, must be 1 to {largest} by the tensors of the file")

    experts = (family.get(config, "num_hidden_layers") or 1) * (family.get(config, "num_experts") or 1)
    if experts > _MOST_EXPERTS:
        raise UserError(f"{arch} says {experts:,} experts in all, must have at most {_MOST_EXPERTS:,}")


def _check_foreign(arch: Any, values: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> None:
    """Raises where the metadata say something that the family's config.json cannot, or that is not known here."""
    supported = {FIELDS[name] for name in family.fields} | gguf_rope.KEYS | {*_OF_FAMILY.get(family.model_type, ())}
    if family.model_type in _PERIODS and (pattern := values.get("attention.sliding_window_pattern", 0)) != 0:
        _check_pattern(arch, pattern, config, family)
        supported.add("attention.sliding_window_pattern")
    longest = family.get(config, "max_position_embeddings")
    foreign.check(arch, family.model_type, values, supported, longest=longest, fixed=family.fixed)


def _check_pattern(arch: Any, pattern: Any, config: Mapping[str, Any], family: Family) -> None:
    local = [kind == "sliding_attention" for kind in _layer_types(config, family)]
    if pattern not in (_PERIODS[family.model_type], local):
        raise UserError(f"{arch}.attention.sliding_window_pattern is {pattern}, must be {_PERIODS[family.model_type]}")
