"""GLM-4 (Zhipu 2024, arXiv:2406.12793) and GLM-4-0414: half of each head is rotated, in adjacent pairs."""

from __future__ import annotations

from capibara.interop.hf.layout.family import KEYS, SILU, Family
from capibara.interop.hf.layout.rows import LLAMA_LIKE, QWEN2, L, M, Names, rows, without

_GLM = without(QWEN2, "gate_proj", "up_proj") + rows([(L + "mlp.gate_up_proj.weight", "f d", f"{M}gate {M}up", "f")])
OUTPUT_NORMS = rows(
    [
        (L + "post_self_attn_layernorm.weight", "d", "layers/attention_post_norm/scale"),
        (L + "post_mlp_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
    ]
)
_DEFAULTS = SILU | {"rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}

FAMILIES = (
    (
        Family(
            model_type="glm",
            architectures=("GlmForCausalLM",),
            keys=KEYS,
            defaults=_DEFAULTS,
            biases={"attention_bias": "qkv"},
            pairs="adjacent",
            fraction=0.5,
            partial=True,
        ),
        Names(_GLM, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="glm4",
            architectures=("Glm4ForCausalLM",),
            keys=KEYS,
            fixed={"norm_placement": "sandwich"},
            defaults=_DEFAULTS,
            biases={"attention_bias": "qkv"},
            pairs="adjacent",
            fraction=0.5,
            partial=True,
        ),
        Names(_GLM + OUTPUT_NORMS, *LLAMA_LIKE),
    ),
)
