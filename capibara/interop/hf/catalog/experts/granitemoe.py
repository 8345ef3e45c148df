"""Granite's mixtures of experts (IBM 2024), with and without a shared expert."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.interop.hf.catalog.dense.granite import FACTORS, FACTORS_READ, read_factors, write_factors
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, EXPERTS, LLAMA, LLAMA_LIKE, L, M, Names, rows, without
from capibara.models.api import TransformerConfig

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


def _read_shared(values: Values) -> dict[str, Any]:
    """An expert that every token meets, beside those that are chosen; 0: there is none."""
    width = values["shared_intermediate_size"]
    return {"shared_experts": 1, "shared_dim": width} if width else {}


def _write_shared(config: TransformerConfig) -> dict[str, Any]:
    moe = config.moe
    width = 0 if moe is None else moe.shared_experts * (moe.shared_dim or moe.expert_dim or config.mlp_dim)
    return write_factors(config) | {"shared_intermediate_size": width}


FAMILIES = (
    (_MOE, Names(_GRANITEMOE, *LLAMA_LIKE)),
    (
        dataclasses.replace(
            _MOE,
            model_type="granitemoeshared",
            architectures=("GraniteMoeSharedForCausalLM",),
            defaults=_MOE.defaults | {"shared_intermediate_size": 0},
            read_moe=_read_shared,
            write=_write_shared,
        ),
        Names(_GRANITEMOE + _SHARED, *LLAMA_LIKE),
    ),
)
