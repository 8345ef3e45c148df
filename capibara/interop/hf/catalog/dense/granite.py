"""Granite (IBM 2024): Llama with factors of the embeddings, the residual branches, the scores and the logits."""

from __future__ import annotations

from typing import Any

from capibara.interop.hf.layout.family import KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import LLAMA_BIASED, LLAMA_LIKE, Names
from capibara.models.api import DecoderConfig, TransformerConfig


def read_factors(values: Values) -> dict[str, Any]:
    """Our factor of the logits."""
    return {"logit_scale": 1 / values["logits_scaling"]}


def write_factors(config: TransformerConfig) -> dict[str, Any]:
    """Granite's factors of the logits and the scores."""
    assert isinstance(config, DecoderConfig), "the family's kind"
    scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
    return {"logits_scaling": 1 / config.logit_scale, "attention_multiplier": scale}


FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_scale": "attention_multiplier",
}
FACTORS_READ = dict.fromkeys((*FACTORS.values(), "logits_scaling"), 1.0)

FAMILIES = (
    (
        Family(
            model_type="granite",
            architectures=("GraniteForCausalLM",),
            keys=KEYS | FACTORS,
            defaults=SILU | FACTORS_READ,
            biases={"attention_bias": "attention", "mlp_bias": "mlp"},
            divides=True,
            read=read_factors,
            write=write_factors,
        ),
        Names(LLAMA_BIASED, *LLAMA_LIKE),
    ),
)
