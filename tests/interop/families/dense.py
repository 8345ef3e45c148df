"""Cases of interop/hf/catalog/dense."""

from __future__ import annotations

from typing import Any

from sizes import LAYER, RMS, rope

CASES: dict[str, dict[str, Any]] = {
    "cohere": dict(LAYER, model_type="cohere", logit_scale=0.0625, use_qk_norm=True, tie_word_embeddings=True)
    | {"rope_parameters": rope(theta=500.0)},
    "granite": dict(RMS, model_type="granite", embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0)
    | {"attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True, "rope_parameters": rope()},
    "olmo2": dict(RMS, model_type="olmo2", rope_parameters=rope(theta=500.0)),
}
