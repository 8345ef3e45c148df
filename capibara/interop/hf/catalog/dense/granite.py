"""Granite (IBM 2024): Llama with factors of the embeddings, the residual branches, the scores and the logits."""

from __future__ import annotations

from typing import Any

from capibara.interop.hf.layout.family import KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import LLAMA_BIASED, LLAMA_LIKE, Names
from capibara.models.api import DecoderConfig, TransformerConfig


def _read(values: Values) -> dict[str, Any]:
    return {"logit_scale": 1 / values["logits_scaling"]}


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
    return {"logits_scaling": 1 / config.logit_scale, "attention_multiplier": scale}


_KEYS = KEYS | {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_scale": "attention_multiplier",
}

FAMILIES = (
    (
        Family(
            model_type="granite",
            architectures=("GraniteForCausalLM",),
            keys=_KEYS,
            defaults=SILU
            | {
                "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "logits_scaling": 1.0,
            },
            biases={"attention_bias": "attention", "mlp_bias": "mlp"},
            divides=True,
            read=_read,
            write=_write,
        ),
        Names(LLAMA_BIASED, *LLAMA_LIKE),
    ),
)
