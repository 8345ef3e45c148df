"""Gemma 1 to 3n.

Of a Gemma 3n llama.cpp knows one size of each kind. It computes as transformers does, but for the standard deviation of the
gates of sparse layers, which it takes over one unit fewer: with 8192 units the cutoff is 0.006% further from the mean.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from capibara.core.types import UserError
from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes, Window
from capibara.interop.gguf.layout.tensors import Change, Factor, Shape
from capibara.models.api import DecoderConfig, Gemma3nConfig

_CAPS = {"attention_soft_cap": "attn_logit_softcapping", "logit_soft_cap": "final_logit_softcapping"}
# Layers of the one model whose scores are scaled by the mean width of its heads.
_ODD_SCALE = {"gemma2": 46, "gemma3_text": 62}
_KV_LAYERS, _SPARSE_LAYERS, _SPARSITY = 20, 10, 0.95  # constants of llama.cpp, and of its converter


def _scale(layers: int) -> Callable[[Fields, Metadata, Shapes], dict[str, Any]]:
    """A `read` with the scale of the scores that llama.cpp knows."""

    def read(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
        mean = fields["embed_dim"] // fields["num_heads"]
        size = mean if fields["num_layers"] == layers else fields.get("head_dim") or mean
        return {"attention_scale": size**-0.5}

    return read


def _read_3n(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    layers = int(fields["num_layers"])
    shared = max(layers - _KV_LAYERS, 0)
    if (recorded := fields.get("kv_shared_layers", shared)) != shared:
        raise UserError(
            f"num_kv_shared_layers (attention.shared_kv_layers) is {recorded}, llama.cpp computes {shared} of {layers} layers so: "
            "it has no GGUF form"
        )
    sparsity = (_SPARSITY,) * min(layers, _SPARSE_LAYERS)
    # The file's per-layer table has a row for every token.
    of_file = {"per_layer_vocab_size": fields["vocab_size"], "kv_shared_layers": shared}
    return of_file | {"activation_sparsity": sparsity, "attention_scale": 1.0}


def _write_3n(config: DecoderConfig) -> dict[str, Any]:
    assert isinstance(config, Gemma3nConfig), "the family's kind"
    normal, shares = statistics.NormalDist(), [config.sparsity(layer) for layer in range(config.num_layers)]
    # Below every gate where nothing is zeroed, which is how the quantile of 0 is said.
    return {"activation_sparsity_scale": [normal.inv_cdf(share) if share else -float("inf") for share in shares]}


def _rows_of_all_tokens(config: DecoderConfig) -> tuple[DecoderConfig, dict[str, Factor]]:
    """A file's per-layer table has more rows, which are of no token."""
    assert isinstance(config, Gemma3nConfig), "the family's kind"
    return dataclasses.replace(config, per_layer_vocab_size=config.vocab_size), {}


def _unread_3n(config: DecoderConfig) -> dict[str, tuple[Shape, float]]:
    """Tensors of layers that read others' keys and values, which llama.cpp wants and does not use."""
    assert isinstance(config, Gemma3nConfig), "the family's kind"
    keys = config.kv_heads * config.head_size, config.embed_dim
    result: dict[str, tuple[Shape, float]] = {}
    for layer in range(config.num_layers - config.kv_shared_layers, config.num_layers):
        result |= {f"blk.{layer}.attn_{part}.weight": (keys, 0.0) for part in ("k", "v")}
        result[f"blk.{layer}.attn_k_norm.weight"] = ((config.head_size,), 1.0)
    return result


_GEMMA = Family(
    model_type="gemma",
    arch="gemma",
    fixed={"activation": "geglu", "head": "tied"},
    biases=frozenset(),
    changes={"norm": Change.PLUS_ONE},
)
_GEMMA2 = dataclasses.replace(
    _GEMMA,
    model_type="gemma2",
    arch="gemma2",
    keys=_CAPS,
    window=Window.LISTED,
    period=2,
    read=_scale(_ODD_SCALE["gemma2"]),
)

FAMILIES = (
    _GEMMA,
    _GEMMA2,
    dataclasses.replace(
        _GEMMA2,
        model_type="gemma3_text",
        arch="gemma3",
        keys={"logit_soft_cap": "final_logit_softcapping"},
        period=6,
        read=_scale(_ODD_SCALE["gemma3_text"]),
    ),
    Family(
        model_type="gemma3n_text",
        arch="gemma3n",
        keys={
            "streams": "altup.num_inputs",
            "per_layer_dim": "embedding_length_per_layer_input",
            "kv_shared_layers": "attention.shared_kv_layers",
        },
        fixed={"activation": "geglu", "head": "tied", "logit_soft_cap": 30.0, "streams": 4, "laurel_rank": 64}
        | {"per_layer_dim": 256},
        biases=frozenset(),
        window=Window.LISTED,
        period=5,
        padded=("embed_tokens_per_layer",),
        renamed={"correct_output_scale": "correct_output_scale.weight"},
        fold=_rows_of_all_tokens,
        constants={"altup.active_idx": 0},
        ignored=("activation_sparsity_scale",),
        read=_read_3n,
        write=_write_3n,
        unused=_unread_3n,
    ),
)
