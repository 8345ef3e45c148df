"""nanochat (Karpathy 2025): norms without parameters, of embeddings and of rotated queries and keys, and squared ReLUs."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, Family
from capibara.interop.hf.layout.rows import ATTENTION_BIASES, LLAMA, LLAMA_LIKE, Names, renamed, without

_ROWS = renamed(without(LLAMA, "norm", "gate_proj"), (".up_proj.", ".fc1."), (".down_proj.", ".fc2."))

FAMILIES = (
    (
        Family(
            model_type="nanochat",
            architectures=("NanoChatForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}
            | {"logit_soft_cap": "final_logit_softcapping"},
            fixed={"norm_scale": "none", "embedding_norm": "layer", "qk_norm": "rotated"},
            read_keys=("head_dim",),
            defaults={"hidden_act": "relu2", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
            | {"final_logit_softcapping": 15.0},
            biases=ATTENTION_BIAS,
            gated=False,
            pairs="swapped",
        ),
        Names(_ROWS + ATTENTION_BIASES, *LLAMA_LIKE),
    ),
)
