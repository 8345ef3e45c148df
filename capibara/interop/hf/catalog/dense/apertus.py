"""Apertus (Swiss AI 2025, arXiv:2509.14233): a plain MLP whose activation, xIELU, has parameters."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, with_rope
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

FAMILIES = (
    (
        Family(
            model_type="apertus",
            architectures=("ApertusForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
            fixed={"qk_norm": "head"},
            read_keys=("head_dim",),
            defaults=SILU | {"hidden_act": "xielu", "rope_theta": 12_000_000.0, "rms_norm_eps": 1e-5},
            biases=ATTENTION_BIAS,
            gated=False,
            prepare=lambda values: with_rope(values, _ROPE),
        ),
        Names(_BLOCK + _ACTIVATION, *LLAMA_LIKE),
    ),
)
