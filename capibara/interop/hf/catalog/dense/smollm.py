"""SmolLM3 (Hugging Face 2025): Llama without rotary positions in every fourth layer."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, SILU, Family, Values, unrotated
from capibara.interop.hf.layout.rows import LLAMA_BIASED, LLAMA_LIKE, Names
from capibara.models.api import DecoderConfig, TransformerConfig


def _read(values: Values) -> dict[str, Any]:
    count, every, window = (values[key] for key in ("num_hidden_layers", "no_rope_layer_interval", "sliding_window"))
    rotated = values.get("no_rope_layers")
    if rotated is None and every < 1:
        raise UserError(f"config.json has no_rope_layer_interval = {every}, must be at least 1: copy the file again")
    if rotated is None:
        rotated = [int((i + 1) % every != 0) for i in range(count)]
    if len(rotated) < count:
        raise UserError(f"config.json has {len(rotated)} no_rope_layers, must be one for each of {count} layers")
    types = values.get("layer_types")
    if types is None:
        windowed = values.get("use_sliding_window") and window is not None
        types = ["sliding_attention" if windowed and not turned else "full_attention" for turned in rotated[:count]]
    # use_sliding_window itself acts where there are no layer_types.
    return unrotated(
        types, rotated[:count], window, "no_rope_layers (no_rope_layer_interval) and layer_types (use_sliding_window)"
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    pattern = config.layer_pattern
    kinds = [pattern[i % len(pattern)] for i in range(config.num_layers)]
    return {
        "no_rope_layers": [int(kind != "unrotated") for kind in kinds],
        "layer_types": ["sliding_attention" if kind == "local" else "full_attention" for kind in kinds],
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
    }


FAMILIES = (
    (
        Family(
            model_type="smollm3",
            architectures=("SmolLM3ForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
            read_keys=("head_dim", "no_rope_layers", "layer_types", "use_sliding_window"),
            defaults=SILU
            | {
                "rope_theta": 2_000_000.0,
                "num_key_value_heads": 4,
                "no_rope_layer_interval": 4,
                "sliding_window": None,
            },
            biases=ATTENTION_BIAS | {"mlp_bias": "mlp"},
            tied=True,
            read=_read,
            write=_write,
        ),
        Names(LLAMA_BIASED, *LLAMA_LIKE),
    ),
)
