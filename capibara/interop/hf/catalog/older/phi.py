"""Phi 1, 1.5 and 2 (Microsoft 2023, arXiv:2306.11644): parallel branches with one LayerNorm, a head with a bias."""

from __future__ import annotations

from capibara.interop.hf.layout.family import KEYS, LAYER_NORM, Family
from capibara.interop.hf.layout.rows import LLAMA_LIKE, A, L, M, Names, linear, norm, rows

_PHI = rows(
    [
        ("model.embed_tokens.weight", "v d", "embedding"),
        *norm(L + "input_layernorm", "layers/attention_norm"),
        *linear(L + "self_attn.q_proj", "nh d", A + "query"),
        *linear(L + "self_attn.k_proj", "nh d", A + "key"),
        *linear(L + "self_attn.v_proj", "nh d", A + "value"),
        *norm(L + "self_attn.q_layernorm", A + "query_norm", "h"),
        *norm(L + "self_attn.k_layernorm", A + "key_norm", "h"),
        *linear(L + "self_attn.dense", "d nh", A + "out"),
        *linear(L + "mlp.fc1", "f d", M + "up"),
        *linear(L + "mlp.fc2", "d f", M + "down"),
        *norm("model.final_layernorm", "final_norm"),
        ("lm_head.weight", "v d", "output"),
        ("lm_head.bias", "v", "output_bias"),
    ]
)

FAMILIES = (
    (
        Family(
            model_type="phi",
            architectures=("PhiForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"} | LAYER_NORM,
            fixed={"norm": "layer", "bias": "all", "residual": "shared", "head_bias": "vocab"},
            read_keys=("head_dim",),
            defaults={"hidden_act": "gelu_new", "rope_theta": 10_000.0, "layer_norm_eps": 1e-5, "qk_layernorm": False},
            gated=False,
            fraction=0.5,
            partial=True,
            read=lambda values: {"qk_norm": "layer" if values["qk_layernorm"] else "none"},
            write=lambda config: {"qk_layernorm": config.qk_norm == "layer"},
        ),
        Names(_PHI, *LLAMA_LIKE),
    ),
)
