"""Llama, its relatives of the same block, and GPT-2 and GPT-NeoX."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.core.types import UserError
from capibara.interop.gguf.catalog.dense import ALL, ATTENTION, PAIRED, SWIGLU
from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes, Window
from capibara.interop.gguf.layout.tensors import Change
from capibara.models.api import DecoderConfig

_NONE: frozenset[str] = frozenset()
_NORMALIZED = {"gates": "normalized"}
_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def _original_length(config: DecoderConfig) -> dict[str, Any]:
    length = config.rope.original_length
    return {} if length is None else {"rope.scaling.original_context_length": length}


def _neox_residual(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    if type(parallel := values.get("use_parallel_residual")) is not bool:
        raise UserError(f"gptneox.use_parallel_residual is {parallel}, must be true or false: take another file")
    return {"residual": "parallel" if parallel else "sequential"}


def _write_neox_residual(config: DecoderConfig) -> dict[str, Any]:
    return {"use_parallel_residual": config.residual == "parallel"}


_LLAMA = Family(model_type="llama", arch="llama", fixed=SWIGLU, biases=ATTENTION, factors=True, changes=PAIRED)
_QWEN3 = Family(model_type="qwen3", arch="qwen3", fixed=SWIGLU, biases=_NONE)

FAMILIES = (
    dataclasses.replace(
        _LLAMA, model_type="mixtral", when="expert_count", moe=_NORMALIZED, biases=_NONE, window=Window.IGNORED
    ),
    dataclasses.replace(
        _LLAMA, model_type="mistral", when="attention.sliding_window", biases=_NONE, window=Window.IGNORED
    ),
    _LLAMA,
    Family(model_type="qwen2", arch="qwen2", fixed=SWIGLU),
    _QWEN3,
    dataclasses.replace(
        _QWEN3,
        model_type="qwen3_moe",
        arch="qwen3moe",
        moe_keys={"expert_dim": "expert_feed_forward_length"},
        moe=_NORMALIZED,
    ),
    Family(
        model_type="phi3",
        arch="phi3",
        fixed=SWIGLU,
        biases=_NONE,
        window=Window.IGNORED,
        write=_original_length,
    ),
    Family(
        model_type="gpt2",
        arch="gpt2",
        fixed={"activation": "gelu"},
        biases=ALL,
        square=True,
        changes=dict.fromkeys(_CONV1D, Change.TRANSPOSED),
    ),
    Family(
        model_type="gpt_neox",
        arch="gptneox",
        fixed={"activation": "gelu_exact"},
        biases=ALL,
        square=True,
        changes={"query_key_value": Change.INTERLEAVED},
        ignored=("use_parallel_residual",),
        read=_neox_residual,
        write=_write_neox_residual,
    ),
)
