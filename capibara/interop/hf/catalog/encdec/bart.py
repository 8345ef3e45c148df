"""BART (Lewis et al. 2019, arXiv:1910.13461) and what has followed it.

mBART (2020, arXiv:2001.08210), Pegasus (2019, arXiv:1912.08777), Marian (OPUS-MT, 2020), M2M-100 (2020, arXiv:2010.11125) with
NLLB-200 (2022, arXiv:2207.04672), PLBART (2021, arXiv:2103.06333), MVP (2022, arXiv:2206.12131), Blenderbot (2020, arXiv:2004.13637).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Kind, Values
from capibara.interop.hf.layout.rows import Constant, Names, Rows, attention, linear, norm, rows
from capibara.models.api import EncoderDecoderConfig, TransformerConfig, sine_table

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


def _read_m2m(values: Values) -> dict[str, Any]:
    """Positions count from that behind the padding token's number, as in fairseq."""
    padding = values.get("pad_token_id")
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise UserError(
            f"config.json of an m2m_100 has pad_token_id = {padding!r}, must be a token: copy the file again"
        )
    return _read(values) | {"position_offset": padding + 1}


def _write_m2m(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, EncoderDecoderConfig), "the family's kind"
    return _write(config) | {"pad_token_id": config.position_offset - 1}


def _family(model_type: str, architecture: str, usual: Values | None = None, **fixed: object) -> Family:
    defaults = {"activation_function": "gelu", "scale_embedding": False, "max_position_embeddings": _LONGEST}
    return Family(
        model_type=model_type,
        kind=Kind.ENCODER_DECODER,
        architectures=(architecture,),
        keys=_KEYS,
        fixed=_FIXED | fixed,
        defaults=defaults | dict(usual or {}),
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


def _sizes(values: Mapping[str, Any]) -> tuple[int, int]:
    return values.get("max_position_embeddings", _LONGEST), values["d_model"]


def _sines(values: Mapping[str, object]) -> np.ndarray:
    return sine_table(*_sizes(values))


_NAMES = Names(
    _ROWS,
    ((r"^(?=(?:shared|encoder|decoder)\.)", "model."),),
    r"\.version$|\.embed_tokens\.weight$",
    aliases=_SHARED,
    absent={"final_logits_bias": _no_bias},
)
_ADDED: dict[str, Any] = {"embedding_norm": "layer", "positions": "learned", "position_offset": 2}

_BART: dict[str, Any] = {"norm_placement": "post", "final_norm": "none"} | _ADDED
_MARIAN = dataclasses.replace(
    _family(
        "marian", "MarianMTModel", norm_placement="post", final_norm="none", positions="sinusoidal", sines="computed"
    ),
    only={"tie_word_embeddings": (True,), "share_encoder_decoder_embeddings": (True,)},
)
_M2M = dataclasses.replace(
    _family(
        "m2m_100",
        "M2M100ForConditionalGeneration",
        {"activation_function": "relu", "scale_embedding": True, "pad_token_id": 1},
        norm_placement="pre",
        positions="sinusoidal",
        sines="tensor2tensor",
        head_bias="none",
    ),
    read_keys=(*_BOTH.values(), "pad_token_id"),
    read=_read_m2m,
    write=_write_m2m,
)
# A prompt for each layer is a part of its own.
_MVP = dataclasses.replace(
    _family("mvp", "MvpForConditionalGeneration", **_BART),
    only={"tie_word_embeddings": (True,), "use_prompt": (False,)},
)
_TABLES = [f"model.{side}.embed_positions.weight" for side in _SIDES]

FAMILIES = (
    (_family("bart", "BartForConditionalGeneration", **_BART), _NAMES),
    (_family("mbart", "MBartForConditionalGeneration", norm_placement="pre", **_ADDED), _NAMES),
    (
        # Its sines are tensors of a checkpoint, which older ones leave out.
        _family("pegasus", "PegasusForConditionalGeneration", norm_placement="pre", positions="sinusoidal"),
        dataclasses.replace(_NAMES, absent={"final_logits_bias": _no_bias} | dict.fromkeys(_TABLES, _sines)),
    ),
    (_family("plbart", "PLBartForConditionalGeneration", {"scale_embedding": True}, **_BART), _NAMES),
    (_MVP, _NAMES),
    (
        _family(
            "blenderbot",
            "BlenderbotForConditionalGeneration",
            {"max_position_embeddings": 128},
            norm_placement="pre",
            positions="learned",
        ),
        _NAMES,
    ),
    (
        # Its sines are tensors of older checkpoints.
        _MARIAN,
        dataclasses.replace(
            _NAMES,
            ignored=rf"{_NAMES.ignored}|\.embed_positions\.weight$",
            constants={r"\.embed_positions\.weight$": Constant(_sizes, lambda values, layer: _sines(values))},
        ),
    ),
    # Its sines are no tensors of today's model, which computes them.
    (_M2M, dataclasses.replace(_NAMES, ignored=rf"{_NAMES.ignored}|\.embed_positions\.weights$", absent={})),
)
