"""ESM-1b and ESM-2 (Lin et al. 2022), models of proteins: BERT's layers with norms before them and rotary positions."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.encoders.bert import ENCODER, encoder, ignored, renames
from capibara.interop.hf.catalog.encoders.roberta import HEAD
from capibara.interop.hf.layout.family import LAYER_NORM, WITHOUT_GROUPS, Family, Values
from capibara.interop.hf.layout.rows import Constant, Names, norm, renamed, rows, without
from capibara.interop.hf.tables import BERT
from capibara.models.api import Rope, TransformerConfig

_E, _B = "esm.embeddings.", "esm.encoder.layer.{l}."
_ROWS = (
    renamed(without(BERT, "cls.", "LayerNorm", "token_type"), ("bert.", "esm."))
    + rows(
        [
            *norm(f"{_E}layer_norm", "embedding_norm"),
            *norm(f"{_B}attention.LayerNorm", "layers/attention_norm"),
            *norm(f"{_B}LayerNorm", "layers/mlp_norm"),
            *norm("esm.encoder.emb_layer_norm_after", "final_norm"),
        ]
    )
    + HEAD
)


_FREQUENCIES = r"\.rotary_embeddings\.inv_freq$"


def _head_dim(values: Values) -> int:
    return values["hidden_size"] // values["num_attention_heads"]


# Of the model, or of each layer: transformers 5.24 reads both.
_ANGLES = Constant(
    lambda values: (_head_dim(values) // 2,),
    lambda values, layer: Rope(theta=float(values["rope_theta"])).frequencies(_head_dim(values)),
)


def _read(values: Values) -> dict[str, Any]:
    padding, mask = values.get("pad_token_id"), values.get("mask_token_id")
    fields: dict[str, Any] = {"embedding_norm": "layer" if values["emb_layer_norm_before"] else "none"}
    if values["token_dropout"]:
        if type(mask) is not int or mask < 0:
            raise UserError(
                f"config.json has token_dropout = true and mask_token_id = {mask!r}, must be a token's number"
            )
        fields["token_dropout"] = mask
    kind = values["position_embedding_type"]
    if kind == "rotary":
        return fields | {"positions": "rope", "rope": Rope(theta=float(values["rope_theta"])), "max_length": None}
    if kind != "absolute" or type(padding) is not int or padding < 0:
        raise UserError(
            f"config.json has position_embedding_type = {kind!r} and pad_token_id = {padding!r}, must be 'rotary', or 'absolute' "
            "with a token's number, from which positions are counted: take another model"
        )
    return fields | {"position_offset": padding + 1, "max_length": values["max_position_embeddings"] - padding - 1}


def _write(config: TransformerConfig) -> dict[str, Any]:
    config, written = encoder(config), dict[str, Any]()
    if config.token_dropout is not None:
        written = {"mask_token_id": config.token_dropout}
    written |= {"token_dropout": config.token_dropout is not None}
    written |= {"emb_layer_norm_before": config.embedding_norm == "layer"}
    if config.positions == "rope":
        return written | {"position_embedding_type": "rotary", "rope_theta": config.rope.theta}
    assert config.max_length is not None, "learned positions have one"
    written |= {"position_embedding_type": "absolute", "pad_token_id": config.position_offset - 1}
    return written | {"max_position_embeddings": config.max_length + config.position_offset}


FAMILIES = (
    (
        Family(
            model_type="esm",
            architectures=("EsmForMaskedLM",),
            keys=WITHOUT_GROUPS | LAYER_NORM,
            fixed={"norm_placement": "pre", "token_types": 0, "activation": "gelu_exact"},
            defaults={"layer_norm_eps": 1e-12, "position_embedding_type": "absolute", "max_position_embeddings": 1026}
            | {"rope_theta": 10_000.0, "token_dropout": False, "emb_layer_norm_before": False},
            only={"is_decoder": (False,), "add_cross_attention": (False,)},
            read_keys=("pad_token_id", "mask_token_id"),
            activation="",
            read=_read,
            write=_write,
            **ENCODER,
        ),
        Names(
            _ROWS,
            renames("esm"),  # transformers 5.24 writes norms with their first names: findings/esm_norm_names.sh
            ignored("lm_head.decoder.bias") + rf"|{_FREQUENCIES}",
            r"^esm\.contact_head\.|^esm\.pooler\.",
            aliases={"lm_head.decoder.bias": "lm_head.bias"},
            constants={_FREQUENCIES: _ANGLES},
        ),
    ),
)
