"""HunYuan dense (Tencent 2025): Llama with norms of queries and keys after rotation, and a stretched rotary base."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA, LLAMA_LIKE, QK_NORM, Names, renamed


def stretched(values: Values) -> Values:
    """What its files call dynamic, with an alpha, is a larger base at every length."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    alpha, kind = rope.get("alpha"), rope.get("rope_type") or rope.get("type")
    if not alpha or kind != "dynamic":
        return values
    size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    theta = rope.get("rope_theta", values["rope_theta"]) * alpha ** (size / (size - 2))
    return {**values, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


FAMILIES = (
    (
        Family(
            model_type="hunyuan_v1_dense",
            architectures=("HunYuanDenseV1ForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "rotated"},
            defaults=SILU | {"rms_norm_eps": 1e-5},
            biases=ATTENTION_BIAS,
            prepare=stretched,
        ),
        Names(
            LLAMA
            + ATTENTION_BIASES
            + renamed(QK_NORM, (".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm.")),
            *LLAMA_LIKE,
        ),
    ),
)
