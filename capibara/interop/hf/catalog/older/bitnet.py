"""BitNet b1.58 (Microsoft 2025, arXiv:2504.12285), its weights as floats: norms before the last projections."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA, LLAMA_LIKE, A, L, M, Names, rows

_INNER_NORMS = rows(
    [
        (L + "self_attn.attn_sub_norm.weight", "nh", A + "out_norm/scale"),
        (L + "mlp.ffn_sub_norm.weight", "f", M + "down_norm/scale"),
    ],
    {A + "out_norm/scale": "lnh", M + "down_norm/scale": "lf"},
)

FAMILIES = (
    (
        Family(
            model_type="bitnet",
            architectures=("BitNetForCausalLM", "BitnetForCausalLM"),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
            fixed={"inner_norm": "layer"},
            defaults=SILU
            | {"hidden_act": "relu2", "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
            | {"num_key_value_heads": 5},
            biases=ATTENTION_BIAS,
            divides=True,
        ),
        Names(LLAMA + ATTENTION_BIASES + _INNER_NORMS, *LLAMA_LIKE),
    ),
)
