"""What llama.cpp knows of a Gemma 3n beyond other families: one size of each kind, and metadata of its own.

It computes as transformers does, but for the standard deviation of the gates of sparse layers, which it takes over one unit
fewer: with 8192 units the cutoff is 0.006% further from the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.core.types import UserError

Shape = tuple[int, ...]
MODEL_TYPE = "gemma3n_text"

# Values of config.json of which llama.cpp has one only.
FIXED = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 256,
}
# Name in config.json -> metadata key.
FIELDS = {
    "altup_active_idx": "altup.active_idx",
    "altup_num_inputs": "altup.num_inputs",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
}
_KV_LAYERS, _SPARSE_LAYERS, _SPARSITY = 20, 10, 0.95


def of_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json must say of its layers for llama.cpp to compute them."""
    layers = config["num_hidden_layers"]
    sparse = min(layers, _SPARSE_LAYERS)
    return {
        "num_kv_shared_layers": max(layers - _KV_LAYERS, 0),
        "activation_sparsity_pattern": [_SPARSITY] * sparse + [0.0] * (layers - sparse),
    }


def from_metadata(values: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a config.json that a file does not hold under names of its own.

    Args:
      values: the file's metadata.
      config: what is known so far.

    Raises:
      UserError: the last layers share keys and values as llama.cpp would not compute it.
    """
    shared = of_layers(config)["num_kv_shared_layers"]
    recorded = values.get(FIELDS["num_kv_shared_layers"], shared)
    if recorded != shared:
        raise UserError(
            f"gemma3n.{FIELDS['num_kv_shared_layers']} is {recorded}, llama.cpp computes {shared} of "
            f"{config['num_hidden_layers']} layers so: the file is corrupted"
        )
    # The file's per-layer table has a row for every token.
    return {"vocab_size_per_layer_input": config["vocab_size"]}


def metadata(config: Mapping[str, Any], layer_types: Sequence[str]) -> dict[str, Any]:
    """Metadata that are lists, of a config.json that `of_layers` agrees with and its kinds of layers."""
    normal, pattern = statistics.NormalDist(), of_layers(config)["activation_sparsity_pattern"]
    return {
        # Below every gate where nothing is zeroed, which is how the quantile of 0 is said.
        "activation_sparsity_scale": [normal.inv_cdf(share) if share else -float("inf") for share in pattern],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in layer_types],
    }


def width(value: object) -> Any:
    """The one hidden width of all layers.

    Raises:
      UserError: they differ.
    """
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UserError(
            f"intermediate_size of the {MODEL_TYPE} model is {sorted(set(value))}, llama.cpp has one for all layers: it has "
            "no GGUF form"
        )
    return value[0]


def kv_layers(config: Mapping[str, Any]) -> int:
    """Layers with keys and values of their own: the first ones."""
    return config["num_hidden_layers"] - int(config.get("num_kv_shared_layers") or 0)


def unread(config: Mapping[str, Any], keys: Shape, head_dim: int) -> dict[str, tuple[Shape, float]]:
    """Tensors that llama.cpp wants of layers that read others' keys and values, and does not use.

    Args:
      config: the values of config.json.
      keys: shape of the weights of keys.
      head_dim: size of a head.

    Returns:
      Their names in a file, shapes, and the value that fills them.
    """
    result: dict[str, tuple[Shape, float]] = {}
    for layer in range(kv_layers(config), config["num_hidden_layers"]):
        result |= {f"blk.{layer}.attn_{part}.weight": (keys, 0.0) for part in ("k", "v")}
        result[f"blk.{layer}.attn_k_norm.weight"] = ((head_dim,), 1.0)
    return result
