"""Ministral (Mistral AI 2024), with a window in some layers, and Ministral 3 (2025), with queries that grow."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout import rope as hf_rope
from capibara.interop.hf.layout.family import KEYS, SILU, Family, Values, typed, with_rope
from capibara.interop.hf.layout.rows import LLAMA, LLAMA_LIKE, Names
from capibara.models.api import DecoderConfig, TransformerConfig

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GROWTH, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def read_growth(values: Values) -> dict[str, Any]:
    """The growth of the queries with their position, which rope_parameters has."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    growth, length = rope.get(_GROWTH), rope.get(_LENGTH)
    if (rope.get("rope_type") or rope.get("type")) in ("llama3", "yarn", "longrope"):
        length = values.get(_LENGTH) or length or values.get("max_position_embeddings")
    if growth is None or not length:
        raise UserError(
            f"config.json of a {values['model_type']} has rope_parameters with {_GROWTH} = {growth} and {_LENGTH} = {length}, must be "
            "numbers: copy the file again"
        )
    return {"query_growth": growth, "query_growth_length": length} if growth else {}


def _write(config: TransformerConfig) -> dict[str, Any]:
    return write_growth(config, MINISTRAL3)


def write_growth(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """The rope_parameters of a family with the growth of the queries in them."""
    assert isinstance(config, DecoderConfig), "the family's kind"
    rope = hf_rope.write(config, family)["rope_parameters"]
    length = config.query_growth_length or config.rope.original_length or config.max_length or 4096
    return {"rope_parameters": {_LENGTH: length, _GROWTH: config.query_growth} | rope}


MINISTRAL3 = Family(
    model_type="ministral3",
    architectures=("Ministral3ForCausalLM",),
    keys=KEYS,
    defaults=SILU | {"rms_norm_eps": 1e-5, "sliding_window": None, "num_key_value_heads": 8, "head_dim": 128},
    window="all",
    old_rope=False,
    prepare=lambda values: with_rope(values, _ROPE),
    read=read_growth,
    write=_write,
)

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
    (MINISTRAL3, Names(LLAMA, *LLAMA_LIKE)),
)
