"""Granite's mixtures of experts (IBM 2024), with and without a shared expert."""

from __future__ import annotations

from capibara.interop.hf.catalog.dense.granite import FACTORS, FACTORS_READ, read_factors, write_factors
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, EXPERTS, LLAMA, LLAMA_LIKE, L, M, Names, rows, without

_GRANITEMOE = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + rows(
        [
            (L + "block_sparse_moe.router.layer.weight", "e d", M + "router"),
            (L + "block_sparse_moe.input_linear.weight", "e f d", f"{M}gate {M}up", "f"),
            (L + "block_sparse_moe.output_linear.weight", "e d f", M + "down"),
        ],
        EXPERTS,
    )
)
_SHARED = rows(
    [
        (L + "shared_mlp.input_linear.weight", "f d", f"{M}shared_gate {M}shared_up", "f"),
        (L + "shared_mlp.output_linear.weight", "d f", M + "shared_down"),
    ],
    EXPERTS,
)
_MOE = Family(
    model_type="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    keys=KEYS | FACTORS,
    defaults=SILU
    | FACTORS_READ
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    biases=ATTENTION_BIAS,
    divides=True,
    aliases={"num_experts": "num_local_experts"},
    experts="num_local_experts",
    moe={"gates": "normalized"},
    read=read_factors,
    write=write_factors,
)

FAMILIES = ((_MOE, Names(_GRANITEMOE, *LLAMA_LIKE)),)
