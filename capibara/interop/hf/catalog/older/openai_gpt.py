"""GPT (OpenAI 2018): norms after the residual sums, and none after the last layer."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import QKV, A, M, Names, linear, norm, rows
from capibara.models.api import TransformerConfig

_H = "transformer.h.{l}."
_GPT = rows(
    [
        ("transformer.tokens_embed.weight", "v d", "embedding"),
        ("transformer.positions_embed.weight", "p d", "position_embedding"),
        *linear(_H + "attn.c_attn", "d nh", QKV, "n", out=1),
        *linear(_H + "attn.c_proj", "nh d", A + "out", out=1),
        *norm(_H + "ln_1", "layers/attention_norm"),
        *linear(_H + "mlp.c_fc", "d f", M + "up", out=1),
        *linear(_H + "mlp.c_proj", "f d", M + "down", out=1),
        *norm(_H + "ln_2", "layers/mlp_norm"),
        ("lm_head.weight", "v d", "output"),
    ]
)
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}  # its gelu is the approximation


def _read(values: Values) -> dict[str, Any]:
    if values["afn"] not in _ACTIVATIONS:
        raise UserError(f"config.json has afn = {values['afn']!r}, must be one of {', '.join(_ACTIVATIONS)}")
    return {"activation": _ACTIVATIONS[values["afn"]]}


def _write(config: TransformerConfig) -> dict[str, Any]:
    return {"afn": str(config.activation)}


FAMILIES = (
    (
        Family(
            model_type="openai-gpt",
            architectures=("OpenAIGPTLMHeadModel",),
            keys={
                "vocab_size": "vocab_size",
                "embed_dim": "n_embd",
                "num_layers": "n_layer",
                "num_heads": "n_head",
                "norm_eps": "layer_norm_epsilon",
                "max_length": "n_positions",
            },
            fixed={"norm": "layer", "bias": "all", "positions": "learned", "norm_placement": "post"}
            | {"final_norm": "none", "activation": "gelu"},
            aliases={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
            | {"max_position_embeddings": "n_positions"},
            defaults={"afn": "gelu", "layer_norm_epsilon": 1e-5, "n_positions": 512},
            activation="",
            gated=False,
            rope=False,
            tied=True,
            divides=True,
            read=_read,
            write=_write,
        ),
        Names(
            _GPT,
            ((r"^(?=(?:h|tokens_embed|positions_embed)\.)", "transformer."),),
            r"\.attn\.bias$|position_ids$",
        ),
    ),
)
