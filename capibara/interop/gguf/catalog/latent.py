"""Multi-head latent attention (DeepSeek-V2 2024, arXiv:2405.04434)."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.interop.gguf.catalog.dense import SWIGLU
from capibara.interop.gguf.catalog.experts import DEEPSEEK, GROUPS, SIGMOID, with_shared
from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes
from capibara.interop.gguf.layout.tensors import Change, Take
from capibara.models.api import DecoderConfig

_NONE: frozenset[str] = frozenset()
_LITE = (26, 27)  # layers of models that llama.cpp takes for DeepSeek-V2-Lite


def _by_heads(config: DecoderConfig) -> dict[str, tuple[Take, ...]]:
    """The part of every head that yields keys, and the one that yields values."""
    assert config.latent is not None, "the families have latent attention"
    keys = config.head_size - config.latent.rotary_dim
    rows = np.arange(config.num_heads * (keys + config.latent.value_dim)).reshape(config.num_heads, -1)
    return {
        "kv_b_proj": (
            Take("attn_k_b.weight", rows[:, :keys].ravel(), change=Change.GROUPS_SWAPPED),
            Take("attn_v_b.weight", rows[:, keys:].ravel(), change=Change.GROUPS),
        )
    }


def _constraints(config: DecoderConfig) -> dict[str, Any]:
    assert config.latent is not None, "the families have latent attention"
    if config.latent.query_rank is not None and config.num_layers in _LITE:
        raise UserError(
            f"q_lora_rank of a model of {config.num_layers} layers is {config.latent.query_rank}, llama.cpp computes it with none: "
            "it has no GGUF form"
        )
    return with_shared(config)


def _sigmoid(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    if "expert_gating_func" not in values:
        raise UserError(
            "deepseek2.expert_gating_func is missing, must be 2: llama.cpp computes softmax scores without it, deepseek_v3 models "
            "have others: take another file"
        )
    return {}


_COMMON: dict[str, Any] = dict(
    arch="deepseek2", fixed=SWIGLU, biases=_NONE, latent=True, takes=_by_heads, write=_constraints
)
FAMILIES = (
    Family(
        model_type="deepseek_v2",
        moe_keys={name: key for name, key in DEEPSEEK.items() if name != "gates"},
        constants={"expert_gating_func": 1, "expert_weights_norm": False},
        **_COMMON,
    ),
    Family(
        model_type="deepseek_v3",
        moe_keys=DEEPSEEK | GROUPS,
        constants=SIGMOID,
        nextn=True,
        read=_sigmoid,
        **_COMMON,
    ),
)
