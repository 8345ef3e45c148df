"""Derives config.json of a MaxText checkpoint from the settings of its run and the shapes of its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.maxtext.names import Block
from capibara.interop.maxtext.settings import Setting, flag, number, whole

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}  # jax.nn.gelu is the approximation by tanh
_GEMMA3 = ("gemma3-4b", "gemma3-12b", "gemma3-27b")
_EMBEDDING, _OUTPUT, _ATTENTION = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn."
# LLaMARotaryEmbedding has these numbers, whatever the settings say.
_LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def interleaved(settings: Mapping[str, Setting]) -> bool:
    """Whether the two halves of a head that are rotated together alternate, as by LLaMARotaryEmbedding."""
    return str(settings["model_name"]).startswith("llama3.1") or settings.get("rope_type") == "llama3.1"


def of_settings(
    block: Block, settings: Mapping[str, Setting], shapes: Mapping[str, Shape], path: str
) -> dict[str, Any]:
    """The config.json of a checkpoint.

    Args:
      block: its decoder block.
      settings: of its run, with head_dim of the arrays; what is absent has the value of base.yml.
      shapes: of the tensors, by Hugging Face's names.
      path: of the checkpoint, for errors.

    Raises:
      UserError: a tensor is missing, or the settings are of a model that cannot be read.
    """
    head = whole(settings, "head_dim", 128)
    query, key = (_dims(shapes, f"{_ATTENTION}{name}_proj.weight", path) for name in "qk")
    vocab, hidden = _dims(shapes, _EMBEDDING, path)
    result: dict[str, Any] = {
        "model_type": block.model_type,
        "architectures": [block.architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers.")),
        "num_attention_heads": query[0] // head,
        "num_key_value_heads": key[0] // head,
        "head_dim": head,
        "rms_norm_eps": _epsilon(block, settings),
        "rope_theta": float(number(settings, "rope_max_timescale", 10_000)),
        "max_position_embeddings": max(
            whole(settings, name, 2048) for name in ("max_position_embeddings", "max_target_length")
        ),
        "tie_word_embeddings": _OUTPUT not in shapes,
        "attention_bias": f"{_ATTENTION}q_proj.bias" in shapes,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    activation = _activation(settings)
    result |= {"hidden_act": activation} | ({"hidden_activation": activation} if block.offset else {})
    result |= _intermediate(block, settings, shapes, path)
    _check_sizes(block, settings, result)
    return result | _rotation(block, settings) | _pattern(block, settings, result)


def _check_sizes(block: Block, settings: Mapping[str, Setting], config: Mapping[str, Any]) -> None:
    """Whether config.yml is of a model of the arrays' sizes: the last layers may be missing, or the file may be another run's."""
    experts = config.get("num_local_experts", config.get("num_experts"))
    sizes = {
        "emb_dim": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "num_query_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "num_decoder_layers": config["num_hidden_layers"] // (2 if block.model_type == "gemma2" else 1),  # pairs
    } | ({} if experts is None else {"num_experts": experts})
    scaled = settings.get("global_parameter_scale", 1) != 1  # multiplies what begins with base_
    for name, size in sizes.items():
        for key in (name,) if scaled else (name, f"base_{name}"):
            if settings.get(key) is not None and whole(settings, key, size) != size:
                raise UserError(
                    f"config.yml has {key} = {settings[key]}, the arrays have {size}: copy the missing files, or the "
                    "config.yml of this run"
                )


def _epsilon(block: Block, settings: Mapping[str, Setting]) -> float:
    value = float(number(settings, "normalization_layer_epsilon", 1e-5))
    if block.offset and value != 1e-6:
        raise UserError(
            f"config.yml has normalization_layer_epsilon = {value}, must be 1e-6: MaxText's layers of {block.model_type} "
            "have 1e-6 whatever it says, and one model cannot have both"
        )
    return value


def _intermediate(
    block: Block, settings: Mapping[str, Setting], shapes: Mapping[str, Shape], path: str
) -> dict[str, Any]:
    dense, expert = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.{}.experts.0.{}.weight"
    if "{e}" not in "".join(block.names.values()):
        return {"intermediate_size": _dims(shapes, dense, path)[0]}
    names = ("block_sparse_moe", "w1") if block.model_type == "mixtral" else ("mlp", "gate_proj")
    size = _dims(shapes, expert.format(*names), path)[0]
    count = len([name for name in shapes if name.startswith("model.layers.0.") and name.endswith(f"{names[1]}.weight")])
    chosen = whole(settings, "num_experts_per_tok", 1)
    if chosen > count:
        raise UserError(f"config.yml has num_experts_per_tok = {chosen}, the arrays have {count} experts")
    if block.model_type == "mixtral":
        return {
            "intermediate_size": size,
            "num_local_experts": count,
            "num_experts_per_tok": chosen,
            "sliding_window": None,
        }
    # The softmax is over the chosen experts, so that their weights sum to 1 with norm_topk_prob or without.
    return {
        "intermediate_size": size,
        "moe_intermediate_size": size,
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rotation(block: Block, settings: Mapping[str, Setting]) -> dict[str, Any]:
    kind, factor = settings.get("rope_type", "default"), number(settings, "rope_linear_scaling_factor", 1)
    scaled = interleaved(settings) or (factor != 1 and block.model_type != "gemma3_text")
    if scaled and block.model_type in ("gemma3_text", "olmo3"):
        raise UserError(
            f"config.yml has rope_type = {limits.shortened(kind)} and rope_linear_scaling_factor = {factor}: MaxText applies "
            f"them to the layers with a window, too, which {block.model_type} does not"
        )
    if interleaved(settings):
        return {"rope_scaling": _LLAMA31} if flag(settings, "rope_use_scale", True) else {}
    if kind == "default":
        return {} if factor == 1 else {"rope_scaling": {"rope_type": "linear", "factor": float(factor)}}
    raise UserError(
        f"config.yml has rope_type = {limits.shortened(kind)}, must be default or llama3.1: MaxText applies yarn to the layers with "
        "a window, too, which the families that are read here do not"
    )


def _pattern(block: Block, settings: Mapping[str, Setting], config: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, caps and the queries' factor."""
    caps = {
        "attn_logit_softcapping": _number_or(0, settings, "attn_logits_soft_cap"),
        "final_logit_softcapping": _number_or(0, settings, "final_logits_soft_cap"),
    }
    cycle = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}.get(block.model_type)
    if cycle is None:
        if any(caps.values()):
            raise UserError(f"config.yml has soft caps ({caps}), which {block.model_type} has not: they cannot be read")
        return {"sliding_window": None} if block.model_type in ("mistral", "qwen2", "qwen3", "qwen3_moe") else {}
    layers = range(config["num_hidden_layers"])
    kinds = ["full_attention" if i % cycle == cycle - 1 else "sliding_attention" for i in layers]
    result = {"sliding_window": whole(settings, "sliding_window_size", 0), "layer_types": kinds}
    local = _number_or(-1, settings, "local_rope_max_timescale")
    if local is not None and block.model_type != "gemma3_text":
        raise UserError(f"config.yml has local_rope_max_timescale, which {block.model_type} has not: it cannot be read")
    if block.model_type == "olmo3":
        return result
    scalar = config["head_dim"]
    if block.model_type == "gemma3_text":
        result["rope_local_base_freq"] = config["rope_theta"] if local is None else float(local)
        if settings["model_name"] not in _GEMMA3:
            raise UserError(
                f"config.yml has model_name = {limits.shortened(settings['model_name'])}, must be one of {', '.join(_GEMMA3)}: "
                "it decides the factor of the queries"
            )
        if settings["model_name"] == "gemma3-27b":
            hidden, heads = (
                whole(settings, f"base_{name}", config[ours])
                for name, ours in (("emb_dim", "hidden_size"), ("num_query_heads", "num_attention_heads"))
            )
            scalar = hidden // heads
    return result | caps | {"query_pre_attn_scalar": scalar}


def _activation(settings: Mapping[str, Setting]) -> str:
    value = settings.get("mlp_activations", ["silu", "linear"])
    if isinstance(value, list) and len(value) == 2 and value[0] in _ACTIVATIONS and value[1] == "linear":
        return _ACTIVATIONS[str(value[0])]
    names = ", ".join(f"[{name}, linear]" for name in _ACTIVATIONS)
    raise UserError(f"config.yml has mlp_activations = {limits.shortened(value)}, must be one of {names}")


def _number_or(absent: int, settings: Mapping[str, Setting], name: str) -> float | None:
    """A positive number; None: it is null or `absent`, which stand for none."""
    value = settings.get(name)
    return None if value is None or (value == absent and value is not False) else number(settings, name, absent)


def _dims(shapes: Mapping[str, Shape], name: str, path: str) -> tuple[int, int]:
    shape = shapes.get(name)
    if shape is None or len(shape) != 2 or 0 in shape:
        raise UserError(
            f"{path} has no matrix for {name}: it is incomplete, or of another decoder_block than config.yml says"
        )
    return shape[0], shape[1]
