"""EXAONE 3 (LG 2024, arXiv:2408.03541), a Llama of other names, and EXAONE 4 (arXiv:2507.11407)."""

from __future__ import annotations

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values, last_of
from capibara.interop.hf.layout.rows import (
    LLAMA,
    LLAMA_BIASED,
    LLAMA_LIKE,
    OUTPUT_NORMS,
    QK_NORM,
    Names,
    renamed,
    without,
)

# Its own names, which transformers writes, and those that it has in memory.
_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    (".self_attn.", ".attn.attention."),
    (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."),
    (".gate_proj.", ".c_fc_0."),
    (".up_proj.", ".c_fc_1."),
    (".down_proj.", ".c_proj."),
)
_BARE, _BUFFERS = LLAMA_LIKE


def by_pattern(values: Values) -> Values:
    """The values with layer_types as sliding_window_pattern has them where the file has none."""
    if values.get("sliding_window") is None or values.get("layer_types") is not None:
        return values
    every = values.get("sliding_window_pattern")
    if type(every) is not int or every < 1:
        raise UserError(
            f"config.json has sliding_window_pattern = {every!r} and no layer_types, must be a number of at least 1: "
            "write layer_types"
        )
    return last_of(every)(values)


FAMILIES = (
    (
        Family(
            model_type="exaone",
            architectures=("ExaoneForCausalLM", "LlamaForCausalLM"),  # transformers computes it by Llama's class
            keys=KEYS,
            defaults=SILU | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
            aliases={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
            | {"activation_function": "hidden_act"},
            biases=ATTENTION_BIAS | {"mlp_bias": "mlp"},
            divides=True,
        ),
        Names(
            renamed(LLAMA_BIASED, *_NAMES),
            (*_BARE, *((f"^{old}" if old.startswith("model") else old, new) for old, new in _NAMES)),
            _BUFFERS,
        ),
    ),
    (
        # Layers without a window have no rotary positions, if there are layers with one.
        Family(
            model_type="exaone4",
            architectures=("Exaone4ForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
            read_keys=("head_dim", "sliding_window_pattern"),
            fixed={"norm_placement": "output", "qk_norm": "head"},
            defaults=SILU | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
            window="types",
            kinds={"full_attention": "unrotated", "sliding_attention": "local"},
            prepare=by_pattern,
        ),
        Names(without(LLAMA, "layernorm") + OUTPUT_NORMS + QK_NORM, *LLAMA_LIKE),
    ),
)
