"""Command R and Command R7B (Cohere 2024): parallel branches with one LayerNorm, rotary positions of adjacent pairs."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, Family, Values, last_of
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA, LLAMA_LIKE, A, L, Names, rows, without

_HEAD_NORMS = rows(
    [
        (L + "self_attn.q_norm.weight", "n h", A + "query_norm/scale"),
        (L + "self_attn.k_norm.weight", "n h", A + "key_norm/scale"),
    ],
    {A + "query_norm/scale": "lnh", A + "key_norm/scale": "lnh"},
)

COHERE = without(LLAMA, "post_attention_layernorm") + ATTENTION_BIASES
_KEYS = {ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}
_KEYS |= {"norm_eps": "layer_norm_eps", "logit_scale": "logit_scale"}
_DEFAULTS = {"hidden_act": "silu", "layer_norm_eps": 1e-5, "logit_scale": 0.0625}


def _prepare(values: Values) -> Values:
    return last_of(values["sliding_window_pattern"])(values)


# Its layers without a window have no rotary positions.
COHERE2 = Family(
    model_type="cohere2",
    architectures=("Cohere2ForCausalLM",),
    keys=_KEYS,
    fixed={"norm": "layer_unbiased", "residual": "shared"},
    read_keys=("head_dim",),
    defaults=_DEFAULTS | {"rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    biases=ATTENTION_BIAS,
    window="types",
    kinds={"full_attention": "unrotated", "sliding_attention": "local"},
    pairs="adjacent",
    tied=True,
    prepare=_prepare,
)

FAMILIES = (
    (
        Family(
            model_type="cohere",
            architectures=("CohereForCausalLM",),
            keys=_KEYS,
            fixed={"norm": "layer_unbiased", "residual": "shared"},
            read_keys=("head_dim", "use_qk_norm"),
            defaults=_DEFAULTS | {"rope_theta": 500_000.0},
            biases=ATTENTION_BIAS,
            pairs="adjacent",
            tied=True,
            read=lambda values: {"qk_norm": "heads" if values.get("use_qk_norm") else "none"},
            write=lambda config: {"use_qk_norm": config.qk_norm == "heads"},
        ),
        Names(COHERE + _HEAD_NORMS, *LLAMA_LIKE),
    ),
    (COHERE2, Names(COHERE, *LLAMA_LIKE)),
)
