"""Mixtures with sigmoid scores, whose layers with a window alone have rotary positions.

AFMoE (Arcee 2025) has norms on both sides and gates of attention, Kolibri (Aleph Alpha 2026) these norms and a correction of
logits, Flint (Recursive 2026) sinks.
"""

from __future__ import annotations

import re
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.dense.glm import OUTPUT_NORMS as GLM4_NORMS
from capibara.interop.hf.layout.family import (
    ATTENTION_BIAS,
    KEYS,
    SILU,
    Family,
    Values,
    expert_layers,
    last_of,
    typed,
)
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    DEEPSEEK_EXPERTS,
    FIRST_MLP,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    QWEN_EXPERTS,
    SINKS,
    A,
    L,
    Names,
    renamed,
    rows,
    shared_experts,
    without,
)
from capibara.models.api import DecoderConfig, TransformerConfig

_AFMOE = (
    without(LLAMA, ".mlp.", "post_attention_layernorm")
    + ATTENTION_BIASES
    + QK_NORM
    + rows(
        [
            (L + "self_attn.gate_proj.weight", "nh d", A + "gate"),
            (L + "post_attention_layernorm.weight", "d", "layers/attention_post_norm/scale"),
            (L + "pre_mlp_layernorm.weight", "d", "layers/mlp_norm/scale"),
            (L + "post_mlp_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
        ],
        {A + "gate": "ldnh"},
    )
    + renamed(
        DEEPSEEK_EXPERTS,
        ("mlp.gate.weight", "mlp.router.gate.weight"),
        ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
    )
)


def _prepare(values: Values) -> Values:
    every = values["global_attn_every_n_layers"]
    if not every or every < 1:
        raise UserError(
            f"config.json has global_attn_every_n_layers = {every}, must be at least 1: copy the file again"
        )
    values = last_of(every)(values)
    return _with_window(values) if "sliding_attention" in values["layer_types"] else values


def _with_window(values: Values) -> Values:
    """The values, which must have a window."""
    if values.get("sliding_window") is None:
        raise UserError("config.json has sliding_window = null, must be a number of at least 1: copy the file again")
    return values


def _read(values: Values) -> dict[str, Any]:
    """Layers without a window have no rotary positions, even if no layer has a window."""
    scale = {"embedding_scale": "sqrt_dim" if values["mup_enabled"] else "none"}
    return scale | ({"layer_pattern": ("unrotated",)} if values.get("sliding_window") is None else {})


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    return {"mup_enabled": config.embedding_scale == "sqrt_dim"}


# Of the classes of Kolibri and Flint, which need one even if no layer has it.
_WINDOW = {"sliding_window": 513}


def _write_window(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    return _WINDOW if config.window is None else {}


_WINDOWED: dict[str, Any] = dict(
    window="types",
    kinds={"full_attention": "unrotated", "sliding_attention": "local"},
    experts="num_experts",
)
_SIGMOID = {"score": "sigmoid", "shared_experts": 1}
_EXPERT_SIZES = {"expert_dim": "moe_intermediate_size", "shared_dim": "shared_expert_intermediate_size"}
_KOLIBRI_NAMES = (
    (".mlp.gate.e_score_correction_bias", ".moe.router.expert_bias"),
    (".post_self_attn_layernorm.", ".post_attn_norm."),
    (".post_mlp_layernorm.", ".post_ffn_norm."),
)
_KOLIBRI = renamed(without(LLAMA, ".mlp.") + QK_NORM + GLM4_NORMS + DEEPSEEK_EXPERTS[len(FIRST_MLP) :], *_KOLIBRI_NAMES)

_SINKS = (".self_attn.sinks", ".self_attn.softmax_offset")  # in transformers' memory, and in files
_FLINT = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + QK_NORM
    + FIRST_MLP
    + QWEN_EXPERTS
    + shared_experts("mlp.shared_expert")
    + renamed(SINKS, _SINKS)
)


def _read_flint_moe(values: Values) -> dict[str, Any]:
    every, dense, count = values["decoder_sparse_step"], values["mlp_only_layers"], values["num_hidden_layers"]
    if not every or every < 1:
        raise UserError(f"config.json has decoder_sparse_step = {every}, must be at least 1: try 1")
    sparse = [layer not in dense and (layer + 1) % every == 0 for layer in range(count)]
    return expert_layers(sparse, f"mlp_only_layers = {str(dense)[:60]} and decoder_sparse_step = {every}")


def _prepare_flint(values: Values) -> Values:
    """The first two layers, every fourth one and the last one have no window where the file does not say."""
    last = (values.get("num_hidden_layers") or 0) - 1
    values = typed(_with_window(values), lambda layer: layer < 2 or layer % 4 == 1 or layer == last)
    return {**values, "mlp_only_layers": [0, 1]} if values.get("mlp_only_layers") is None else values


def _write_flint(config: TransformerConfig) -> dict[str, Any]:
    return _write_window(config) | {"mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1}


FAMILIES = (
    (
        Family(
            model_type="afmoe",
            architectures=("AfmoeForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "head", "norm_placement": "sandwich", "attention_gate": "sigmoid"},
            defaults=SILU
            | {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4}
            | {"moe_intermediate_size": 1408, "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6}
            | {"num_shared_experts": 2, "route_scale": 1.0, "mup_enabled": False},
            biases=ATTENTION_BIAS,
            moe={"score": "sigmoid", "gates": "normalized", "correction": "expert"},
            moe_keys={"expert_dim": "moe_intermediate_size", "first_dense": "num_dense_layers"}
            | {"shared_experts": "num_shared_experts", "scale": "route_scale"},
            prepare=_prepare,
            read=_read,
            write=_write,
            **_WINDOWED,
        ),
        Names(_AFMOE, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="kolibri1",
            architectures=("Kolibri1ForCausalLM",),
            keys=KEYS | {"mlp_dim": "moe_intermediate_size"},
            fixed={"qk_norm": "head", "norm_placement": "sandwich"},
            defaults=SILU
            | _WINDOW
            | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 384, "num_experts_per_tok": 6}
            | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": False},
            aliases={"num_local_experts": "num_experts"},
            moe=_SIGMOID | {"correction": "logit"},
            moe_keys=_EXPERT_SIZES,
            prepare=lambda values: last_of(5)(_with_window(values)),
            write=_write_window,
            **_WINDOWED,
        ),
        Names(_KOLIBRI, (*LLAMA_LIKE[0], *((re.escape(old), new) for old, new in _KOLIBRI_NAMES)), LLAMA_LIKE[1]),
    ),
    (
        Family(
            model_type="flint",
            architectures=("FlintForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "head", "attention_sinks": "head"},
            defaults=SILU
            | _WINDOW
            | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 6}
            | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024, "norm_topk_prob": True}
            | {"decoder_sparse_step": 1, "router_aux_loss_coef": 0.0005},
            biases=ATTENTION_BIAS,
            moe=_SIGMOID,
            moe_keys=_EXPERT_SIZES,
            read_moe=_read_flint_moe,
            read_keys=("mlp_only_layers",),
            prepare=_prepare_flint,
            write=_write_flint,
            **_WINDOWED,
        ),
        Names(_FLINT, (*LLAMA_LIKE[0], (re.escape(_SINKS[0]), _SINKS[1])), LLAMA_LIKE[1]),
    ),
)
