"""DeBERTa v2 and v3 (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543): BERT with disentangled attention."""

from __future__ import annotations

from typing import Any

from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.hf.catalog.encoders.bert import (
    DEFAULTS,
    ENCODER,
    HEAD_BIAS,
    KEYS,
    ONLY,
    encoder,
    ignored,
    renames,
)
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import A, Names, linear, norm, renamed, rows
from capibara.interop.hf.layout.tensors import letters
from capibara.interop.hf.tables import BERT
from capibara.models.api import Disentangled, Distances, TableNorm, Terms, TransformerConfig

_TERMS = {"c2p": Terms.QUERIES, "p2c": Terms.KEYS}


def _read(values: Values) -> dict[str, Any]:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    for key, only in (("embedding_size", width), ("attention_head_size", width // heads)):
        if values.get(key, only) != only:
            raise UserError(
                f"config.json has {key} = {values[key]}, must be {only} for hidden_size = {width} and num_attention_heads = "
                f"{heads}: take another model"
            )
    fields: dict[str, Any] = {"disentangled": _disentangled(values)}
    return fields if values["position_biased_input"] else fields | {"positions": "none", "max_length": None}


def _disentangled(values: Values) -> Disentangled | None:
    stated = values["pos_att_type"] or []
    names = [name.strip() for name in stated.lower().split("|")] if isinstance(stated, str) else stated
    if (
        not isinstance(names, list)
        or not set(names) <= _TERMS.keys()
        or bool(names) != bool(values["relative_attention"])
    ):
        raise UserError(
            f"config.json has pos_att_type = {stated!r} and relative_attention = {values['relative_attention']!r}, must be "
            f"some of {', '.join(_TERMS)} and true, or none and false: take another model"
        )
    if not names:
        return None
    span, buckets = values["max_relative_positions"], max(values["position_buckets"], 0)
    span = values["max_position_embeddings"] if span < 1 else span
    if buckets == 1 or (buckets and span - 1 <= buckets // 2):
        raise UserError(
            f"config.json has position_buckets = {buckets} and max_relative_positions = {span} (or max_position_embeddings), must "
            "be 0, or at least 2 and less than twice that minus 1: take another model"
        )
    normed = "layer_norm" in [name.strip() for name in values["norm_rel_ebd"].lower().split("|")]
    return Disentangled(
        span=span,
        buckets=buckets,
        terms=Terms.BOTH if len(set(names)) == 2 else _TERMS[names[0]],
        projections=Distances.SHARED if values["share_att_key"] else Distances.OWN,
        norm=TableNorm.LAYER if normed else TableNorm.NONE,
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    config = encoder(config)
    sizes, learned = config.disentangled, config.positions == "learned"
    written = {"relative_attention": sizes is not None, "position_biased_input": learned, "legacy": True}
    if sizes is None:
        return written | {"pos_att_type": None}
    return written | {
        "pos_att_type": [name for name, ours in _TERMS.items() if sizes.terms in (ours, Terms.BOTH)],
        "max_relative_positions": sizes.span,
        "position_buckets": sizes.buckets or -1,
        "share_att_key": sizes.projections == "shared",
        "norm_rel_ebd": "layer_norm" if sizes.norm == "layer" else "none",
        "max_position_embeddings": config.max_length if learned else sizes.span,
    }


_SELF = "deberta.encoder.layer.{l}.attention.self."
_OF_POSITIONS = {
    "relative_embedding": "rd",
    **dict.fromkeys(("relative_norm/scale", "relative_norm/bias"), "d"),
    **{f"layers/{projection.path}": "l" + letters(projection.axes) for projection in projections.POSITIONS},
    **{f"layers/{projection.path}_bias": "l" + letters(projection.out_axes) for projection in projections.POSITIONS},
}
_DEBERTA = renamed(
    BERT,
    ("bert.", "deberta."),
    *((f"self.{projection.name}", f"self.{projection.name}_proj") for projection in projections.ATTENTION),
)
_DEBERTA += rows(
    [
        ("deberta.encoder.rel_embeddings.weight", "r d", "relative_embedding"),
        *norm("deberta.encoder.LayerNorm", "relative_norm"),
        *linear(f"{_SELF}pos_key_proj", "nh d", A + "position_key"),
        *linear(f"{_SELF}pos_query_proj", "nh d", A + "position_query"),
    ],
    _OF_POSITIONS,
)
# Version 3 has another head beside its discriminator, which transformers reads with `legacy` set to false alone.
_HEAD = (
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
    (r"^lm_predictions\.lm_head\.", "cls.predictions.transform."),
)

FAMILIES = (
    (
        Family(
            model_type="deberta-v2",
            architectures=("DebertaV2ForMaskedLM",),
            keys=KEYS,
            read_keys=("pos_att_type", "embedding_size", "attention_head_size"),
            defaults=DEFAULTS
            | {"layer_norm_eps": 1e-7, "type_vocab_size": 0, "position_biased_input": True, "relative_attention": False}
            | {"pos_att_type": None, "max_relative_positions": -1, "position_buckets": -1, "share_att_key": False}
            | {"norm_rel_ebd": "none"},
            only=ONLY | {"legacy": (True,), "conv_kernel_size": (0,)},
            read=_read,
            write=_write,
            **ENCODER,
        ),
        Names(
            _DEBERTA,
            (*renames("deberta"), *_HEAD),
            ignored(*HEAD_BIAS),
            r"^mask_predictions\.|^deberta\.pooler\.|^pooler\.",
            aliases=HEAD_BIAS,
        ),
    ),
)
