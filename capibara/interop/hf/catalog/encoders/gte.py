"""Encoders of texts with rotary positions: GTE (Alibaba 2024, arXiv:2407.19669) and Jina's third (arXiv:2409.10173)."""

from __future__ import annotations

from typing import Any

from capibara.interop.hf.catalog.encoders.bert import ignored
from capibara.interop.hf.catalog.encoders.modern import ROTARY
from capibara.interop.hf.catalog.encoders.roberta import HEAD, HEAD_BIAS
from capibara.interop.hf.layout.family import KEYS, LAYER_NORM, Family, Kind
from capibara.interop.hf.layout.rows import QKV, QKV_BIAS, A, M, Names, linear, norm, renamed, rows, without

_ENCODER: dict[str, Any] = dict(
    kind=Kind.ENCODER,
    keys={ours: theirs for ours, theirs in KEYS.items() if ours != "num_kv_heads"}
    | LAYER_NORM
    | {"token_types": "type_vocab_size"},
    tied=True,
)
_TRANSFORM = {"transform_activation": "gelu_exact"}


def _embeddings(stem: str) -> list[tuple[str, ...]]:
    return [
        (f"{stem}.embeddings.word_embeddings.weight", "v d", "embedding"),
        (f"{stem}.embeddings.token_type_embeddings.weight", "t d", "type_embedding"),
    ]


_GTE_LAYER = "gte.encoder.layer.{l}."
_GTE = rows(
    [
        *_embeddings("gte"),
        *norm("gte.embeddings.LayerNorm", "embedding_norm"),
        (f"{_GTE_LAYER}attention.qkv_proj.weight", "nh d", QKV, "n"),
        (f"{_GTE_LAYER}attention.qkv_proj.bias", "nh", QKV_BIAS, "n"),
        *linear(f"{_GTE_LAYER}attention.o_proj", "d nh", A + "out"),
        *norm(f"{_GTE_LAYER}attn_ln", "layers/attention_norm"),
        (f"{_GTE_LAYER}mlp.up_gate_proj.weight", "f d", f"{M}up {M}gate", "f"),
        *linear(f"{_GTE_LAYER}mlp.down_proj", "d f", M + "down"),
        *norm(f"{_GTE_LAYER}mlp_ln", "layers/mlp_norm"),
    ]
)
_JINA_LAYER = "roberta.encoder.layers.{l}."
_JINA = rows(
    [
        *_embeddings("roberta"),
        *norm("roberta.emb_ln", "embedding_norm"),
        (f"{_JINA_LAYER}mixer.Wqkv.weight", "nh d", QKV, "n"),
        (f"{_JINA_LAYER}mixer.Wqkv.bias", "nh", QKV_BIAS, "n"),
        *linear(f"{_JINA_LAYER}mixer.out_proj", "d nh", A + "out"),
        *norm(f"{_JINA_LAYER}norm1", "layers/attention_norm"),
        *linear(f"{_JINA_LAYER}mlp.fc1", "f d", M + "up"),
        *linear(f"{_JINA_LAYER}mlp.fc2", "d f", M + "down"),
        *norm(f"{_JINA_LAYER}norm2", "layers/mlp_norm"),
    ]
)
_GTE_HEAD = renamed(without(HEAD, "lm_head.bias"), ("layer_norm", "norm")) + rows(
    [("lm_head.decoder.bias", "v", "output_bias")]
)

_BARE = r"^(?=(?:embeddings|emb_ln|encoder)\.)"  # a checkpoint of the model without its head

FAMILIES = (
    (
        Family(
            model_type="gte",
            architectures=("GteForMaskedLM",),
            fixed=ROTARY | _TRANSFORM | {"bias": "attention_down"},
            defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 1, "rope_theta": 160_000.0},
            **_ENCODER,
        ),
        Names(
            _GTE + _GTE_HEAD,
            # Its first files have the name of their own code's class.
            ((_BARE, "gte."), (r"^new\.", "gte."), (r"lm_head\.layer_norm\.", "lm_head.norm.")),
            ignored(),
            r"^gte\.pooler\.|^classifier\.",
        ),
    ),
    (
        Family(
            model_type="jina_embeddings_v3",
            architectures=("JinaEmbeddingsV3ForMaskedLM",),
            fixed=ROTARY | _TRANSFORM,
            defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "type_vocab_size": 1, "rope_theta": 20_000.0},
            gated=False,
            **_ENCODER,
        ),
        Names(_JINA + HEAD, ((_BARE, "roberta."),), ignored(*HEAD_BIAS), r"^roberta\.pooler\.", aliases=HEAD_BIAS),
    ),
)
