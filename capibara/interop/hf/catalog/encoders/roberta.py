"""RoBERTa (Liu et al. 2019, arXiv:1907.11692), its many languages (XLM-R, CamemBERT), and the one with norms of inputs."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.encoders.bert import DEFAULTS, KEYS, ONLY, encoder, ignored, renames
from capibara.interop.hf.layout.family import Family, Kind, Values
from capibara.interop.hf.layout.rows import Names, Rows, norm, renamed, rows, without
from capibara.interop.hf.tables import BERT
from capibara.models.api import TransformerConfig

_HEAD_BIAS = {"lm_head.decoder.bias": "lm_head.bias"}
_HEAD = rows(
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


def _family(model_type: str, architecture: str, **fixed: str) -> Family:
    return Family(
        model_type=model_type,
        kind=Kind.ENCODER,
        architectures=(architecture,),
        keys=KEYS,
        fixed={"transform_activation": "gelu_exact"} | fixed,
        defaults=DEFAULTS | {"pad_token_id": 1},
        only=ONLY,
        tied=True,
        gated=False,
        rope=False,
        divides=True,
        read=_read,
        write=_write,
    )


def _names(table: Rows, stem: str) -> Names:
    table = renamed(without(table, "cls."), ("bert.", f"{stem}.")) + _HEAD
    return Names(table, renames(stem), ignored(*_HEAD_BIAS), rf"^{stem}\.pooler\.", aliases=_HEAD_BIAS)


_BLOCK = "bert.encoder.layer.{l}."
_PRE = without(BERT, "output.LayerNorm") + rows(
    [
        *norm(f"{_BLOCK}attention.LayerNorm", "layers/attention_norm"),
        *norm(f"{_BLOCK}intermediate.LayerNorm", "layers/mlp_norm"),
        *norm("bert.LayerNorm", "final_norm"),
    ]
)

FAMILIES = (
    (_family("roberta", "RobertaForMaskedLM"), _names(BERT, "roberta")),
    (_family("xlm-roberta", "XLMRobertaForMaskedLM"), _names(BERT, "roberta")),
    (_family("camembert", "CamembertForMaskedLM"), _names(BERT, "roberta")),
    (
        _family("roberta-prelayernorm", "RobertaPreLayerNormForMaskedLM", norm_placement="pre"),
        _names(_PRE, "roberta_prelayernorm"),
    ),
)
