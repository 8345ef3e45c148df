"""Ministral (Mistral AI 2024): Mistral with a window in some layers."""

from __future__ import annotations

from capibara.interop.hf.layout.family import KEYS, SILU, Family, typed
from capibara.interop.hf.layout.rows import LLAMA, LLAMA_LIKE, Names

FAMILIES = (
    (
        Family(
            model_type="ministral",
            architectures=("MinistralForCausalLM",),
            keys=KEYS,
            defaults=SILU | {"sliding_window": 4096, "num_key_value_heads": 8},
            window="types",
            prepare=lambda values: typed(values, lambda _: False),
        ),
        Names(LLAMA, *LLAMA_LIKE),
    ),
)
