"""The tiny mixtures of experts whose answers moe.json and peft_experts.json hold."""

from capibara.models.api import DecoderConfig, Moe
from capibara.models.layers.rope import Rope

_SIZES = dict(vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, norm_eps=1e-5, head="separate")
CONFIGS = {
    "mixtral": DecoderConfig(**_SIZES, mlp_dim=48, dtype="float32", moe=Moe(num_experts=8, top_k=2)),
    "qwen3_moe": DecoderConfig(
        **_SIZES,
        mlp_dim=24,
        head_dim=16,
        qk_norm="head",
        rope=Rope(theta=1e6),
        moe=Moe(num_experts=8, top_k=4),
        dtype="float32",
    ),
    "gpt_oss": DecoderConfig(
        **_SIZES,
        mlp_dim=64,
        head_dim=16,
        bias="attention",
        activation="clamped_swiglu",
        swiglu_alpha=1.5,
        swiglu_limit=0.5,
        attention_sinks="head",
        layer_pattern=("local", "global"),
        window=8,
        rope=Rope(
            theta=500.0,
            scaling="yarn",
            factor=4.0,
            original_length=64,
            beta_fast=2.0,
            beta_slow=0.25,
            yarn_bounds="exact",
        ),
        moe=Moe(num_experts=8, top_k=3, bias="all"),
        dtype="float32",
    ),
}
