"""Checks types and ranges of a config.json's values, before any of them determines a size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError

LAYERS = 4096
_LENGTH = 2**31 - 1
# Upper limits: well above every existing model, and small enough to iterate over.
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "word_embed_proj_dim"), 2**20),
    **dict.fromkeys(("dim", "embedding_size"), 2**20),
    "hidden_dim": 2**22,
    "intermediate_size_mlp": 2**22,
    "interleave_moe_layer_step": LAYERS,
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"), 2**22
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_key_value_heads",
            "num_kv_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
        ),
        2**14,
    ),
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "n_group", "topk_group"), 2**14),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "shared_expert_intermediate_size"), 2**22),
    "shared_intermediate_size": 2**22,
    **dict.fromkeys(("moe_num_experts", "moe_k", "moe_topk", "moe_num_shared_experts", "num_shared_experts"), 2**14),
    **dict.fromkeys(("kv_n_heads", "moe_top_k"), 2**14),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), LAYERS),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 2**14),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "global_attn_every_n_layers"), LAYERS),
    **dict.fromkeys(("head_dim", "d_kv", "num_experts", "num_local_experts", "num_experts_per_tok"), 2**14),
    **dict.fromkeys(("type_vocab_size", "task_type_vocab_size", "relative_attention_num_buckets"), 2**16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 2**24),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 2**20),
    **dict.fromkeys(("num_kv_shared_layers", "global_attn_every_n_layers", "decoder_sparse_step"), LAYERS),
    **dict.fromkeys(("num_nextn_predict_layers", "mtp_num_hidden_layers"), LAYERS),
    "altup_num_inputs": 2**10,
    **dict.fromkeys(("max_relative_positions", "position_buckets"), 2**20),
    "attention_head_size": 2**14,
    "rotary_dim": 2**14,
    "num_ln_in_parallel_attn": 2,
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "sliding_window", "window_size", "local_attention"),
        _LENGTH,
    ),
    **dict.fromkeys(("attention_chunk_size", "floor_scale", "local_radius"), _LENGTH),
    **dict.fromkeys(("relative_attention_max_distance", "original_max_position_embeddings"), _LENGTH),
}
_NUMBERS = (
    "rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "rotary_emb_base",
    "rope_local_base_freq", "global_rope_theta", "local_rope_theta",
    "rotary_pct", "partial_rotary_factor", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
    "router_aux_loss_coef", "initializer_range", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "attention_factor", "max_window_layers", "swiglu_alpha", "swiglu_limit",
    "altup_coef_clip", "logit_scale", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
    "clip_qkv", "alpha", "llama_4_scaling_beta", "softmax_scale", "routed_scaling_factor", "moe_norm_min",
    "short_mscale", "long_mscale", "router_jitter_noise", "route_scale",
    "attn_scale", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
    "ssm_in_multiplier", "ssm_out_multiplier", "full_attn_alpha_factor", "full_attn_beta_factor",
    "linear_attn_alpha_factor", "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor",
)  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_TEXTS = (
    "model_type", "hidden_act", "hidden_activation", "activation_function", "feed_forward_proj", "afn", "activation",
    "rope_type", "type",
    "position_embedding_type", "classifier_activation", "norm_rel_ebd",
)  # fmt: skip
_INNER = (
    "rope_parameters",
    "rope_scaling",
    "full_attention",
    "sliding_attention",
    "text_config",
    "attn_config",
    "ffn_config",
    "encoder",
    "decoder",
)
_LISTS = ("architectures", "layer_types", "mlp_layer_types")
_NUMBER_LISTS = ("no_rope_layers", "layer_rope_theta", "moe_layers", "mlp_only_layers")
_OF_EACH_LAYER = {  # keys that may be lists, in files of these families
    "gemma3n_text": ("intermediate_size", "activation_sparsity_pattern"),
    "hunyuan_v1_moe": ("moe_intermediate_size", "moe_topk", "num_experts_per_tok"),
}


def check(values: Mapping[str, Any]) -> None:
    """Checks the values of a config.json that we use, including nested objects.

    Raises:
      UserError: a value has a type or a size that no model has.
    """
    model_type = values.get("model_type")
    of_each = _OF_EACH_LAYER.get(model_type, ()) if isinstance(model_type, str) else ()
    for key in of_each:
        _check_layers(key, values.get(key))
    for key, most in _SIZES.items():
        value = None if key in of_each and isinstance(values.get(key), list) else values.get(key)
        least = 0 if most == _LENGTH and key != "sliding_window" else -most  # our configurations check the rest by name
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise _wrong(
                key, value, f"an integer from {least} to {most:,}" if least == 0 else f"an integer of at most {most:,}"
            )
    for key in _NUMBERS:
        value = values.get(key)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1e18):
            raise _wrong(key, value, "a finite number of at least 0")
    for key in _IDS:
        value = values.get(key)
        ids = value if isinstance(value, list) else [value]
        if len(ids) > LAYERS or not all(item is None or type(item) is int and abs(item) <= _LENGTH for item in ids):
            raise _wrong(key, value, "a token's number")
    for key in _TEXTS:
        if not isinstance(values.get(key), str | None):
            raise _wrong(key, values[key], "a name")
    for key in _LISTS:
        value = values.get(key)
        if value is not None and not (_is_short(value) and all(isinstance(item, str) for item in value)):
            raise _wrong(key, value, f"a list of at most {LAYERS} names")
    for key in _NUMBER_LISTS:
        value = values.get(key)
        if value is not None and not (
            _is_short(value) and all(type(item) in (int, float) and 0 <= item <= 1e18 for item in value)
        ):
            raise _wrong(key, value, f"a list of at most {LAYERS} numbers of at least 0")
    for key in _INNER:
        value = values.get(key)
        if isinstance(value, Mapping):
            check(value)
        elif key == "text_config" and value is not None:
            raise _wrong(key, value, "an object")


def _check_layers(key: str, value: object) -> None:
    """Checks a list with a number for every layer.

    Raises:
      UserError: it is not such a list.
    """
    if not isinstance(value, list):
        return
    kinds, most = ((int, float), 1) if key == "activation_sparsity_pattern" else ((int,), _SIZES[key])
    if len(value) > LAYERS or not value or not all(type(item) in kinds and 0 <= item <= most for item in value):
        raise _wrong(key, value, f"a list of at most {LAYERS} numbers up to {most:,}")


def _is_short(value: object) -> bool:
    return isinstance(value, list) and len(value) <= LAYERS


def _wrong(key: str, value: object, must: str) -> UserError:
    return UserError(f"config.json has {key} = {limits.shortened(value)}, must be {must}: copy the file again")
