"""Values of a Gemma 3n's config.json that other decoders do not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.models.api import Gemma3nConfig, TransformerConfig

Values = Mapping[str, Any]

KEYS = {
    "streams": "altup_num_inputs",
    "coefficient_clip": "altup_coef_clip",
    "laurel_rank": "laurel_rank",
    "per_layer_dim": "hidden_size_per_layer_input",
    "per_layer_vocab_size": "vocab_size_per_layer_input",
    "kv_shared_layers": "num_kv_shared_layers",
}
ONLY = {"altup_active_idx": (0,), "altup_correct_scale": (True,)}
# Defaults of transformers' Gemma3nTextConfig, which published files omit.
DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "altup_num_inputs": 4,
    "altup_coef_clip": 120.0,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 15,
}
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # default of activation_sparsity_pattern


def read(values: Values) -> dict[str, Any]:
    """Fields of a Gemma3nConfig that other decoders do not have, or that differ."""
    layers = values["num_hidden_layers"]
    widths, sparsity = values["intermediate_size"], values.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [_SPARSITY] * _SPARSE_LAYERS if layers > _SPARSE_LAYERS else []
    elif not isinstance(sparsity, list):
        sparsity = [sparsity] * layers
    widths = widths if isinstance(widths, list) else [widths] * layers
    for key, result in (("intermediate_size", widths), ("activation_sparsity_pattern", sparsity)):
        if key in values and isinstance(values[key], list) and len(result) != layers:
            raise UserError(f"config.json has {len(result)} {key}, must be one for each of {layers} layers")
    while sparsity and sparsity[-1] == 0:
        sparsity = sparsity[:-1]
    return {
        "mlp_dim": max(widths),
        "mlp_dims": None if len(set(widths)) == 1 else tuple(widths),
        "activation_sparsity": tuple(sparsity),
        "attention_scale": 1.0,
    }


def write(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `read`."""
    assert isinstance(config, Gemma3nConfig)
    layers = range(config.num_layers)
    return {
        "intermediate_size": list(config.mlp_dims or [config.mlp_dim] * config.num_layers),
        "activation_sparsity_pattern": [config.sparsity(layer) for layer in layers],
    }


def resolved(config: Gemma3nConfig) -> dict[str, Any]:
    """Its effective fields: different values may be equivalent."""
    return {"activation_sparsity": write(config)["activation_sparsity_pattern"]} | {
        "mlp_dims": write(config)["intermediate_size"]
    }
