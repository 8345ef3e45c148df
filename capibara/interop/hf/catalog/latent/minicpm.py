"""MiniCPM3 (OpenBMB 2024, arXiv:2404.06395): latent attention, and factors that a narrower model was tuned with."""

from __future__ import annotations

import math
from typing import Any

from capibara.interop.hf.catalog.latent.deepseek import LATENT_ROWS, LATENT_SIZE_KEYS, MLP, read_latent, write_latent
from capibara.interop.hf.layout.family import NO_BIAS, SILU, WITHOUT_GROUPS, Family, Values
from capibara.interop.hf.layout.rows import LLAMA_LIKE, Names
from capibara.models.api import DecoderConfig, TransformerConfig


def _prepare(values: Values) -> Values:
    """The sizes that null stands for: those with which a factor is 1, and heads of values as wide as the model together."""
    width, heads, count = (values.get(key) or 1 for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    usual = {"v_head_dim": width // heads, "scale_depth": math.sqrt(count), "dim_model_base": width}
    return {**values, **{key: size for key, size in usual.items() if values.get(key) is None}}


def _read(values: Values) -> dict[str, Any]:
    return read_latent(values) | {
        "residual_multiplier": values["scale_depth"] / math.sqrt(values["num_hidden_layers"]),
        "logit_scale": values["dim_model_base"] / values["hidden_size"],
    }


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    return write_latent(config) | {
        "scale_depth": config.residual_multiplier * math.sqrt(config.num_layers),
        "dim_model_base": round(config.logit_scale * config.embed_dim),
    }


FAMILIES = (
    (
        Family(
            model_type="minicpm3",
            architectures=("MiniCPM3ForCausalLM",),
            keys=WITHOUT_GROUPS | {"embedding_multiplier": "scale_emb"},
            defaults=SILU
            | {"rms_norm_eps": 1e-5, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64}
            | {"qk_rope_head_dim": 32, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
            only=NO_BIAS | {"mlp_bias": (False, None)},
            read_keys=LATENT_SIZE_KEYS,
            mscale=True,
            tied=True,
            divides=True,
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(LATENT_ROWS + MLP, *LLAMA_LIKE),
    ),
)
