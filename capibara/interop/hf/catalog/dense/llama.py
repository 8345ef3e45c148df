"""Llama's block with other biases, activations, norms, windows or names of its keys."""

from __future__ import annotations

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import (
    ATTENTION_BIAS,
    KEYS,
    LAYER_NORM,
    SILU,
    Family,
    Values,
    first_of,
    with_rope,
)
from capibara.interop.hf.layout.rows import LLAMA_BIASED, LLAMA_LIKE, Names, rows, without

BIASES = ATTENTION_BIAS | {"mlp_bias": "mlp"}
_LAYER_NORM_BIASES = rows(
    [
        ("model.layers.{l}.input_layernorm.bias", "d", "layers/attention_norm/bias"),
        ("model.layers.{l}.post_attention_layernorm.bias", "d", "layers/mlp_norm/bias"),
        ("model.norm.bias", "d", "final_norm/bias"),
    ]
)
_CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _square(values: Values) -> Values:
    """Checks that heads are as wide as the model together: transformers' output projection of Helium is square."""
    size, heads, width = (values.get(key) for key in ("head_dim", "num_attention_heads", "hidden_size"))
    if size and heads and width and size * heads != width:
        raise UserError(
            f"config.json of a helium has head_dim = {size} and num_attention_heads = {heads}, their product must be "
            f"hidden_size = {width}: copy the file again"
        )
    return values


def _alike(values: Values) -> Values:
    """Checks that there are biases everywhere or nowhere, as transformers does."""
    if bool(values.get("attention_bias")) != bool(values.get("mlp_bias")):
        raise UserError(
            f"config.json of an internlm3 has qkv_bias (attention_bias) = {values.get('attention_bias')} and bias (mlp_bias) "
            f"= {values.get('mlp_bias')}, must be the same: take another model"
        )
    return values


def _whole(values: Values) -> Values:
    """Checks that there are no windows or clipped heads, as transformers does."""
    for key in ("clip_qkv", "use_sliding_window"):
        if values.get(key):
            raise UserError(
                f"config.json of an iquestcoder has {key} = {values[key]}, must be without: take another model"
            )
    return values


def _cwm(values: Values) -> Values:
    return first_of(4)({**with_rope(values, _CWM_ROPE), "sliding_window": values.get("sliding_window") or None})


FAMILIES = (
    (
        # AFM (Arcee 2025): a plain MLP of squared ReLUs.
        Family(
            model_type="arcee",
            architectures=("ArceeForCausalLM",),
            keys=KEYS,
            defaults=SILU | {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
            biases=BIASES,
            gated=False,
            divides=True,
        ),
        Names(without(LLAMA_BIASED, "gate_proj"), *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="seed_oss",
            architectures=("SeedOssForCausalLM",),
            keys=KEYS,
            defaults=SILU | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
            biases={"attention_bias": "qkv", "attention_out_bias": "out", "mlp_bias": "mlp"},
        ),
        Names(LLAMA_BIASED, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="helium",
            architectures=("HeliumForCausalLM",),
            keys=KEYS,
            defaults=SILU | {"rope_theta": 100_000.0, "rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128},
            biases={"attention_bias": "qkv", "mlp_bias": "mlp"},
            pairs="adjacent",
            prepare=_square,
        ),
        Names(without(LLAMA_BIASED, "o_proj.bias"), *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="ernie4_5",
            architectures=("Ernie4_5ForCausalLM",),
            keys=KEYS,
            defaults=SILU | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128},
            biases={"use_bias": "all"},
            pairs="adjacent",
            tied=True,
        ),
        Names(LLAMA_BIASED, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="internlm3",
            architectures=("InternLM3ForCausalLM", "LlamaForCausalLM"),  # transformers computes it by Llama's class
            keys=KEYS,
            defaults=SILU | {"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128},
            aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
            biases=BIASES,
            divides=True,
            prepare=_alike,
        ),
        Names(LLAMA_BIASED, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="iquestcoder",
            architectures=("IQuestCoderForCausalLM", "LlamaForCausalLM"),
            keys=KEYS,
            read_keys=("clip_qkv", "use_sliding_window"),
            defaults=SILU | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128},
            biases=BIASES,
            divides=True,
            prepare=_whole,
        ),
        Names(LLAMA_BIASED, *LLAMA_LIKE),
    ),
    (
        # Code World Model (Meta 2025): three layers of four have a window.
        Family(
            model_type="cwm",
            architectures=("CwmForCausalLM",),
            keys=KEYS,
            defaults=SILU
            | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}
            | {"sliding_window": 8192},
            biases={"mlp_bias": "mlp"},
            window="types",
            divides=True,
            prepare=_cwm,
        ),
        Names(without(LLAMA_BIASED, "self_attn.q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"), *LLAMA_LIKE),
    ),
    (
        # Jais 2 (2025): LayerNorms and a plain MLP, with biases everywhere.
        Family(
            model_type="jais2",
            architectures=("Jais2ForCausalLM",),
            keys=KEYS | LAYER_NORM,
            fixed={"norm": "layer"},
            defaults={"hidden_act": "relu2", "rope_theta": 10_000.0, "layer_norm_eps": 1e-5}
            | {"attention_bias": True, "mlp_bias": True},
            biases=BIASES,
            gated=False,
            divides=True,
        ),
        Names(without(LLAMA_BIASED, "gate_proj") + _LAYER_NORM_BIASES, *LLAMA_LIKE),
    ),
)
