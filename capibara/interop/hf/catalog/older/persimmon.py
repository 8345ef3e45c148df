"""Persimmon (Adept 2023): LayerNorms of queries and keys, squared ReLU, half of each head is rotated."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import LAYER_NORM, WITHOUT_GROUPS, Family, Values
from capibara.interop.hf.layout.rows import LLAMA_LIKE, QKV, A, L, M, Names, linear, norm, rows

_PERSIMMON = rows(
    [
        ("model.embed_tokens.weight", "v d", "embedding"),
        *norm(L + "input_layernorm", "layers/attention_norm"),
        *linear(L + "self_attn.query_key_value", "nh d", QKV, "h"),
        *norm(L + "self_attn.q_layernorm", A + "query_norm", "h"),
        *norm(L + "self_attn.k_layernorm", A + "key_norm", "h"),
        *linear(L + "self_attn.dense", "d nh", A + "out"),
        *norm(L + "post_attention_layernorm", "layers/mlp_norm"),
        *linear(L + "mlp.dense_h_to_4h", "f d", M + "up"),
        *linear(L + "mlp.dense_4h_to_h", "d f", M + "down"),
        *norm("model.final_layernorm", "final_norm"),
        ("lm_head.weight", "v d", "output"),
    ]
)


def _read(values: Values) -> dict[str, Any]:
    if values.get("head_dim"):  # transformers rotates a share of it in heads of hidden_size / num_attention_heads
        raise UserError(
            f"config.json of a persimmon has head_dim = {values['head_dim']}, must be without: leave it out"
        )
    return {"qk_norm": "layer" if values["qk_layernorm"] else "none"}


FAMILIES = (
    (
        Family(
            model_type="persimmon",
            architectures=("PersimmonForCausalLM",),
            keys=WITHOUT_GROUPS | LAYER_NORM,
            fixed={"norm": "layer", "bias": "all"},
            read_keys=("head_dim",),
            defaults={"hidden_act": "relu2", "rope_theta": 10_000.0, "layer_norm_eps": 1e-5, "qk_layernorm": True},
            gated=False,
            fraction=0.5,
            partial=True,
            divides=True,
            read=_read,
            write=lambda config: {"qk_layernorm": config.qk_norm == "layer"},
        ),
        Names(_PERSIMMON, *LLAMA_LIKE),
    ),
)
