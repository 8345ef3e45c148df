"""VaultGemma (Google 2025, arXiv:2510.15001): Gemma 2 without the norms of the branches' outputs."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, CAPS, GEMMA, KEYS, TANH_DEFAULT, Family, last_of
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA, LLAMA_LIKE, Names, renamed

_ROWS = renamed(LLAMA + ATTENTION_BIASES, ("post_attention_layernorm", "pre_feedforward_layernorm"))

FAMILIES = (
    (
        Family(
            model_type="vaultgemma",
            architectures=("VaultGemmaForCausalLM",),
            keys=KEYS | CAPS,
            fixed=GEMMA,
            defaults=TANH_DEFAULT
            | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256}
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "num_key_value_heads": 4},
            biases=ATTENTION_BIAS,
            tied=True,
            activation="hidden_activation",
            window="types",
            divides=True,
            prepare=last_of(2),
        ),
        Names(_ROWS, *LLAMA_LIKE),
    ),
)
