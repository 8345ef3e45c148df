"""Apertus (Swiss AI 2025, arXiv:2509.14233) and Apertus 1.5 (2026): a plain MLP whose activation, xIELU, has parameters.

A head of Apertus 1.5 that has fewer rows than the embedding is not read.
"""

from __future__ import annotations

import dataclasses

from capibara.core.types import UserError
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


def _prepare_text(values: Values) -> Values:
    """The same for Apertus 1.5.

    Raises:
      UserError: the head has fewer rows than the embedding.
    """
    rows, vocabulary = values.get(_PRUNED), values.get("vocab_size")
    if rows is not None and rows != vocabulary:
        raise UserError(
            f"config.json has {_PRUNED} = {rows}, must be without or vocab_size ({vocabulary}): a head without some tokens is not "
            "read, take a model whose head is whole"
        )
    return with_rope(values, _ROPE)


FAMILIES = (
    (_APERTUS, Names(_BLOCK + _ACTIVATION, *LLAMA_LIKE)),
    (
        dataclasses.replace(
            _APERTUS,
            model_type="apertus1p5_text",
            architectures=("Apertus1p5TextForCausalLM",),
            read_keys=(*_APERTUS.read_keys, _PRUNED),
            prepare=_prepare_text,
        ),
        Names(_BLOCK + _ACTIVATION, *LLAMA_LIKE, r"^(?:model\.)?(?:vision_tokenizer|audio_tokenizer)\."),
    ),
)
