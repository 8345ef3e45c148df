"""MiniMax-M2 (MiniMax 2025): sigmoid scores, a correction of the choice, norms over all heads, partly rotated heads."""

from __future__ import annotations

from capibara.interop.hf.layout.family import KEYS, SILU, Family
from capibara.interop.hf.layout.rows import EXPERTS, LLAMA, LLAMA_LIKE, WHOLE_NORMS, L, M, Names, experts, rows, without

_BLOCK = "block_sparse_moe."
_MINIMAX_M2 = (
    without(LLAMA, ".mlp.")
    + WHOLE_NORMS
    + experts(_BLOCK + "gate.weight", *(f"{_BLOCK}experts.{{e}}.{name}.weight" for name in ("w1", "w3", "w2")))
    + rows([(L + _BLOCK + "e_score_correction_bias", "e", M + "correction")], EXPERTS)
)

FAMILIES = (
    (
        Family(
            model_type="minimax_m2",
            architectures=("MiniMaxM2ForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "whole"},
            defaults=SILU
            | {"rope_theta": 5_000_000.0, "head_dim": 128, "num_key_value_heads": 8, "router_aux_loss_coef": 0.001}
            | {"num_experts_per_tok": 8, "num_local_experts": 256, "output_router_logits": False},
            aliases={"num_experts": "num_local_experts"},
            experts="num_local_experts",
            moe={"score": "sigmoid", "gates": "normalized", "correction": "expert"},
            partial=True,
        ),
        Names(_MINIMAX_M2, *LLAMA_LIKE),
    ),
)
