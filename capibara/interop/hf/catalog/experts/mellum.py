"""Mellum 2 (JetBrains 2026): Qwen 3's mixture of experts, whose layers with a window have rotary positions of their own."""

from __future__ import annotations

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values, rope_by_kind, typed
from capibara.interop.hf.layout.rows import LLAMA_LIKE, Names
from capibara.interop.hf.tables import QWEN3_MOE

_ROPE = {"full_attention": {"rope_theta": 500_000.0}, "sliding_attention": {"rope_theta": 10_000.0}}


def _prepare(values: Values) -> Values:
    """Checks that every layer has experts, and every kind of layer its rotary positions."""
    for kind in values.get("mlp_layer_types") or ():
        if kind != "sparse":
            raise UserError(
                f"config.json has mlp_layer_types {kind!r}, must be 'sparse' for all layers: take another model"
            )
    return typed(rope_by_kind(values, _ROPE), lambda _: True)


FAMILIES = (
    (
        Family(
            model_type="mellum",
            architectures=("MellumForCausalLM",),
            keys=KEYS | {"mlp_dim": "moe_intermediate_size"},
            read_keys=("mlp_layer_types",),
            fixed={"qk_norm": "head"},
            defaults=SILU
            | {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024, "moe_intermediate_size": 896}
            | {"rope_theta": 500_000.0, "rope_local_base_freq": 10_000.0}
            | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True},
            aliases={"num_local_experts": "num_experts"},
            biases=ATTENTION_BIAS,
            window="types",
            rope_by_layer=True,
            old_rope=False,
            experts="num_experts",
            prepare=_prepare,
        ),
        Names(QWEN3_MOE, *LLAMA_LIKE),
    ),
)
