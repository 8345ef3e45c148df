"""Encoders with rotary positions and gated MLPs: ModernBERT (Warner et al. 2024, arXiv:2412.13663) and Nomic's BERT."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.encoders.bert import HEAD_BIAS, encoder, ignored
from capibara.interop.hf.layout.family import KEYS, KINDS, LAYER_NORM, WITHOUT_GROUPS, Family, Kind, Values, shortest
from capibara.interop.hf.layout.rows import BARE, BUFFERS, QKV, QKV_BIAS, A, M, Names, linear, norm, rows
from capibara.models.api import DecoderConfig, EncoderConfig, TransformerConfig

WINDOW = 128  # of the class, which needs one even if no layer has it
ROTARY = {"positions": "rope", "max_length": None}
# The keys of what may have a bias, and our fields with their values without and with one.
BIASED = {
    "norm_bias": ("norm", "layer_unbiased", "layer"),
    "decoder_bias": ("head_bias", "none", "vocab"),
    "classifier_bias": ("transform_bias", "none", "embed"),
}


def prepare(values: Values) -> Values:
    """The values in the form of transformers 5.24, of older ones too."""
    new, old = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    rope = {kind: {**(new.get(kind) or {}), **old} for kind in KINDS}
    bases = {"rope_theta": values["global_rope_theta"], "rope_local_base_freq": values["local_rope_theta"]}
    types, every = values.get("layer_types"), values["global_attn_every_n_layers"]
    if types is None:
        if not every:
            raise UserError(f"config.json has global_attn_every_n_layers = {every!r}, must be at least 1")
        layers = range(values.get("num_hidden_layers") or 0)
        types = ["sliding_attention" if i % every else "full_attention" for i in layers]
    return {**values, **bases, "rope_parameters": rope, "rope_scaling": None, "layer_types": types}


def read_layers(values: Values) -> dict[str, Any]:
    """The layers' kinds, half of local_attention as the window, and the optional biases."""
    types, count = values["layer_types"], values["num_hidden_layers"]
    if unknown := [kind for kind in types if kind not in KINDS]:
        raise UserError(f"config.json has layer_types {unknown[0]!r}, must be one of {', '.join(KINDS)}")
    if len(types) < count:
        raise UserError(f"config.json has {len(types)} layer_types, must be one for each of {count} layers")
    pattern = shortest([KINDS[kind] for kind in types[:count]])
    half = values.get("sliding_window")  # of transformers' class, which it sets too
    half = values["local_attention"] // 2 if half is None else half
    fields: dict[str, Any] = {ours: with_it if values[key] else none for key, (ours, none, with_it) in BIASED.items()}
    return fields | {"layer_pattern": pattern, "window": half if "local" in pattern else None}


def write_layers(config: EncoderConfig | DecoderConfig, half: int | None) -> dict[str, Any]:
    """The way back; `half` is what a query sees on one side of it, None: all."""
    theirs = {ours: name for name, ours in KINDS.items()}
    written: dict[str, Any] = {key: getattr(config, ours) == with_it for key, (ours, _, with_it) in BIASED.items()}
    written["local_attention"] = WINDOW if half is None else 2 * half
    return written | {"layer_types": [theirs.get(kind) for kind in config.kinds]}


def _read(values: Values) -> dict[str, Any]:
    fields = read_layers(values)
    return fields | {"window": None if fields["window"] is None else fields["window"] + 1}


def _write(config: TransformerConfig) -> dict[str, Any]:
    config = encoder(config)
    return write_layers(config, None if config.window is None else config.window - 1)


