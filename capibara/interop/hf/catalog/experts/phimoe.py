"""Phi-3.5-MoE (Microsoft 2024, arXiv:2404.14219): LayerNorms with biases, and two experts whose weights SparseMixer computes."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout import rope as hf_rope
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA_LIKE, L, Names, norm, rows
from capibara.interop.hf.tables import MIXTRAL
from capibara.models.api import DecoderConfig, TransformerConfig

_PHIMOE = (
    tuple(row for row in MIXTRAL if "norm" not in row.name)
    + ATTENTION_BIASES
    + rows(
        [
            *norm(L + "input_layernorm", "layers/attention_norm"),
            *norm(L + "post_attention_layernorm", "layers/mlp_norm"),
            *norm("model.norm", "final_norm"),
            ("lm_head.bias", "v", "output_bias"),
        ]
    )
)
_SCALES = ("short_mscale", "long_mscale")


def _prepare(values: Values) -> Values:
    """In transformers 5.24 rows of every length have the short factors, and long rows have a scale of their own."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return values
    short, long = (rope.get(name) for name in _SCALES)
    if kind != "longrope" or short is None or short != long:
        raise UserError(
            f"config.json of a phimoe has rope_type {kind!r} with short_mscale = {short} and long_mscale = {long}, must be "
            "'default', or 'longrope' with one scale: take another model"
        )
    longest, original = values.get("max_position_embeddings"), rope.get("original_max_position_embeddings")
    factor = longest / original if longest and original and longest > original else 2.0
    changed = {"factor": factor, "attention_factor": short, "long_factor": rope.get("short_factor")}
    return {**values, "rope_scaling": None, "rope_parameters": {**rope, **changed}}


def _read(values: Values) -> dict[str, Any]:
    return {"head_bias": "vocab" if values["lm_head_bias"] else "none"}


def _read_moe(values: Values) -> dict[str, Any]:
    return {"closeness": 2 * values["router_jitter_noise"]}


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    rope = hf_rope.write(config, PHIMOE)["rope_parameters"]
    if config.rope.scaling == "longrope":
        rope |= dict.fromkeys(_SCALES, config.rope.magnitude())
    noise = {} if config.moe is None else {"router_jitter_noise": config.moe.closeness / 2}
    return {"rope_parameters": rope, "lm_head_bias": config.head_bias == "vocab"} | noise


PHIMOE = Family(
    model_type="phimoe",
    architectures=("PhimoeForCausalLM",),
    keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
    fixed={"norm": "layer"},
    defaults=SILU
    | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "sliding_window": None}
    | {"num_experts_per_tok": 2, "num_local_experts": 16, "router_jitter_noise": 0.01, "lm_head_bias": False}
    | {"router_aux_loss_coef": 0.001, "output_router_logits": False},
    biases=ATTENTION_BIAS,
    read_keys=("head_dim",),
    window="all",
    old_rope=False,
    experts="num_local_experts",
    moe={"gates": "close", "top_k": 2},  # whatever num_experts_per_tok says
    read_moe=_read_moe,
    prepare=_prepare,
    read=_read,
    write=_write,
)

FAMILIES = ((PHIMOE, Names(_PHIMOE, *LLAMA_LIKE)),)
