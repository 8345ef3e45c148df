"""Command A's mixtures of experts (Cohere 2026): Command R7B's parallel branches with experts after the first layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.dense.cohere import COHERE, COHERE2
from capibara.interop.hf.catalog.experts.glm import read_mlp_types, write_mlp_types
from capibara.interop.hf.layout.family import KEYS, Values, shortest
from capibara.interop.hf.layout.rows import DEEPSEEK_EXPERTS, LLAMA_LIKE, Names, without
from capibara.models.api import DecoderConfig, TransformerConfig

_PREFIX = "prefix_dense_sliding_window_pattern"
_ROTATES_DENSE = 1  # the pattern of the first layers with which those without a window have rotary positions
_CHOICES = {
    "expert_selection_fn": ("softmax", "sigmoid"),
    "shared_expert_combination_strategy": ("average", "sum"),
    "layer_types": ("full_attention", "sliding_attention"),
}


def _prepare(values: Values) -> Values:
    """With the kinds of all layers: the first ones may be dense, and have windows in a pattern of their own."""
    if not values.get("sliding_window"):
        raise UserError("config.json of a cohere2_moe has no sliding_window, must be at least 1: try 4096")
    count, first = values["num_hidden_layers"], values["first_k_dense_replace"]
    for key in (_PREFIX, "sliding_window_pattern"):
        if values[key] < 1:
            raise UserError(f"config.json has {key} = {values[key]}, must be at least 1: copy the file again")
    places = [(layer + 1) % values[_PREFIX] for layer in range(first)]
    places += [(layer + 1) % values["sliding_window_pattern"] for layer in range(count - first)]
    usual: dict[str, list[str] | None] = {
        "layer_types": ["sliding_attention" if place else "full_attention" for place in places],
        "mlp_layer_types": ["dense" if layer < first else "sparse" for layer in range(count)],
    }
    usual |= {"rope_scaling": None}  # transformers declares that key, and reads rope_parameters alone
    values = {**values, **{key: kinds for key, kinds in usual.items() if kinds is None or values.get(key) is None}}
    for key, allowed in _CHOICES.items():
        for item in values[key] if key == "layer_types" else [values[key]]:
            if item not in allowed:
                raise UserError(f"config.json has {key} {item!r}, must be one of {', '.join(allowed)}")
    if len(values["layer_types"]) != count:
        raise UserError(
            f"config.json has {len(values['layer_types'])} layer_types, must be one for each of {count} layers"
        )
    return values


def _read(values: Values) -> dict[str, Any]:
    rms = values.get("rms_norm_eps")
    rotated = values[_PREFIX] == _ROTATES_DENSE
    kinds = [
        "local" if kind == "sliding_attention" else "global" if rotated and mlp == "dense" else "unrotated"
        for kind, mlp in zip(values["layer_types"], values["mlp_layer_types"])
    ]
    return {
        "norm": "layer_unbiased" if rms is None else "rms",
        "norm_eps": values["layer_norm_eps"] if rms is None else rms,
        "layer_pattern": shortest(kinds),
        "window": values["sliding_window"] if "local" in kinds else None,
        "mlp_dim": values["prefix_dense_intermediate_size"] or values["intermediate_size"],
    }


def _read_moe(values: Values) -> dict[str, Any]:
    """A softmax of the chosen logits sums to 1, whatever norm_topk_prob says."""
    score, shared = values["expert_selection_fn"], values["num_shared_experts"]
    normalized = score == "softmax" or values["norm_topk_prob"]
    experts = {"score": score, "gates": "normalized" if normalized else "scores", "shared_experts": shared}
    experts |= {"combination": values["shared_expert_combination_strategy"]} if shared else {}
    return experts | {"expert_dim": values["intermediate_size"]} | read_mlp_types(values)


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    of_rms, moe = config.norm == "rms", config.moe
    written: dict[str, Any] = {
        "rms_norm_eps": config.norm_eps if of_rms else None,
        "layer_types": ["sliding_attention" if kind == "local" else "full_attention" for kind in config.kinds],
        "sliding_window": config.window or COHERE2.defaults["sliding_window"],
        _PREFIX: _ROTATES_DENSE if "global" in config.kinds else 2,
        "prefix_dense_intermediate_size": config.mlp_dim,
    }
    written |= {} if of_rms else {"layer_norm_eps": config.norm_eps}
    if moe is None:
        return written
    written |= {"expert_selection_fn": str(moe.score), "num_shared_experts": moe.shared_experts}
    return written | {"shared_expert_combination_strategy": str(moe.combination)} | write_mlp_types(config)


FAMILIES = (
    (
        dataclasses.replace(
            COHERE2,
            model_type="cohere2_moe",
            architectures=("Cohere2MoeForCausalLM",),
            keys={ours: key for ours, key in KEYS.items() if ours != "norm_eps"} | {"logit_scale": "logit_scale"},
            fixed={"residual": "shared"},
            read_keys=("rms_norm_eps", "layer_norm_eps", "layer_types", "mlp_layer_types"),
            defaults=COHERE2.defaults
            | {"head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0}
            | {
                "expert_selection_fn": "softmax",
                "norm_topk_prob": True,
                "shared_expert_combination_strategy": "average",
            }
            | {_PREFIX: 1, "prefix_dense_intermediate_size": None, "first_k_dense_replace": 0},
            window="none",
            experts="num_experts",
            read_moe=_read_moe,
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(without(COHERE, ".mlp.") + without(DEEPSEEK_EXPERTS, "e_score_correction_bias"), *LLAMA_LIKE),
    ),
)