_LAYER = "model.layers.{l}."
MODERNBERT = rows(
    [
        ("model.embeddings.tok_embeddings.weight", "v d", "embedding"),
        *norm("model.embeddings.norm", "embedding_norm"),
        *norm(f"{_LAYER}attn_norm", "layers/attention_norm"),
        (f"{_LAYER}attn.Wqkv.weight", "nh d", QKV, "n"),
        (f"{_LAYER}attn.Wqkv.bias", "nh", QKV_BIAS, "n"),
        *linear(f"{_LAYER}attn.Wo", "d nh", A + "out"),
        *norm(f"{_LAYER}mlp_norm", "layers/mlp_norm"),
        *linear(f"{_LAYER}mlp.Wi", "f d", f"{M}gate {M}up", "f"),
        *linear(f"{_LAYER}mlp.Wo", "d f", M + "down"),
        *norm("model.final_norm", "final_norm"),
        ("head.dense.weight", "o d", "transform"),
        ("head.dense.bias", "d", "transform_bias"),
        *norm("head.norm", "transform_norm"),
        ("decoder.weight", "v d", "output"),
        ("decoder.bias", "v", "output_bias"),
    ]
)
_BLOCK = "nomic_bert.encoder.layers.{l}."
_NOMIC = rows(
    [
        ("nomic_bert.embeddings.word_embeddings.weight", "v d", "embedding"),
        ("nomic_bert.embeddings.token_type_embeddings.weight", "t d", "type_embedding"),
        *norm("nomic_bert.emb_ln", "embedding_norm"),
        (f"{_BLOCK}attn.Wqkv.weight", "nh d", QKV, "n"),
        (f"{_BLOCK}attn.out_proj.weight", "d nh", A + "out"),
        *norm(f"{_BLOCK}norm1", "layers/attention_norm"),
        (f"{_BLOCK}mlp.fc12.weight", "f d", M + "gate"),
        (f"{_BLOCK}mlp.fc11.weight", "f d", M + "up"),
        (f"{_BLOCK}mlp.fc2.weight", "d f", M + "down"),
        *norm(f"{_BLOCK}norm2", "layers/mlp_norm"),
        ("cls.predictions.transform.dense.weight", "o d", "transform"),
        ("cls.predictions.transform.dense.bias", "d", "transform_bias"),
        *norm("cls.predictions.transform.layer_norm", "transform_norm"),
        ("cls.predictions.bias", "v", "output_bias"),
        ("cls.predictions.decoder.weight", "v d", "output"),
    ]
)

# What ModernBERT's encoders and decoders share.
MODERN: dict[str, Any] = dict(
    keys=WITHOUT_GROUPS | {"norm_eps": "norm_eps"},
    read_keys=("layer_types", "sliding_window"),
    defaults={"hidden_activation": "gelu", "classifier_activation": "gelu", "norm_eps": 1e-5}
    | {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 3}
    | {"norm_bias": False, "decoder_bias": True, "classifier_bias": False, "local_attention": WINDOW},
    activation="hidden_activation",
    transform="classifier_activation",
    biases={"attention_bias": "attention", "mlp_bias": "mlp"},
    rope_by_layer=True,
    old_rope=False,
    tied=True,
    divides=True,
    prepare=prepare,
)
FAMILIES = (
    (
        Family(
            model_type="modernbert",
            kind=Kind.ENCODER,
            architectures=("ModernBertForMaskedLM",),
            fixed=ROTARY | {"norm_placement": "pre", "first_norm": "none", "bias": "none", "token_types": 0},
            **MODERN,
            read=_read,
            write=_write,
        ),
        Names(MODERNBERT, (BARE, (r"^(?=(?:embeddings|final_norm)\.)", "model.")), BUFFERS),
    ),
    (
        Family(
            model_type="nomic_bert",
            kind=Kind.ENCODER,
            architectures=("NomicBertForMaskedLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "num_kv_heads"}
            | LAYER_NORM
            | {"token_types": "type_vocab_size"},
            fixed=ROTARY | {"bias": "none"},
            defaults={"hidden_act": "silu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "rope_theta": 1000.0},
            transform="hidden_act",
            tied=True,
        ),
        Names(
            _NOMIC, ((r"^(?=(?:embeddings|emb_ln|encoder)\.)", "nomic_bert."),), ignored(*HEAD_BIAS), aliases=HEAD_BIAS
        ),
    ),
)
