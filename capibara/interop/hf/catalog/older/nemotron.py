"""Nemotron 4 and Minitron (NVIDIA 2024, arXiv:2402.16819): squared ReLU, LayerNorms whose scale is an offset from 1."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, Family
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA, LLAMA_LIKE, MLP_BIASES, L, Names, rows, without

_NEMOTRON = (
    without(LLAMA, "gate_proj")
    + ATTENTION_BIASES
    + without(MLP_BIASES, "gate_proj")
    + rows(
        [
            (L + "input_layernorm.bias", "d", "layers/attention_norm/bias"),
            (L + "post_attention_layernorm.bias", "d", "layers/mlp_norm/bias"),
            ("model.norm.bias", "d", "final_norm/bias"),
        ]
    )
)

FAMILIES = (
    (
        Family(
            model_type="nemotron",
            architectures=("NemotronForCausalLM",),
            keys=KEYS | {"norm_eps": "norm_eps"},
            fixed={"norm": "layer", "norm_scale": "offset"},
            defaults={"hidden_act": "relu2", "rope_theta": 10_000.0, "norm_eps": 1e-5},
            biases=ATTENTION_BIAS | {"mlp_bias": "mlp"},
            gated=False,
            fraction=0.5,
            partial=True,
        ),
        Names(_NEMOTRON, *LLAMA_LIKE),
    ),
)
