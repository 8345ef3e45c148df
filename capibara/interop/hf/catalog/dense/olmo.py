"""OLMo (AI2 2024, arXiv:2402.00838), OLMo 2 (arXiv:2501.00656) and OLMo 3 (2025), with norms of the branches' outputs."""

from __future__ import annotations

from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values, last_of
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    LLAMA,
    LLAMA_LIKE,
    OUTPUT_NORMS,
    WHOLE_NORMS,
    Names,
    without,
)

_OLMO2 = without(LLAMA, "layernorm") + ATTENTION_BIASES + OUTPUT_NORMS + WHOLE_NORMS
_KEYS = {ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}


def _prepare(values: Values) -> Values:
    """Layers with a window have the family's own base where rope_parameters has none for them: rope_theta is not theirs."""
    return last_of(4)({**values, "rope_local_base_freq": 500_000.0})


FAMILIES = (
    (
        # LayerNorms without parameters, whose epsilon is no key.
        Family(
            model_type="olmo",
            architectures=("OlmoForCausalLM",),
            keys={ours: theirs for ours, theirs in _KEYS.items() if ours != "norm_eps"}
            | {"attention_clip": "clip_qkv"},
            fixed={"norm": "layer", "norm_scale": "none", "norm_eps": 1e-5},
            read_keys=("head_dim",),
            defaults={"hidden_act": "silu", "rope_theta": 10_000.0},
            biases=ATTENTION_BIAS,
        ),
        Names(without(LLAMA, "norm") + ATTENTION_BIASES, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="olmo2",
            architectures=("Olmo2ForCausalLM",),
            keys=_KEYS,
            fixed={"norm_placement": "output", "qk_norm": "whole"},
            read_keys=("head_dim",),
            defaults=SILU | {"rms_norm_eps": 1e-5},
            biases=ATTENTION_BIAS,
        ),
        Names(_OLMO2, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="olmo3",
            architectures=("Olmo3ForCausalLM",),
            keys=_KEYS,
            fixed={"norm_placement": "output", "qk_norm": "whole"},
            read_keys=("head_dim",),
            defaults=SILU | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
            biases=ATTENTION_BIAS,
            window="types",
            rope_by_layer=True,
            prepare=_prepare,
        ),
        Names(_OLMO2, *LLAMA_LIKE),
    ),
)
