"""BART (Lewis et al. 2019, arXiv:1910.13461), mBART (2020, arXiv:2001.08210) and Pegasus (2019, arXiv:1912.08777)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Kind, Values
from capibara.interop.hf.layout.rows import Names, Rows, attention, linear, norm, rows
from capibara.models.api import TransformerConfig, sine_table

_KEYS = {
    "vocab_size": "vocab_size",
    "embed_dim": "d_model",
    "num_encoder_layers": "encoder_layers",
    "num_layers": "decoder_layers",
    "num_heads": "encoder_attention_heads",
    "mlp_dim": "encoder_ffn_dim",
    "max_length": "max_position_embeddings",
}
_BOTH = {"encoder_attention_heads": "decoder_attention_heads", "encoder_ffn_dim": "decoder_ffn_dim"}
_FIXED = {
    "norm": "layer",
    "norm_eps": 1e-5,
    "bias": "all",
    "attention_scale": None,
    "head_bias": "vocab",
    "head_scale": "none",
}
_LONGEST = 1024
_SIDES = ("encoder", "decoder")


def _read(values: Values) -> dict[str, Any]:
    for ours, theirs in _BOTH.items():
        if values[ours] != values.get(theirs):
            raise UserError(
                f"config.json has {ours} = {values[ours]} and {theirs} = {values.get(theirs)}, must be the same: take another model"
            )
    return {"embedding_scale": "tokens" if values["scale_embedding"] else "none"}


def _write(config: TransformerConfig) -> dict[str, Any]:
    return {
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.mlp_dim,
        "scale_embedding": config.embedding_scale == "tokens",
    }


def _family(model_type: str, stem: str, **fixed: Any) -> Family:
    return Family(
        model_type=model_type,
        kind=Kind.ENCODER_DECODER,
        architectures=(f"{stem}ForConditionalGeneration",),
        keys=_KEYS,
        fixed=_FIXED | fixed,
        defaults={"activation_function": "gelu", "scale_embedding": False, "max_position_embeddings": _LONGEST},
        only={"tie_word_embeddings": (True,)},
        read_keys=tuple(_BOTH.values()),
        aliases={"num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model"}
        | {"num_hidden_layers": "encoder_layers"},
        tied=True,
        activation="activation_function",
        gated=False,
        rope=False,
        read=_read,
        write=_write,
    )


def _side(side: str) -> list[tuple[str, ...]]:
    layer, ours = f"model.{side}.layers.{{l}}.", f"{side}/layers/"
    across = [
        *attention(f"{layer}encoder_attn", f"{ours}cross_attention", "out_proj"),
        *norm(f"{layer}encoder_attn_layer_norm", f"{ours}cross_attention_norm"),
    ]
    return [
        (f"model.{side}.embed_positions.weight", "p d", f"{side}/position_embedding"),
        *norm(f"model.{side}.layernorm_embedding", f"{side}/embedding_norm"),
        *attention(f"{layer}self_attn", f"{ours}attention", "out_proj"),
        *norm(f"{layer}self_attn_layer_norm", f"{ours}attention_norm"),
        *(across if side == "decoder" else []),
        *linear(f"{layer}fc1", "f d", f"{ours}mlp/up"),
        *linear(f"{layer}fc2", "d f", f"{ours}mlp/down"),
        *norm(f"{layer}final_layer_norm", f"{ours}mlp_norm"),
        *norm(f"model.{side}.layer_norm", f"{side}/norm"),
    ]


_LAYOUTS = {
    f"{side}/{name}": dims for side in _SIDES for name, dims in (("position_embedding", "pd"), ("norm/bias", "d"))
}
_LAYOUTS |= {f"{side}/embedding_norm/{part}": "d" for side in _SIDES for part in ("scale", "bias")}
_ROWS: Rows = rows(
    [
        ("model.shared.weight", "v d", "embedding"),
        ("lm_head.weight", "v d", "output"),
        ("final_logits_bias", "u v", "output_bias"),
        *_side("encoder"),
        *_side("decoder"),
    ],
    _LAYOUTS,
)
_SHARED = {f"model.{side}.embed_tokens.weight": "model.shared.weight" for side in _SIDES}


def _no_bias(values: Mapping[str, Any]) -> np.ndarray:
    return np.zeros((1, values["vocab_size"]), np.float32)


def _sines(values: Mapping[str, Any]) -> np.ndarray:
    return sine_table(values.get("max_position_embeddings", _LONGEST), values["d_model"])


_NAMES = Names(
    _ROWS,
    ((r"^(?=(?:shared|encoder|decoder)\.)", "model."),),
    r"\.version$|\.embed_tokens\.weight$",
    aliases=_SHARED,
    absent={"final_logits_bias": _no_bias},
)
_ADDED = {"embedding_norm": "layer", "positions": "learned", "position_offset": 2}

FAMILIES = (
    (_family("bart", "Bart", norm_placement="post", final_norm="none", **_ADDED), _NAMES),
    (_family("mbart", "MBart", norm_placement="pre", **_ADDED), _NAMES),
    (
        # Its sines are tensors of a checkpoint, which older ones leave out.
        _family("pegasus", "Pegasus", norm_placement="pre", positions="sinusoidal"),
        dataclasses.replace(
            _NAMES,
            absent={"final_logits_bias": _no_bias}
            | {f"model.{side}.embed_positions.weight": _sines for side in _SIDES},
        ),
    ),
)
