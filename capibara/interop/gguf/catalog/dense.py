"""Decoders without experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.interop.gguf.layout.family import Family, Fields, Metadata, Shapes, Window, windowed
from capibara.interop.gguf.layout.tensors import Change

# Architectures whose rotated pairs are adjacent, of models that rotate the halves of a head.
PAIRED = {"q_proj": Change.QUERIES, "k_proj": Change.KEYS}
SWIGLU = {"activation": "swiglu"}
ATTENTION, ALL = frozenset({"qkv", "out"}), frozenset({"qkv", "out", "mlp"})
SCALES = {
    "logit_scale": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_scale": "attention.scale",
}
_NOPE_EVERY, _EXAONE_LAYERS, _COMMAND_R_PLUS_LAYERS = 4, 64, 64  # constants of llama.cpp


def _every_fourth_unrotated(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {"layer_pattern": ("global",) * (_NOPE_EVERY - 1) + ("unrotated",)}


def _exaone4_windows(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    """Only the model of 64 layers has windows, whatever the file says."""
    if fields["num_layers"] == _EXAONE_LAYERS:
        return {} if fields.get("window") else {"layer_pattern": ("local",) * 3 + ("unrotated",), "window": 4096}
    return {"layer_pattern": ("global",), "window": None}


def _command_r_norms(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {"qk_norm": "heads" if fields["num_layers"] >= _COMMAND_R_PLUS_LAYERS else "none"}


_COHERE = Family(
    model_type="cohere",
    arch="command-r",
    keys={"logit_scale": "logit_scale"},
    fixed=SWIGLU | {"head": "tied"},
    biases=frozenset(),
    square=True,
    read=_command_r_norms,
)
_OLMO2 = Family(model_type="olmo2", arch="olmo2", fixed=SWIGLU | {"head": "separate"}, biases=frozenset(), square=True)

FAMILIES = (
    _OLMO2,
    dataclasses.replace(_OLMO2, model_type="olmo3", when="attention.sliding_window", window=Window.LISTED),
    Family(
        model_type="granite",
        arch="granite",
        keys=SCALES,
        inverse=("logit_scale",),
        fixed=SWIGLU,
        biases=ALL,
        factors=True,
        changes=PAIRED,
    ),
    _COHERE,
    dataclasses.replace(_COHERE, model_type="cohere2", arch="cohere2", window=Window.LISTED, read=windowed),
    Family(
        model_type="exaone4",
        arch="exaone4",
        fixed=SWIGLU,
        square=True,
        biases=frozenset(),
        window=Window.LISTED,
        factors=True,
        read=_exaone4_windows,
    ),
    Family(
        model_type="smollm3",
        arch="smollm3",
        fixed=SWIGLU,
        changes=PAIRED,
        read=_every_fourth_unrotated,
    ),
    Family(model_type="seed_oss", arch="seed_oss", fixed=SWIGLU),
    Family(
        model_type="glm4",
        arch="glm4",
        fixed=SWIGLU,
        renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
    ),
    Family(model_type="ernie4_5", arch="ernie4_5", fixed=SWIGLU),
    Family(
        model_type="hunyuan_v1_dense",
        arch="hunyuan-dense",
        fixed=SWIGLU,
    ),
    Family(
        model_type="apertus",
        arch="apertus",
        fixed={"activation": "xielu", "head": "separate"},
        biases=ATTENTION,
        factors=True,
        listed={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    Family(model_type="exaone", arch="exaone", fixed=SWIGLU, factors=True),
    Family(model_type="jais2", arch="jais2", fixed={"activation": "relu2", "bias": "all"}, biases=ALL),
    Family(
        model_type="arcee",
        arch="arcee",
        fixed={"activation": "relu2"},
        factors=True,
        changes=PAIRED,
    ),
)
