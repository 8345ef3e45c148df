"""Command R (Cohere 2024): parallel branches with one LayerNorm, rotary positions of adjacent pairs."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, Family
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA, LLAMA_LIKE, A, L, Names, rows, without

_HEAD_NORMS = rows(
    [
        (L + "self_attn.q_norm.weight", "n h", A + "query_norm/scale"),
        (L + "self_attn.k_norm.weight", "n h", A + "key_norm/scale"),
    ],
    {A + "query_norm/scale": "lnh", A + "key_norm/scale": "lnh"},
)

FAMILIES = (
    (
        Family(
            model_type="cohere",
            architectures=("CohereForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}
            | {"norm_eps": "layer_norm_eps", "logit_scale": "logit_scale"},
            fixed={"norm": "layer_unbiased", "residual": "shared"},
            read_keys=("head_dim", "use_qk_norm"),
            defaults={"hidden_act": "silu", "rope_theta": 500_000.0, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
            biases=ATTENTION_BIAS,
            pairs="adjacent",
            tied=True,
            read=lambda values: {"qk_norm": "heads" if values.get("use_qk_norm") else "none"},
            write=lambda config: {"use_qk_norm": config.qk_norm == "heads"},
        ),
        Names(without(LLAMA, "post_attention_layernorm") + ATTENTION_BIASES + _HEAD_NORMS, *LLAMA_LIKE),
    ),
)
