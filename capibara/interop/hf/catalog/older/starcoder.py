"""StarCoder (BigCode 2023, arXiv:2305.06161) with one key and value for all heads, and StarCoder 2 (arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from capibara.interop.hf.layout.family import KEYS, Family, Values
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    LLAMA,
    LLAMA_LIKE,
    QKV,
    A,
    L,
    M,
    Names,
    linear,
    norm,
    rows,
    without,
)
from capibara.models.api import TransformerConfig

_STARCODER2 = (
    without(LLAMA, ".mlp.")
    + ATTENTION_BIASES
    + rows(
        [
            (L + "input_layernorm.bias", "d", "layers/attention_norm/bias"),
            (L + "post_attention_layernorm.bias", "d", "layers/mlp_norm/bias"),
            *linear(L + "mlp.c_fc", "f d", M + "up"),
            *linear(L + "mlp.c_proj", "d f", M + "down"),
            ("model.norm.bias", "d", "final_norm/bias"),
        ]
    )
)

_H = "transformer.h.{l}."
_BIGCODE = rows(
    [
        ("transformer.wte.weight", "v d", "embedding"),
        ("transformer.wpe.weight", "p d", "position_embedding"),
        *norm(_H + "ln_1", "layers/attention_norm"),
        *linear(_H + "attn.c_attn", "gnh d", QKV, "n"),
        *linear(_H + "attn.c_proj", "d nh", A + "out"),
        *norm(_H + "ln_2", "layers/mlp_norm"),
        *linear(_H + "mlp.c_fc", "f d", M + "up"),
        *linear(_H + "mlp.c_proj", "d f", M + "down"),
        *norm("transformer.ln_f", "final_norm"),
        ("lm_head.weight", "v d", "output"),
    ]
)


def _read_bigcode(values: Values) -> dict[str, Any]:
    scale = {} if values["scale_attn_weights"] else {"attention_scale": 1.0}
    return scale | {"num_kv_heads": 1 if values["multi_query"] else values["n_head"]}


def _write_bigcode(config: TransformerConfig) -> dict[str, Any]:
    scaled = config.attention_scale in (None, config.head_size**-0.5)
    return {"multi_query": config.kv_heads == 1, "scale_attn_weights": scaled}


FAMILIES = (
    (
        Family(
            model_type="starcoder2",
            architectures=("Starcoder2ForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"} | {"norm_eps": "norm_epsilon"},
            fixed={"norm": "layer"},
            read_keys=("head_dim",),
            defaults={"hidden_act": "gelu_pytorch_tanh", "rope_theta": 10_000.0, "norm_epsilon": 1e-5}
            | {"num_key_value_heads": 2, "use_bias": True, "sliding_window": None},
            biases={"use_bias": "all"},
            window="all",
            gated=False,
            tied=True,
        ),
        Names(_STARCODER2, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="gpt_bigcode",
            architectures=("GPTBigCodeForCausalLM",),
            keys={
                "vocab_size": "vocab_size",
                "embed_dim": "n_embd",
                "num_layers": "n_layer",
                "num_heads": "n_head",
                "mlp_dim": "n_inner",
                "norm_eps": "layer_norm_epsilon",
                "max_length": "n_positions",
            },
            fixed={"norm": "layer", "bias": "all", "positions": "learned"},
            aliases={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
            | {"max_position_embeddings": "n_positions"},
            defaults={"activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5, "n_positions": 1024}
            | {"multi_query": True, "scale_attn_weights": True},
            only={"add_cross_attention": (False,)},
            activation="activation_function",
            gated=False,
            rope=False,
            tied=True,
            divides=True,
            read=_read_bigcode,
            write=_write_bigcode,
        ),
        Names(_BIGCODE, ((r"^(?=(?:h|wte|wpe|ln_f)\.)", "transformer."),), r"\.attn\.(?:masked_)?bias$"),
    ),
)
