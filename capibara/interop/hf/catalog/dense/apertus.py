"""Apertus (Swiss AI 2025, arXiv:2509.14233) and Apertus 1.5 (2026): a plain MLP whose activation, xIELU, has parameters.

Heads of Apertus 1.5 may lack the tokens that images and sounds are read as.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values, with_rope
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    L,
    M,
    Names,
    renamed,
    rows,
    without,
)
from capibara.models.api import DecoderConfig, TransformerConfig

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_BLOCK = renamed(
    without(LLAMA, "gate_proj") + ATTENTION_BIASES + QK_NORM,
    ("input_layernorm", "attention_layernorm"),
    ("post_attention_layernorm", "feedforward_layernorm"),
)
_ACTIVATION = rows(
    [
        (L + "mlp.act_fn.alpha_p", "k", M + "activation/above"),
        (L + "mlp.act_fn.alpha_n", "k", M + "activation/below"),
        (L + "mlp.act_fn.beta", "", M + "activation/slope"),
        (L + "mlp.act_fn.eps", "", M + "activation/most"),
    ],
    {
        M + "activation/above": "lk",
        M + "activation/below": "lk",
        M + "activation/slope": "l",
        M + "activation/most": "l",
    },
)

_APERTUS = Family(
    model_type="apertus",
    architectures=("ApertusForCausalLM",),
    keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
    fixed={"qk_norm": "head"},
    read_keys=("head_dim",),
    defaults=SILU | {"hidden_act": "xielu", "rope_theta": 12_000_000.0, "rms_norm_eps": 1e-5},
    biases=ATTENTION_BIAS,
    gated=False,
    prepare=lambda values: with_rope(values, _ROPE),
)
_PRUNED = "output_vocab_size"


def _read_text(values: Values) -> dict[str, Any]:
    rows = values.get(_PRUNED)
    return {"output_rows": None if rows == values["vocab_size"] else rows}


def _write_text(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    return {_PRUNED: config.output_rows}


FAMILIES = (
    (_APERTUS, Names(_BLOCK + _ACTIVATION, *LLAMA_LIKE)),
    (
        dataclasses.replace(
            _APERTUS,
            model_type="apertus1p5_text",
            architectures=("Apertus1p5TextForCausalLM",),
            read_keys=(*_APERTUS.read_keys, _PRUNED),
            mixer_keys={"output_rows": _PRUNED},
            read=_read_text,
            write=_write_text,
        ),
        Names(_BLOCK + _ACTIVATION, *LLAMA_LIKE, r"^(?:model\.)?(?:vision_tokenizer|audio_tokenizer)\."),
    ),
)
