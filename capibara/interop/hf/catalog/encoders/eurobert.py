"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500): Llama's layers, that see whole rows, and a head without a transform."""

from __future__ import annotations

from typing import Any

from capibara.interop.hf.catalog.encoders.bert import encoder
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Kind, Values
from capibara.interop.hf.layout.rows import LLAMA_BIASED, LLAMA_LIKE, Names, rows
from capibara.models.api import TransformerConfig


def _read(values: Values) -> dict[str, Any]:
    """The head has a bias where MLPs have one."""
    return {"head_bias": "vocab" if values.get("mlp_bias") else "none"}


def _write(config: TransformerConfig) -> dict[str, Any]:
    return {"mlp_bias": encoder(config).head_bias == "vocab"}


FAMILIES = (
    (
        Family(
            model_type="eurobert",
            kind=Kind.ENCODER,
            architectures=("EuroBertForMaskedLM",),
            keys=KEYS,
            fixed={"norm": "rms", "norm_placement": "pre", "positions": "rope", "max_length": None, "token_types": 0}
            | {"embedding_norm": "none", "transform": "none", "bias": "none"},
            defaults=SILU | {"rms_norm_eps": 1e-5},
            biases=ATTENTION_BIAS | {"mlp_bias": "mlp"},
            divides=True,
            read=_read,
            write=_write,
        ),
        Names(LLAMA_BIASED + rows([("lm_head.bias", "v", "output_bias")]), *LLAMA_LIKE),
    ),
)
