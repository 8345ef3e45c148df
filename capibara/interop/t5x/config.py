"""Derives the model of a T5X checkpoint from the shapes of its arrays, in the form of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf import tables
from capibara.interop.hf.layout.tensors import Shape

_SELF = "encoder.block.0.layer.0.SelfAttention."


def of_encoder_decoder(shapes: Mapping[str, Shape], gated: bool, each_positions: bool, path: str) -> dict[str, Any]:
    """The config.json of a T5, or of a UMT5, whose layers have their own relative positions.

    Args:
      shapes: of the tensors, by Hugging Face's names.
      gated: whether the MLPs are gated.
      each_positions: whether each layer has its own relative positions.
      path: of the checkpoint, for errors.

    Raises:
      UserError: a tensor is missing, or is no matrix.
    """
    table, query = f"{_SELF}relative_attention_bias.weight", f"{_SELF}q.weight"
    up = f"encoder.block.0.layer.1.DenseReluDense.{'wi_0' if gated else 'wi'}.weight"
    for name, meaning in (
        ("shared.weight", "token_embedder/embedding"),
        (table, "encoder/relpos_bias/rel_embedding"),
        (query, "attention/query/kernel of the first layer"),
        (up, "mlp/wi of the first layer"),
    ):
        if name not in shapes:
            raise UserError(f"{path} has no {meaning}: it is incomplete, or no T5")
    _check_matrices(shapes, path, table, "shared.weight", query, up)
    buckets, heads = shapes[table]
    count = lambda side: len({name.split(".")[2] for name in shapes if name.startswith(f"{side}.block.")})  # noqa: E731
    return {
        "model_type": "umt5" if each_positions else "t5",
        "architectures": [f"{'UMT5' if each_positions else 'T5'}ForConditionalGeneration"],
        "vocab_size": shapes["shared.weight"][0],
        "d_model": shapes["shared.weight"][1],
        "num_layers": count("encoder"),
        "num_decoder_layers": count("decoder"),
        "num_heads": heads,
        "d_kv": shapes[query][0] // heads,
        "d_ff": shapes[up][0],
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "scale_decoder_outputs": "lm_head.weight" not in shapes,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def of_decoder(shapes: Mapping[str, Shape], gated: bool, path: str) -> dict[str, Any]:
    """The config.json of a T5X decoder; arguments and errors as in `of_encoder_decoder`."""
    embedding, table = tables.T5X_DECODER[0].name, "decoder/relpos_bias/rel_embedding"
    query = "decoder/layers_0/self_attention/query/kernel"
    up = f"decoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel"
    for name in (table, query, up):
        if name not in shapes:
            raise UserError(f"{path} has no {name}: it is incomplete, or no decoder_only of T5X")
    _check_matrices(shapes, path, embedding, table, query, up)
    heads, buckets = shapes[table]
    tied = "decoder/logits_dense/kernel" not in shapes
    return {
        "model_type": tables.T5X_DECODER_TYPE,
        "architectures": ["T5XDecoder"],
        "vocab_size": shapes[embedding][0],
        "d_model": shapes[embedding][1],
        "num_layers": len({name.split("/")[1] for name in shapes if name.startswith("decoder/layers_")}),
        "num_heads": heads,
        "d_kv": shapes[query][1] // heads,
        "d_ff": shapes[up][1],
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _check_matrices(shapes: Mapping[str, Shape], path: str, *names: str) -> None:
    for name in names:
        if len(shapes[name]) != 2 or 0 in shapes[name]:
            raise UserError(f"{path}: {name} has the shape {list(shapes[name])}, must have two dimensions")
