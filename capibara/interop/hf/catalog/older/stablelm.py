"""StableLM (Stability AI 2024, arXiv:2402.17834): Llama with LayerNorms, of queries and keys too in its larger models."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import KEYS, LAYER_NORM, Family, Values
from capibara.interop.hf.layout.rows import LLAMA, LLAMA_LIKE, QWEN2, A, L, Names, rows
from capibara.models.api import TransformerConfig

_LAYER_NORMS = rows(
    [
        (L + "input_layernorm.bias", "d", "layers/attention_norm/bias"),
        (L + "post_attention_layernorm.bias", "d", "layers/mlp_norm/bias"),
        ("model.norm.bias", "d", "final_norm/bias"),
    ]
)
_HEAD_NORMS = rows(
    [
        (L + "self_attn.q_layernorm.norms.{n}.weight", "h", A + "query_norm/scale"),
        (L + "self_attn.k_layernorm.norms.{n}.weight", "h", A + "key_norm/scale"),
    ],
    {A + "query_norm/scale": "lnh", A + "key_norm/scale": "lnh"},
)


def _read(values: Values) -> dict[str, Any]:
    if values.get("head_dim"):  # transformers rotates a share of it in heads of hidden_size / num_attention_heads
        raise UserError(f"config.json of a stablelm has head_dim = {values['head_dim']}, must be without: leave it out")
    return {
        "residual": "shared" if values["use_parallel_residual"] else "sequential",
        "qk_norm": "heads" if values["qk_layernorm"] else "none",
    }


def _write(config: TransformerConfig) -> dict[str, Any]:
    return {"use_parallel_residual": config.residual == "shared", "qk_layernorm": config.qk_norm == "heads"}


FAMILIES = (
    (
        Family(
            model_type="stablelm",
            architectures=("StableLmForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"} | LAYER_NORM,
            fixed={"norm": "layer"},
            read_keys=("head_dim",),
            defaults={"hidden_act": "silu", "rope_theta": 10_000.0, "layer_norm_eps": 1e-5, "num_key_value_heads": 32}
            | {"use_parallel_residual": False, "qk_layernorm": False},
            biases={"use_qkv_bias": "qkv"},
            fraction=0.25,
            partial=True,
            divides=True,
            read=_read,
            write=_write,
        ),
        Names(LLAMA + QWEN2[len(LLAMA) :] + _LAYER_NORMS + _HEAD_NORMS, *LLAMA_LIKE),
    ),
)
