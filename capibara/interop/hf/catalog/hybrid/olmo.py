"""OLMo Hybrid (AI2 2026): Gated DeltaNet before whose branches there are norms, and OLMo 3's attention, with norms behind."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

from capibara.interop.hf.catalog.hybrid.qwen import LAYOUTS, SIZES
from capibara.interop.hf.layout import rope as hf_rope
from capibara.interop.hf.layout.family import (
    ATTENTION_BIAS,
    KEYS,
    ONLY_SILU,
    SILU,
    Family,
    Values,
    recurrent,
    write_recurrent,
)
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    BARE,
    BUFFERS,
    LLAMA,
    WHOLE_NORMS,
    Cut,
    L,
    Names,
    rows,
    without,
)
from capibara.interop.hf.layout.tensors import Shape
from capibara.models.api import DecoderConfig, GatedDelta, Rope, TransformerConfig

_X = "layers/mixer/"
_D = L + "linear_attn."
_CONVOLVED = {"q": "query", "k": "key", "v": "value"}
_INTO = _CONVOLVED | {"g": "gate", "b": "strength", "a": "decay"}
_DELTA = rows(
    [
        *((f"{_D}{name}_proj.weight", "nh d", _X + ours) for name, ours in _INTO.items()),
        *((f"{_D}{name}_conv1d.weight", "nh u k", f"{_X}{ours}_conv") for name, ours in _CONVOLVED.items()),
        (_D + "A_log", "n", _X + "decay_log"),
        (_D + "dt_bias", "n", _X + "decay_bias"),
        (_D + "o_norm.weight", "h", _X + "norm/scale"),
        (_D + "o_proj.weight", "d nh", _X + "out"),
    ],
    LAYOUTS
    | {f"{_X}{ours}": "ldnh" for ours in _INTO.values()}
    | {f"{_X}{ours}_conv": "lnhk" for ours in _CONVOLVED.values()},
)
# transformers 5.24 writes the first norm behind a branch of attention by the name of the second one before a branch.
_NORMS = rows(
    [
        (L + "attention_layer_norm.weight", "d", "layers/attention_norm/scale"),
        (L + "feedforward_layer_norm.weight", "d", "layers/mlp_norm/scale"),
        (L + "feedforward_layer_norm.weight", "d", "layers/attention_post_norm/scale"),
        (L + "post_feedforward_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
    ]
)
_OLDER = (
    (r"\.input_layernorm\.", ".attention_layer_norm."),
    (r"\.post_attention_layernorm\.", ".feedforward_layer_norm."),
)
_QUERY_CONV = re.compile(r"(.*\blinear_attn\.)q_conv1d\.weight")


def _cuts(shapes: Mapping[str, Shape]) -> dict[str, Cut]:
    """The convolutions of queries, keys and values: transformers 5.24 writes all of them in three equal parts."""
    cuts: dict[str, Cut] = {}
    for name in shapes:
        if (match := _QUERY_CONV.fullmatch(name)) is None:
            continue
        stored, into = (tuple(f"{match[1]}{of}_{kind}.weight" for of in _CONVOLVED) for kind in ("conv1d", "proj"))
        if not {*stored, *into} <= shapes.keys():
            continue
        ends = [0, *itertools.accumulate(shapes[item][0] for item in into)]
        if sum(shapes[item][0] for item in stored) == ends[-1]:
            cuts |= {item: Cut(stored, *span) for item, span in zip(stored, itertools.pairwise(ends), strict=True)}
    return cuts


_EPS = 1e-5  # of the results' norm, whatever rms_norm_eps is


def _prepare(values: Values) -> Values:
    """The values with layer_types and the sizes of the recurrent layers."""
    resolved, count, heads = {**values}, values["num_hidden_layers"], values["num_attention_heads"]
    if values.get("layer_types") is None:
        types = ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(count)]
        resolved["layer_types"] = types if count > 3 else [*types[:-1], "full_attention"]
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        resolved[key] = heads if values.get(key) is None else values[key]
    if values.get("linear_key_head_dim") is None:
        resolved["linear_key_head_dim"] = int(0.75 * values["hidden_size"] / resolved["linear_num_key_heads"])
    if values.get("linear_value_head_dim") is None:
        resolved["linear_value_head_dim"] = 2 * resolved["linear_key_head_dim"]
    return resolved


def _is_rotated(values: Values) -> bool:
    """Whether attention has rotary positions: not if their base is null."""
    parameters = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return parameters.get("rope_theta", values.get("rope_theta")) is not None


def _read(values: Values) -> dict[str, Any]:
    strength = 2.0 if values["linear_allow_neg_eigval"] else 1.0
    sizes: dict[str, Any] = {ours: values[theirs] for ours, theirs in SIZES.items()}
    fields = recurrent(values, "linear_attention")
    fields |= {"mixer": GatedDelta(**sizes, most_strength=strength, norm_eps=_EPS)}
    return fields | ({"rope": Rope(**hf_rope.read(values, _ROTATED))} if _is_rotated(values) else {"positions": "none"})


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    mixer = config.mixer
    if not isinstance(mixer, GatedDelta):
        return {}
    written = write_recurrent(config, "linear_attention")
    written |= {theirs: getattr(mixer, ours) for ours, theirs in SIZES.items()}
    written |= {"linear_allow_neg_eigval": mixer.most_strength > 1}
    if config.positions != "rope":
        return written | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return written | hf_rope.write(config, _ROTATED)


_FAMILY = Family(
    model_type="olmo_hybrid",
    architectures=("OlmoHybridForCausalLM",),
    keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
    fixed={"norm_placement": "mixed", "qk_norm": "whole", "activation": "swiglu"},
    activation="",
    rope=False,
    defaults=SILU
    | {"vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008, "num_hidden_layers": 32}
    | {"num_attention_heads": 30, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
    only=ONLY_SILU,
    read_keys=("layer_types", "head_dim", "rope_parameters", "rope_scaling", "max_position_embeddings")
    + ("original_max_position_embeddings", "partial_rotary_factor", *SIZES.values()),
    biases=ATTENTION_BIAS,
    old_rope=False,
    prepare=_prepare,
    read=_read,
    write=_write,
)
_ROTATED = dataclasses.replace(_FAMILY, rope=True)

FAMILIES = (
    (
        _FAMILY,
        Names(
            without(LLAMA, "layernorm") + ATTENTION_BIASES + WHOLE_NORMS + _NORMS + _DELTA,
            (BARE, *_OLDER),
            BUFFERS,
            cuts=_cuts,
        ),
    ),
)
