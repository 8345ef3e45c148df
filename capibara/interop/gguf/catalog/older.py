"""Earlier decoders: LayerNorms, plain MLPs, fused projections, other positions."""

from __future__ import annotations

from typing import Any

from capibara.interop.gguf.catalog.dense import ALL, PAIRED, SWIGLU
from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes, Window
from capibara.interop.gguf.layout.tensors import Change
from capibara.models.api import DecoderConfig

# llama.cpp's GELU is the approximation by tanh, from a table in float16, of models that have the exact one too.
_EXACT_GELU, _GELU = {"activation": "gelu_exact"}, {"activation": "gelu"}
_FUSED = {"query_key_value": Change.INTERLEAVED}
_NONE: frozenset[str] = frozenset()


def _stablelm_norms(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {
        "residual": "sequential" if "blk.0.ffn_norm.weight" in shapes else "shared",
        "qk_norm": "heads" if "blk.0.attn_q_norm.weight" in shapes else "none",
    }


def _parallel(config: DecoderConfig) -> dict[str, Any]:
    return {"use_parallel_residual": config.residual != "sequential"}


def _falcon_norms(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {"residual": "parallel" if "blk.0.attn_norm_2.weight" in shapes else "shared"}


FAMILIES = (
    Family(
        model_type="olmo",
        arch="olmo",
        keys={"attention_clip": "attention.clamp_kqv"},
        fixed=SWIGLU,
        biases=_NONE,
        square=True,
        changes=PAIRED,
        constants={"attention.layer_norm_epsilon": 1e-5},
    ),
    Family(
        model_type="starcoder2",
        arch="starcoder2",
        fixed=_GELU | {"bias": "all"},
        biases=ALL,
        square=True,
        window=Window.IGNORED,
    ),
    Family(
        model_type="gpt_bigcode",
        arch="starcoder",
        fixed=_GELU,
        biases=ALL,
        square=True,
        changes={"c_attn": Change.INTERLEAVED},
    ),
    Family(
        model_type="stablelm",
        arch="stablelm",
        fixed=SWIGLU | {"head": "separate"},
        square=True,
        renamed={"layernorm.norms": "layernorm"},
        ignored=("use_parallel_residual",),
        read=_stablelm_norms,
        write=_parallel,
    ),
    Family(
        model_type="falcon",
        arch="falcon",
        fixed=_EXACT_GELU,
        biases=_NONE,
        square=True,
        longest=2048,
        changes=_FUSED,
        ignored=("tensor_data_layout",),
        read=_falcon_norms,
    ),
    Family(model_type="phi", arch="phi2", fixed=_GELU | {"head": "separate"}, biases=ALL, square=True),
    Family(
        model_type="nemotron",
        arch="nemotron",
        fixed={"activation": "relu2", "head": "separate"},
        biases=ALL,
        square=True,
        changes={"norm.weight": Change.PLUS_ONE},
    ),
    Family(
        model_type="bloom",
        arch="bloom",
        fixed=_GELU,
        biases=ALL,
        square=True,
        longest=2048,
        changes=_FUSED,
        renamed={"transformer.": ""},
    ),
    Family(
        model_type="mpt",
        arch="mpt",
        keys={"attention_clip": "attention.clamp_kqv"},
        fixed=_EXACT_GELU,
        biases=_NONE,
        square=True,
        constants={"attention.max_alibi_bias": 8.0},
    ),
)
