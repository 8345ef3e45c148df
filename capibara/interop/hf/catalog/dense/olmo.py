"""OLMo 2 (AI2 2024, arXiv:2501.00656): norms of the branches' outputs, and of all queries and keys together."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA, LLAMA_LIKE, A, L, Names, rows, without

_OUTPUT_NORMS = rows(
    [
        (L + "post_attention_layernorm.weight", "d", "layers/attention_post_norm/scale"),
        (L + "post_feedforward_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
    ]
)
_WHOLE_NORMS = rows(
    [
        (L + "self_attn.q_norm.weight", "nh", A + "query_norm/scale"),
        (L + "self_attn.k_norm.weight", "nh", A + "key_norm/scale"),
    ],
    {A + "query_norm/scale": "lnh", A + "key_norm/scale": "lnh"},
)
_OLMO2 = without(LLAMA, "layernorm") + ATTENTION_BIASES + _OUTPUT_NORMS + _WHOLE_NORMS

FAMILIES = (
    (
        Family(
            model_type="olmo2",
            architectures=("Olmo2ForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
            fixed={"norm_placement": "output", "qk_norm": "whole"},
            read_keys=("head_dim",),
            defaults=SILU | {"rms_norm_eps": 1e-5},
            biases=ATTENTION_BIAS,
        ),
        Names(_OLMO2, *LLAMA_LIKE),
    ),
)
