"""T5Gemma (Zhang et al. 2025, arXiv:2504.06225): two stacks with Gemma 2's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import ATTENTION_BIAS, CAPS, GEMMA, KEYS, KINDS, Family, Kind, Values, shortest
from capibara.interop.hf.layout.rows import Names, attention, rows
from capibara.models.api import EncoderDecoderConfig, TransformerConfig

_SIDES = ("encoder", "decoder")
_TYPES = ("sliding_attention", "full_attention")
# Of the class of each side.
_USUAL: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
}
_USUAL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6}
_USUAL |= {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "attention_bias": False}
_USUAL |= {"query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None, "rope_theta": 10_000.0}
_USUAL |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_ROPE = ("rope_parameters", "rope_scaling")
_BY_LENGTH = ("dynamic", "longrope")
_OF_SIDE = ("num_hidden_layers", "layer_types", "final_logit_softcapping")  # the encoder's last one is not read
_ENCODER_LAYERS = "num_encoder_layers"  # what the values have beside those of the decoder
_ENCODER_TYPES = "encoder_layer_types"


def _side(values: Values, side: str) -> dict[str, Any]:
    """The values of one side, with transformers' where they are silent."""
    stated = values.get(side) or {}
    if not isinstance(stated, Mapping):
        raise UserError(f"config.json has {side} = {str(stated)[:60]}, must be an object: copy the file again")
    if stated.get("per_layer_config"):
        raise UserError(f"config.json has per_layer_config in {side}, must be without: take another model")
    known = {key: stated[key] for key in (*_USUAL, *_ROPE, "original_max_position_embeddings") if key in stated}
    filled = {**_USUAL, **known}
    count, types = filled["num_hidden_layers"], filled["layer_types"]
    types = [_TYPES[layer % 2] for layer in range(count)] if types is None else types
    if len(types) < count or not {*types} <= KINDS.keys():
        raise UserError(
            f"config.json has layer_types {str(types)[:60]} in {side}, must be one of {', '.join(KINDS)} for each of {count} layers"
        )
    return filled | {"layer_types": types[:count]}


def _prepare(values: Values) -> Values:
    """The values of both sides beside each other: those of the decoder, which must be the encoder's, and its layers.

    Raises:
      UserError: they differ.
    """
    encoder, decoder = (_side(values, side) for side in _SIDES)
    for key in sorted({*encoder, *decoder} - {*_OF_SIDE}):
        if encoder.get(key) != decoder.get(key):
            raise UserError(
                f"config.json has {key} = {str(encoder.get(key))[:60]} in encoder and {str(decoder.get(key))[:60]} in decoder, must "
                "be the same: take another model"
            )
    layers = {_ENCODER_LAYERS: encoder["num_hidden_layers"], _ENCODER_TYPES: encoder["layer_types"]}
    return {**values, **decoder, **layers}


def _read(values: Values) -> dict[str, Any]:
    """The kinds of layers, their windows, and the factor of the scores."""
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in _BY_LENGTH:
        raise UserError(
            f"config.json has rope_type {kind!r} in encoder and decoder, whose rows are not equally long, must be 'default', "
            "'linear', 'llama3' or 'yarn': take another model"
        )
    sides = [[KINDS[kind] for kind in values[key]] for key in (_ENCODER_TYPES, "layer_types")]
    pattern = shortest(max(sides, key=len))
    if any(kinds != [pattern[layer % len(pattern)] for layer in range(len(kinds))] for kinds in sides):
        raise UserError(
            "config.json has layer_types in encoder and in decoder that differ, must repeat one pattern: take another model"
        )
    fields: dict[str, Any] = {"layer_pattern": pattern, "num_encoder_layers": values[_ENCODER_LAYERS]}
    fields |= {"attention_scale": values["query_pre_attn_scalar"] ** -0.5}
    if "local" not in pattern:
        return fields
    window = values["sliding_window"]
    if window is None:
        raise UserError("config.json has sliding_window = null, must be a number of at least 1: copy the file again")
    return fields | {"window": window, "encoder_window": window + 1}


def _write(config: TransformerConfig) -> dict[str, Any]:
    """What each side's object has beside the values of both."""
    assert isinstance(config, EncoderDecoderConfig), "the family's kind"
    theirs, pattern = {ours: name for name, ours in KINDS.items()}, config.layer_pattern
    both = {"query_pre_attn_scalar": round((config.attention_scale or config.head_size**-0.5) ** -2)}
    both |= {"sliding_window": config.window or _USUAL["sliding_window"]}
    return {
        side: both
        | {"num_hidden_layers": count, "is_decoder": side == "decoder"}
        | {"layer_types": [theirs[pattern[layer % len(pattern)]] for layer in range(count)]}
        for side, count in zip(_SIDES, (config.encoder_layers, config.num_layers), strict=True)
    }


_FAMILY = Family(
    model_type="t5gemma",
    kind=Kind.ENCODER_DECODER,
    architectures=("T5GemmaForConditionalGeneration",),
    keys=KEYS | CAPS,
    sides=_SIDES,
    read_keys=_SIDES,
    fixed=GEMMA | {"norm_placement": "sandwich", "positions": "rope", "head_scale": "none", "encoder_embedding": "own"},
    tied=True,
    activation="hidden_activation",
    biases=ATTENTION_BIAS,
    old_rope=False,
    prepare=_prepare,
    read=_read,
    write=_write,
)


def _rows_of(side: str) -> list[tuple[str, ...]]:
    layer, ours = f"model.{side}.layers.{{l}}.", f"{side}/layers/"
    branches = [("self_attn", "attention"), ("feedforward", "mlp")]
    across = [("cross_attn", "cross_attention")] if side == "decoder" else []
    return [
        (f"model.{side}.embed_tokens.weight", "v d", "embedding" if side == "decoder" else "encoder_embedding"),
        *(
            (f"{layer}{when}_{branch}_layernorm.weight", "d", f"{ours}{of}_{norm}/scale")
            for branch, of in branches + across
            for when, norm in (("pre", "norm"), ("post", "post_norm"))
        ),
        *attention(f"{layer}self_attn", f"{ours}attention", "o_proj"),
        *(row for branch, of in across for row in attention(f"{layer}{branch}", f"{ours}{of}", "o_proj")),
        *(
            (f"{layer}mlp.{name}_proj.weight", dims, f"{ours}mlp/{name}")
            for name, dims in (("gate", "f d"), ("up", "f d"), ("down", "d f"))
        ),
        (f"model.{side}.norm.weight", "d", f"{side}/norm/scale"),
    ]


_ROWS = rows(
    [*_rows_of("encoder"), *_rows_of("decoder"), ("lm_head.out_proj.weight", "v d", "output")],
    {"encoder_embedding": "vd"},
)
FAMILIES = ((_FAMILY, Names(_ROWS, ((r"^(?=(?:encoder|decoder)\.)", "model."),), r"\.rotary_emb\.inv_freq$")),)
