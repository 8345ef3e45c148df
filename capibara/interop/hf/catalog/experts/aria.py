"""Aria's language model (Rhymes 2024, arXiv:2410.05993): Llama with experts, whose weights are stored turned around."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, ONLY_SILU, SILU, Family
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    L,
    M,
    Names,
    rows,
    shared_experts,
    without,
)

_ARIA = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + shared_experts("mlp.shared_experts")
    + rows(
        [
            (L + "mlp.router.weight", "e d", M + "router"),
            (L + "mlp.experts.fc1.weight", "e d f", f"{M}gate {M}up", "f"),
            (L + "mlp.experts.fc2.weight", "e f d", M + "down"),
        ],
        EXPERTS,
    )
)

FAMILIES = (
    (
        Family(
            model_type="aria_text",
            architectures=("AriaTextForCausalLM",),
            keys=KEYS,
            defaults=SILU
            | {"intermediate_size": 4096, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
            # Experts have no biases, and only shared ones another activation.
            only=ONLY_SILU | {"mlp_bias": (False, None)},
            biases=ATTENTION_BIAS,
            divides=True,
            experts="moe_num_experts",
            moe={"gates": "normalized"},
            moe_keys={"top_k": "moe_topk", "shared_experts": "moe_num_shared_experts"},
            prepare=lambda values: {**values, "num_experts_per_tok": values["moe_topk"]},
        ),
        Names(_ARIA, *LLAMA_LIKE),
    ),
)
