"""DBRX (Databricks 2024): experts with one tensor for all of a layer, LayerNorms without biases, clipped heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import EXPERTS, QKV, A, M, Names, rows
from capibara.models.api import DecoderConfig, TransformerConfig

_B = "transformer.blocks.{l}."
_N = _B + "norm_attn_norm."
_DBRX = rows(
    [
        ("transformer.wte.weight", "v d", "embedding"),
        (_N + "norm_1.weight", "d", "layers/attention_norm/scale"),
        (_N + "attn.Wqkv.weight", "nh d", QKV, "n"),
        (_N + "attn.out_proj.weight", "d nh", A + "out"),
        (_N + "norm_2.weight", "d", "layers/mlp_norm/scale"),
        (_B + "ffn.router.layer.weight", "e d", M + "router"),
        (_B + "ffn.experts.mlp.w1", "ef d", M + "gate"),
        (_B + "ffn.experts.mlp.v1", "ef d", M + "up"),
        (_B + "ffn.experts.mlp.w2", "ef d", M + "down"),
        ("transformer.norm_f.weight", "d", "final_norm/scale"),
        ("lm_head.weight", "v d", "output"),
    ],
    EXPERTS,
)
# Keys of attn_config and ffn_config, by the names that they have here.
_OF_ATTENTION = {"num_key_value_heads": ("kv_n_heads", 1), "clip_qkv": ("clip_qkv", None)}
_OF_EXPERTS = {
    "ffn_hidden_size": ("ffn_hidden_size", 3584),
    "moe_num_experts": ("moe_num_experts", 4),
    "num_experts_per_tok": ("moe_top_k", 1),
    "router_aux_loss_coef": ("moe_loss_weight", 0.01),
}
_NORM = "moe_normalize_expert_weights"


def _prepare(values: Values) -> Values:
    """The values with those of attn_config and ffn_config beside the others."""
    inner = {name: values.get(name) or {} for name in ("attn_config", "ffn_config")}
    for name, part in inner.items():
        if not isinstance(part, Mapping):
            raise UserError(f"config.json has {name} = {str(part)[:60]}, must be an object: copy the file again")
    attention, experts = inner.values()
    named = {ours: attention.get(key, usual) for ours, (key, usual) in _OF_ATTENTION.items()}
    named |= {ours: experts.get(key, usual) for ours, (key, usual) in _OF_EXPERTS.items()}
    if experts.get(_NORM, 1) not in (None, 1):
        raise UserError(
            f"config.json has {_NORM} = {experts[_NORM]!r} in ffn_config, must be 1 or null: take another model"
        )
    act = experts.get("ffn_act_fn") or {}
    if not isinstance(act, Mapping):
        raise UserError(f"config.json has ffn_act_fn = {str(act)[:60]}, must be an object: copy the file again")
    named |= {"hidden_act": act.get("name", "silu"), "norm_topk_prob": experts.get(_NORM, 1) is not None}
    return _with_base(
        {**values, **named, "max_position_embeddings": values["max_seq_len"]}, attention.get("rope_theta")
    )


def _with_base(values: Values, theta: object) -> Values:
    """The values with attn_config's rope_theta, by which DBRX was trained, where no other names one.

    transformers 5.24 does not read it, and writes 10,000 beside it.

    Raises:
      UserError: another one differs.
    """
    rope = values.get("rope_parameters") or {}
    other = rope.get("rope_theta", values.get("rope_theta")) if isinstance(rope, Mapping) else None
    if other is None and isinstance(rope, Mapping):
        base = 10_000.0 if theta is None else theta
        kind = {} if {"type", "rope_type"} & rope.keys() else {"rope_type": "default"}
        return {**values, "rope_theta": base, "rope_parameters": kind | {**rope, "rope_theta": base}}
    if theta is not None and other != theta:
        raise UserError(
            f"config.json has rope_theta = {str(theta)[:20]} in attn_config and {str(other)[:20]} outside of it: write the "
            "base that the model was trained with in both (Databricks' have 500,000)"
        )
    return {**values, "rope_theta": other}


def _write(config: TransformerConfig) -> dict[str, Any]:
    """The rope_theta in attn_config is required by transformers, which computes with that of rope_parameters."""
    assert isinstance(config, DecoderConfig), "the family's kind"
    if config.moe is None:
        return {}
    attention = {"kv_n_heads": config.kv_heads, "clip_qkv": config.attention_clip, "rope_theta": config.rope.theta}
    experts = {
        "ffn_hidden_size": config.moe.expert_dim or config.mlp_dim,
        "ffn_act_fn": {"name": "silu"},
        "moe_num_experts": config.moe.num_experts,
        "moe_top_k": config.moe.top_k,
        "moe_loss_weight": config.moe.balance_loss,
        _NORM: 1.0 if config.moe.gates == "normalized" else None,
    }
    written: dict[str, Any] = {"attn_config": attention, "ffn_config": experts}
    return written | ({"max_seq_len": config.rope.original_length} if config.rope.scaling.by_length else {})


FAMILIES = (
    (
        Family(
            model_type="dbrx",
            architectures=("DbrxForCausalLM",),
            keys={
                "vocab_size": "vocab_size",
                "embed_dim": "d_model",
                "num_layers": "n_layers",
                "num_heads": "n_heads",
                "num_kv_heads": "num_key_value_heads",
                "mlp_dim": "ffn_hidden_size",
                "attention_clip": "clip_qkv",
            },
            fixed={"norm": "layer_unbiased", "norm_eps": 1e-5, "activation": "swiglu"},
            defaults={"max_seq_len": 2048, "hidden_act": "silu"},
            only={"tie_word_embeddings": (False, None)},
            read_keys=("attn_config", "ffn_config"),
            aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
            | {"max_position_embeddings": "max_seq_len"},
            divides=True,
            experts="moe_num_experts",
            prepare=_prepare,
            write=_write,
        ),
        Names(_DBRX, ((r"^(?=(?:blocks|wte|norm_f)\.)", "transformer."),)),
    ),
)
