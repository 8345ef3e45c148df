"""Mixtures of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.core.types import UserError
from capibara.interop.gguf.catalog.dense import ATTENTION, PAIRED, SCALES, SWIGLU
from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes, Window, windowed
from capibara.interop.gguf.layout.tensors import Change
from capibara.models.api import DecoderConfig

_NONE: frozenset[str] = frozenset()
_WIDTH = {"expert_dim": "expert_feed_forward_length"}
_SHARED_WIDTH = "expert_shared_feed_forward_length"
# Experts after the first layers, beside shared ones, whose choice is corrected (DeepSeek-V3).
DEEPSEEK = _WIDTH | {
    "first_dense": "leading_dense_block_count",
    "shared_experts": "expert_shared_count",
    "scale": "expert_weights_scale",
    "gates": "expert_weights_norm",
}
GROUPS = {"groups": "expert_group_count", "top_groups": "expert_group_used_count"}
SIGMOID = {"expert_gating_func": 2}
_NORMALIZED, _SCORES = {"gates": "normalized"}, {"gates": "scores"}
_ROUTED_EVERY = 4  # a constant of llama.cpp


def _shared_width(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None, "the families have experts"
    width = config.moe.shared_dim or config.moe.expert_dim or config.mlp_dim
    return {_SHARED_WIDTH: width * config.moe.shared_experts}


def with_shared(config: DecoderConfig) -> dict[str, Any]:
    """A `write` of families that llama.cpp computes with shared experts alone."""
    if config.moe is None or not config.moe.shared_experts:
        raise UserError("n_shared_experts is 0, llama.cpp computes no model of the family without: it has no GGUF form")
    return {}


def _equal_widths(config: DecoderConfig) -> dict[str, Any]:
    return _shared_width(config) | {"expert_feed_forward_length": config.mlp_dim}


def _interleaved(config: DecoderConfig) -> dict[str, Any]:
    return _shared_width(config) | {"interleave_moe_layer_step": 1}


def _head_norms(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {"qk_norm": "head" if "blk.0.attn_q_norm.weight" in shapes else "none"}


def _keys_of_all_heads(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {"num_kv_heads": fields["num_heads"]}


def _afmoe_layers(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    """Every fourth layer has no rotary positions, whatever the file lists."""
    pattern = [
        "unrotated" if (layer + 1) % _ROUTED_EVERY == 0 else "local" for layer in range(int(fields["num_layers"]))
    ]
    if list(fields.get("layer_pattern", ())) != pattern:
        raise UserError(
            "layer_types of the afmoe model must have full_attention in every fourth layer alone, llama.cpp computes it so: it "
            "has no GGUF form"
        )
    return {}


_GRANITE = Family(
    model_type="granitemoe",
    arch="granitemoe",
    keys=SCALES,
    inverse=("logit_scale",),
    fixed=SWIGLU,
    moe=_NORMALIZED,
    biases=ATTENTION,
    factors=True,
    changes=PAIRED,
    places={
        "block_sparse_moe.input_linear": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "shared_mlp.input_linear": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    },
)

FAMILIES = (
    Family(
        model_type="qwen2_moe",
        arch="qwen2moe",
        moe_keys=_WIDTH | {"shared_dim": _SHARED_WIDTH},
        fixed=SWIGLU | {"head": "separate"},
        moe=_SCORES,
        square=True,
        changes={"shared_expert_gate": Change.ROW},
    ),
    Family(
        model_type="olmoe",
        arch="olmoe",
        fixed=SWIGLU | {"head": "separate"},
        moe=_SCORES,
        biases=_NONE,
        square=True,
        read=_keys_of_all_heads,
    ),
    _GRANITE,
    dataclasses.replace(
        _GRANITE,
        model_type="granitemoeshared",
        when=_SHARED_WIDTH,
        moe_keys={"shared_width": _SHARED_WIDTH},
    ),
    Family(
        model_type="glm4_moe",
        arch="glm4moe",
        moe_keys=DEEPSEEK | GROUPS,
        fixed=SWIGLU,
        nextn=True,
        constants=SIGMOID,
        read=_head_norms,
    ),
    Family(
        model_type="dots1",
        arch="dots1",
        moe_keys=DEEPSEEK | GROUPS,
        fixed=SWIGLU | {"head": "separate"},
        constants=SIGMOID,
        read=_keys_of_all_heads,
        write=with_shared,
    ),
    Family(
        model_type="ernie4_5_moe",
        arch="ernie4_5-moe",
        moe_keys={name: key for name, key in DEEPSEEK.items() if name not in ("gates", "scale")},
        fixed=SWIGLU,
        biases=_NONE,
        changes={"e_score_correction": Change.ROW},
        ignored=(_SHARED_WIDTH,),
        write=_interleaved,
    ),
    Family(
        model_type="hunyuan_v1_moe",
        arch="hunyuan-moe",
        moe_keys={"shared_width": _SHARED_WIDTH},
        fixed=SWIGLU,
        ignored=("expert_shared_count",),
        write=_equal_widths,
    ),
    Family(
        model_type="exaone_moe",
        arch="exaone-moe",
        moe_keys=DEEPSEEK | GROUPS,
        fixed=SWIGLU,
        biases=_NONE,
        window=Window.LISTED,
        factors=True,
        nextn=True,
        constants=SIGMOID,
        ignored=(_SHARED_WIDTH,),
        read=windowed,
        write=_shared_width,
    ),
    Family(
        model_type="minimax_m2",
        arch="minimax-m2",
        moe_keys=_WIDTH,
        fixed=SWIGLU,
        biases=_NONE,
        constants=SIGMOID,
    ),
    Family(
        model_type="afmoe",
        arch="afmoe",
        moe_keys=DEEPSEEK | GROUPS,
        fixed=SWIGLU | {"embedding_scale": "sqrt_dim"},
        window=Window.LISTED,
        constants=SIGMOID,
        renamed={"mlp.expert_bias": "mlp.expert_bias.bias"},
        read=_afmoe_layers,
    ),
)
