"""RoBERTa (Liu et al. 2019, arXiv:1907.11692), its other languages (XLM-R, CamemBERT), its largest, data2vec, and MPNet."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.encoders.bert import DEFAULTS, ENCODER, KEYS, ONLY, encoder, ignored, renames
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import Names, Rows, norm, renamed, rows, without
from capibara.interop.hf.tables import BERT
from capibara.models.api import TransformerConfig

HEAD_BIAS = {"lm_head.decoder.bias": "lm_head.bias"}
HEAD = rows(
    [
        ("lm_head.dense.weight", "o d", "transform"),
        ("lm_head.dense.bias", "d", "transform_bias"),
        *norm("lm_head.layer_norm", "transform_norm"),
        ("lm_head.bias", "v", "output_bias"),
        ("lm_head.decoder.weight", "v d", "output"),
    ]
)


def _read(values: Values) -> dict[str, Any]:
    """Positions are counted from the row behind that of padding."""
    padding = values["pad_token_id"]
    if type(padding) is not int or padding < 0:
        raise UserError(
            f"config.json has pad_token_id = {padding!r}, must be a token's number: positions are counted from it"
        )
    return {"position_offset": padding + 1, "max_length": values["max_position_embeddings"] - padding - 1}


def _write(config: TransformerConfig) -> dict[str, Any]:
    config = encoder(config)
    assert config.max_length is not None, "encoders have one"
    offset = config.position_offset
    return {"pad_token_id": offset - 1, "max_position_embeddings": config.max_length + offset}


def _write_length(config: TransformerConfig) -> dict[str, Any]:
    return {"max_position_embeddings": _write(config)["max_position_embeddings"]}


def _family(model_type: str, architecture: str, **fixed: str) -> Family:
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        keys=KEYS,
        fixed={"transform_activation": "gelu_exact"} | fixed,
        defaults=DEFAULTS | {"pad_token_id": 1},
        only=ONLY,
        read=_read,
        write=_write,
        **ENCODER,
    )


def _names(table: Rows, stem: str) -> Names:
    table = renamed(without(table, "cls."), ("bert.", f"{stem}.")) + HEAD
    return Names(table, renames(stem), ignored(*HEAD_BIAS), rf"^{stem}\.pooler\.", aliases=HEAD_BIAS)


_BLOCK = "bert.encoder.layer.{l}."
_XL = without(BERT, "LayerNorm") + rows(
    [
        *norm(f"{_BLOCK}attention.self_attn_layer_norm", "layers/attention_norm"),
        *norm(f"{_BLOCK}LayerNorm", "layers/mlp_norm"),
        *norm("bert.encoder.LayerNorm", "final_norm"),
    ]
)
_PRELAYERNORM = without(BERT, "output.LayerNorm") + rows(
    [
        *norm(f"{_BLOCK}attention.LayerNorm", "layers/attention_norm"),
        *norm(f"{_BLOCK}intermediate.LayerNorm", "layers/mlp_norm"),
        *norm("bert.LayerNorm", "final_norm"),
    ]
)
_PARTS = (
    ("attention.self.query", "attention.attn.q"),
    ("attention.self.key", "attention.attn.k"),
    ("attention.self.value", "attention.attn.v"),
    ("attention.output.dense", "attention.attn.o"),
    ("attention.output.LayerNorm", "attention.LayerNorm"),
)
_MPNET = renamed(without(BERT, "token_type"), *_PARTS) + rows(
    [("bert.encoder.relative_attention_bias.weight", "r n", "relative_bias/table")]
)
_OF_PADDING = 2  # MPNet counts positions from it, whatever its pad_token_id says

FAMILIES = (
    (_family("roberta", "RobertaForMaskedLM"), _names(BERT, "roberta")),
    (_family("xlm-roberta", "XLMRobertaForMaskedLM"), _names(BERT, "roberta")),
    (_family("camembert", "CamembertForMaskedLM"), _names(BERT, "roberta")),
    (_family("data2vec-text", "Data2VecTextForMaskedLM"), _names(BERT, "data2vec_text")),
    (
        _family("xlm-roberta-xl", "XLMRobertaXLForMaskedLM", norm_placement="pre", embedding_norm="none"),
        _names(_XL, "roberta"),
    ),
    (
        _family("roberta-prelayernorm", "RobertaPreLayerNormForMaskedLM", norm_placement="pre"),
        _names(_PRELAYERNORM, "roberta_prelayernorm"),
    ),
    (
        # MPNet (Song et al. 2020, arXiv:2004.09297). Its code has 32 buckets, whatever the size of their table.
        dataclasses.replace(
            _family("mpnet", "MPNetForMaskedLM"),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "token_types"},
            fixed={"transform_activation": "gelu_exact", "position_offset": _OF_PADDING, "token_types": 0}
            | {"relative_buckets": 32},
            defaults={key: value for key, value in DEFAULTS.items() if key != "type_vocab_size"},
            only={"relative_attention_num_buckets": (32,)},
            read=lambda values: {"max_length": values["max_position_embeddings"] - _OF_PADDING},
            write=_write_length,
        ),
        _names(_MPNET, "mpnet"),
    ),
)
