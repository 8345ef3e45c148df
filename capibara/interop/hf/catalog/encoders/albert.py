"""ALBERT (Lan et al. 2019, arXiv:1909.11942): BERT's layers with shared weights, and narrower embeddings."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.encoders.bert import DEFAULTS, ENCODER, KEYS, ONLY, encoder, ignored, renames
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import A, M, Names, linear, norm, renamed, rows, without
from capibara.interop.hf.tables import BERT
from capibara.models.api import TransformerConfig


def _read(values: Values) -> dict[str, Any]:
    """How often each group of weights is applied, and the width of the embeddings."""
    layers, groups = values["num_hidden_layers"], values["num_hidden_groups"]
    if groups < 1 or layers < 1 or layers % groups:
        raise UserError(
            f"config.json has num_hidden_layers = {layers} and num_hidden_groups = {groups}, must be a multiple of it, and at "
            "least 1: take another model"
        )
    if values["embedding_size"] == values["hidden_size"]:
        raise UserError(
            f"config.json has embedding_size = {values['embedding_size']} = hidden_size, must be another width: take another model"
        )
    return {"layer_repeats": layers // groups}


def _write(config: TransformerConfig) -> dict[str, Any]:
    return {"num_hidden_layers": encoder(config).depth}


_LAYER = "albert.encoder.albert_layer_groups.{l}.albert_layers.0."
_ALBERT = renamed(without(BERT, "encoder", "cls."), ("bert.", "albert.")) + rows(
    [
        *linear("albert.encoder.embedding_hidden_mapping_in", "d o", "projection"),
        *linear(f"{_LAYER}attention.query", "nh d", A + "query"),
        *linear(f"{_LAYER}attention.key", "nh d", A + "key"),
        *linear(f"{_LAYER}attention.value", "nh d", A + "value"),
        *linear(f"{_LAYER}attention.dense", "d nh", A + "out"),
        *norm(f"{_LAYER}attention.LayerNorm", "layers/attention_norm"),
        *linear(f"{_LAYER}ffn", "f d", M + "up"),
        *linear(f"{_LAYER}ffn_output", "d f", M + "down"),
        *norm(f"{_LAYER}full_layer_layer_norm", "layers/mlp_norm"),
        ("predictions.dense.weight", "o d", "transform"),
        ("predictions.dense.bias", "d", "transform_bias"),
        *norm("predictions.LayerNorm", "transform_norm"),
        ("predictions.decoder.weight", "v d", "output"),
        ("predictions.bias", "v", "output_bias"),
    ]
)
_HEAD_BIAS = {"predictions.decoder.bias": "predictions.bias"}

FAMILIES = (
    (
        Family(
            model_type="albert",
            architectures=("AlbertForMaskedLM", "AlbertForPreTraining"),
            keys=KEYS | {"num_layers": "num_hidden_groups", "embedding_dim": "embedding_size"},
            read_keys=("num_hidden_layers",),
            defaults=DEFAULTS
            | {"hidden_act": "gelu_new", "embedding_size": 128, "num_hidden_groups": 1, "num_hidden_layers": 12},
            only=ONLY | {"inner_group_num": (1,)},
            read=_read,
            write=_write,
            **ENCODER,
        ),
        Names(
            _ALBERT,
            (*renames("albert"), (r"^(?=(?:encoder|embeddings)\.)", "albert.")),
            ignored(*_HEAD_BIAS),
            r"^albert\.pooler|^sop_classifier\.",
            aliases=_HEAD_BIAS,
        ),
    ),
)
