"""Sizes and positions that the cases of several families share."""

from __future__ import annotations

from typing import Any

VOCAB = 96
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
RMS = dict(SIZES, rms_norm_eps=1e-5)
LAYER = dict(SIZES, layer_norm_eps=1e-5)


def rope(kind: str = "default", theta: float = 10_000.0, **rest: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **rest}
