"""BLOOM (BigScience 2022, arXiv:2211.05100) and MPT (MosaicML 2023): no positions but a bias that falls with the distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import QKV, A, M, Names, linear, norm, rows
from capibara.models.api import DecoderConfig, TransformerConfig

_H, _T = "transformer.h.{l}.", "transformer."
_BLOOM = rows(
    [
        ("transformer.word_embeddings.weight", "v d", "embedding"),
        *norm(_T + "word_embeddings_layernorm", "embedding_norm"),
        *norm(_H + "input_layernorm", "layers/attention_norm"),
        *linear(_H + "self_attention.query_key_value", "nh d", QKV, "h"),
        *linear(_H + "self_attention.dense", "d nh", A + "out"),
        *norm(_H + "post_attention_layernorm", "layers/mlp_norm"),
        *linear(_H + "mlp.dense_h_to_4h", "f d", M + "up"),
        *linear(_H + "mlp.dense_4h_to_h", "d f", M + "down"),
        *norm(_T + "ln_f", "final_norm"),
        ("lm_head.weight", "v d", "output"),
    ]
)

_B = "transformer.blocks.{l}."
_MPT = rows(
    [
        ("transformer.wte.weight", "v d", "embedding"),
        (_B + "norm_1.weight", "d", "layers/attention_norm/scale"),
        (_B + "attn.Wqkv.weight", "nh d", QKV, "n"),
        (_B + "attn.out_proj.weight", "d nh", A + "out"),
        (_B + "norm_2.weight", "d", "layers/mlp_norm/scale"),
        (_B + "ffn.up_proj.weight", "f d", M + "up"),
        (_B + "ffn.down_proj.weight", "d f", M + "down"),
        ("transformer.norm_f.weight", "d", "final_norm/scale"),
        ("lm_head.weight", "v d", "output"),
    ]
)
# What other code than transformers' reads in attn_config, and the values that both compute alike.
_MPT_ALONE = {"alibi": (True,), "alibi_bias_max": (8,), "qk_ln": (False, None), "prefix_lm": (False, None)} | {
    "attn_type": ("multihead_attention",)
}


def _read_mpt(values: Values) -> dict[str, Any]:
    attention = values["attn_config"] or {}
    if not isinstance(attention, Mapping):
        raise UserError(f"config.json has attn_config = {str(attention)[:60]}, must be an object: copy the file again")
    for key, allowed in _MPT_ALONE.items():
        if attention.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"config.json has {key} = {attention[key]!r} in attn_config, and transformers computes an mpt with "
                f"{allowed[0]!r}, whatever it says: take another model"
            )
    return {"attention_scale": attention.get("softmax_scale"), "attention_clip": attention.get("clip_qkv") or None}


def _write_mpt(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    attention = {"clip_qkv": config.attention_clip, "softmax_scale": config.attention_scale, "alibi": True}
    return {"attn_config": attention, "max_seq_len": config.max_length or 2048}


FAMILIES = (
    (
        Family(
            model_type="bloom",
            architectures=("BloomForCausalLM",),
            keys={
                "vocab_size": "vocab_size",
                "embed_dim": "hidden_size",
                "num_layers": "n_layer",
                "num_heads": "n_head",
                "norm_eps": "layer_norm_epsilon",
            },
            fixed={
                "norm": "layer",
                "bias": "all",
                "positions": "alibi",
                "embedding_norm": "layer",
                "activation": "gelu",
            },
            aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
            defaults={"layer_norm_epsilon": 1e-5},
            only={"apply_residual_connection_post_layernorm": (False,)},
            activation="",
            gated=False,
            rope=False,
            tied=True,
            divides=True,
        ),
        Names(_BLOOM, ((r"^(?=(?:h|word_embeddings|word_embeddings_layernorm|ln_f)\.)", "transformer."),)),
    ),
    (
        Family(
            model_type="mpt",
            architectures=("MptForCausalLM", "MPTForCausalLM"),
            keys={
                "vocab_size": "vocab_size",
                "embed_dim": "d_model",
                "num_layers": "n_layers",
                "num_heads": "n_heads",
                "norm_eps": "layer_norm_epsilon",
                "max_length": "max_seq_len",
            },
            fixed={"norm": "layer_unbiased", "positions": "alibi", "activation": "gelu_exact"},
            aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
            defaults={"layer_norm_epsilon": 1e-5, "max_seq_len": 2048, "attn_config": None},
            activation="",
            gated=False,
            rope=False,
            tied=True,
            divides=True,
            read=_read_mpt,
            write=_write_mpt,
        ),
        Names(_MPT, ((r"^(?=(?:blocks|wte|norm_f)\.)", "transformer."),)),
    ),
)
