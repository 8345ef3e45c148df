"""XLM (Lample and Conneau 2019, arXiv:1901.07291) of one language, and FlauBERT's base (Le et al. 2019, arXiv:1912.05372)."""

from __future__ import annotations

from typing import Any

from capibara.interop.hf.catalog.encoders.bert import ENCODER, encoder, ignored
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import A, M, Names, linear, norm, rows
from capibara.models.api import TransformerConfig

_HEADS = (("q", "query"), ("k", "key"), ("v", "value"))
_T = "transformer."
_ROWS = rows(
    [
        (f"{_T}embeddings.weight", "v d", "embedding"),
        (f"{_T}position_embeddings.weight", "p d", "position_embedding"),
        *norm(f"{_T}layer_norm_emb", "embedding_norm"),
        *(row for name, ours in _HEADS for row in linear(f"{_T}attentions.{{l}}.{name}_lin", "nh d", A + ours)),
        *linear(f"{_T}attentions.{{l}}.out_lin", "d nh", A + "out"),
        *norm(f"{_T}layer_norm1.{{l}}", "layers/attention_norm"),
        *linear(f"{_T}ffns.{{l}}.lin1", "f d", M + "up"),
        *linear(f"{_T}ffns.{{l}}.lin2", "d f", M + "down"),
        *norm(f"{_T}layer_norm2.{{l}}", "layers/mlp_norm"),
        ("pred_layer.proj.weight", "v d", "output"),
        ("pred_layer.proj.bias", "v", "output_bias"),
    ]
)
_BARE = r"^(?=(?:embeddings|position_embeddings|layer_norm_emb|attentions|layer_norm1|ffns|layer_norm2)\.)"


def _read(values: Values) -> dict[str, Any]:
    return {"activation": "gelu_exact" if values["gelu_activation"] else "relu"}


def _write(config: TransformerConfig) -> dict[str, Any]:
    return {"gelu_activation": encoder(config).activation == "gelu_exact"}


def _family(model_type: str, architecture: str, **only: tuple[object, ...]) -> Family:
    keys = {"vocab_size": "vocab_size", "embed_dim": "emb_dim", "num_layers": "n_layers", "num_heads": "n_heads"}
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        keys=keys | {"norm_eps": "layer_norm_eps", "max_length": "max_position_embeddings"},
        fixed={"token_types": 0, "transform": "none", "activation": "gelu_exact"},
        defaults={"max_position_embeddings": 512, "layer_norm_eps": 1e-12, "gelu_activation": True},
        # Of generation, of several languages with embeddings, and of a head with a vocabulary in parts.
        only={"causal": (False,), "n_langs": (1,), "asm": (False,), "is_encoder": (True,)} | only,
        aliases={"hidden_size": "emb_dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
        | {"n_words": "vocab_size"},
        activation="",
        read=_read,
        write=_write,
        **ENCODER,
    )


_NAMES = Names(_ROWS, ((_BARE, _T),), ignored())

FAMILIES = (
    (_family("xlm", "XLMWithLMHeadModel"), _NAMES),
    (_family("flaubert", "FlaubertWithLMHeadModel", pre_norm=(False,)), _NAMES),
)
