"""Granite's mixtures of experts (IBM 2024), with and without a shared expert, and with windows and sinks (2026)."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.interop.hf.catalog.dense.granite import (
    FACTORS,
    FACTORS_READ,
    GRANITE_SWA,
    SINKS,
    read_factors,
    write_factors,
)
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    L,
    M,
    Names,
    renamed,
    rows,
    without,
)
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
_IN_MEMORY = renamed(  # as transformers 5 has them, and stores them for the model with windows
    _GRANITEMOE,
    ("router.layer.weight", "router.weight"),
    ("input_linear.weight", "experts.gate_up_proj"),
    ("output_linear.weight", "experts.down_proj"),
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


def _shared_width(config: TransformerConfig) -> dict[str, Any]:
    moe = config.moe
    width = 0 if moe is None else moe.shared_experts * (moe.shared_dim or moe.expert_dim or config.mlp_dim)
    return {"shared_intermediate_size": width}


def _write_shared(config: TransformerConfig) -> dict[str, Any]:
    return write_factors(config) | _shared_width(config)


def _write_windows(config: TransformerConfig) -> dict[str, Any]:
    assert GRANITE_SWA.write is not None, "it has factors to write"
    return GRANITE_SWA.write(config) | _shared_width(config)


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
    (
        dataclasses.replace(
            GRANITE_SWA,
            model_type="granitemoe_swa",
            architectures=("GraniteMoeSWAForCausalLM",),
            defaults=_MOE.defaults | {"shared_intermediate_size": 0, "sliding_window": 128},
            biases=ATTENTION_BIAS,
            tied=False,
            aliases=_MOE.aliases,
            experts=_MOE.experts,
            moe=_MOE.moe,
            read_moe=_read_shared,
            write=_write_windows,
        ),
        Names(_IN_MEMORY + _SHARED + SINKS, *LLAMA_LIKE),
    ),
)
