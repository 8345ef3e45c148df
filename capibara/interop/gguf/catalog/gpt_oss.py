"""gpt-oss: gate and up of its experts are interleaved in a checkpoint, whose matrices have their inputs first."""

from __future__ import annotations

import numpy as np

from capibara.interop.gguf.layout.family import Family, Window
from capibara.interop.gguf.layout.tensors import Change, Take
from capibara.models.api import DecoderConfig

_EXPERTS = ("gate_up_proj", "down_proj")


def _experts(config: DecoderConfig) -> dict[str, tuple[Take, ...]]:
    assert config.moe is not None, "the family has experts"
    both = np.arange(2 * (config.moe.expert_dim or config.mlp_dim))
    halves = (("gate", both[::2]), ("up", both[1::2]))
    return {
        "gate_up_proj_bias": tuple(Take(f"ffn_{part}_exps.bias", indices, 1) for part, indices in halves),
        "gate_up_proj": tuple(Take(f"ffn_{part}_exps.weight", indices, 2) for part, indices in halves),
        "down_proj_bias": (Take("ffn_down_exps.bias"),),
        "down_proj": (Take("ffn_down_exps.weight"),),
    }


FAMILIES = (
    Family(
        model_type="gpt_oss",
        arch="gpt-oss",
        moe_keys={"expert_dim": "expert_feed_forward_length"},
        fixed={"activation": "clamped_swiglu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "bias": "attention"},
        moe={"bias": "all", "gates": "normalized"},
        biases=frozenset({"qkv", "out"}),
        window=Window.LISTED,
        period=2,
        changes=dict.fromkeys((f"{name}_bias" for name in _EXPERTS), Change.NONE)
        | dict.fromkeys((f"experts.{name}" for name in _EXPERTS), Change.SWAPPED),
        renamed={"self_attn.sinks": "self_attn.sinks.weight"},
        takes=_experts,
    ),
)
