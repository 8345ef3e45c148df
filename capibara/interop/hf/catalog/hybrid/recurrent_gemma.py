"""RecurrentGemma (Google 2024, arXiv:2404.07839): RG-LRU, and attention with a window in every third layer."""

from __future__ import annotations

import math
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import KEYS, Family, Values, shortest
from capibara.interop.hf.layout.rows import BUFFERS, LLAMA_BIASED, L, Names, renamed, rows
from capibara.models.api import DecoderConfig, RgLru, TransformerConfig

_X, _T = "layers/mixer/", L + "temporal_block."
_RECURRENT = rows(
    [
        (_T + "linear_y.weight", "f d", _X + "gate"),
        (_T + "linear_y.bias", "f", _X + "gate_bias"),
        (_T + "linear_x.weight", "f d", _X + "value"),
        (_T + "linear_x.bias", "f", _X + "value_bias"),
        (_T + "linear_out.weight", "d f", _X + "out"),
        (_T + "linear_out.bias", "d", _X + "out_bias"),
        (_T + "conv_1d.weight", "f u k", _X + "value_conv"),
        (_T + "conv_1d.bias", "f", _X + "value_conv_bias"),
        (_T + "rg_lru.recurrent_param", "f", _X + "rate"),
        (_T + "rg_lru.input_gate_weight", "n a b", _X + "write_gate"),
        (_T + "rg_lru.input_gate_bias", "n b", _X + "write_gate_bias"),
        (_T + "rg_lru.recurrent_gate_weight", "n a b", _X + "decay_gate"),
        (_T + "rg_lru.recurrent_gate_bias", "n b", _X + "decay_gate_bias"),
    ],
    {
        **dict.fromkeys((_X + "gate", _X + "value"), "ldf"),
        **dict.fromkeys((_X + "gate_bias", _X + "value_bias", _X + "value_conv_bias", _X + "rate"), "lf"),
        **dict.fromkeys((_X + "write_gate", _X + "decay_gate"), "lnab"),
        **dict.fromkeys((_X + "write_gate_bias", _X + "decay_gate_bias"), "lnb"),
        **{_X + "out": "lfd", _X + "out_bias": "ld", _X + "value_conv": "lfk"},
    },
)
_AROUND = renamed(
    LLAMA_BIASED,
    ("input_layernorm", "temporal_pre_norm"),
    ("post_attention_layernorm", "channel_pre_norm"),
    (".self_attn.", ".temporal_block."),
    (".mlp.", ".mlp_block."),
    ("model.norm.", "model.final_norm."),
)
_BARE = (r"^(?=(?:layers|embed_tokens|final_norm)\.)", "model.")  # a checkpoint of the model without its head
_KINDS = {"recurrent": "recurrent", "attention": "local"}


def _prepare(values: Values) -> Values:
    """The values with the MLP's own width and a block_types entry for each layer."""
    count, kinds = values["num_hidden_layers"], values["block_types"]
    if not isinstance(kinds, list | tuple) or not kinds or not {*kinds} <= _KINDS.keys():
        raise UserError(
            f"config.json has block_types = {str(kinds)[:60]}, must be a list of {' and '.join(_KINDS)}: copy the file again"
        )
    types = [kinds[layer % len(kinds)] for layer in range(count)]
    if {*types} != _KINDS.keys():
        raise UserError(
            f"config.json has block_types {', '.join(kinds[:8])} for num_hidden_layers = {count}, must have both of "
            f"{' and '.join(_KINDS)}: take another model"
        )
    for key in ("rope_parameters", "rope_scaling"):
        kind = (values.get(key) or {}).get("rope_type", (values.get(key) or {}).get("type", "default"))
        if kind != "default":
            raise UserError(f"config.json has rope_type {kind!r} in {key}, must be 'default': take another model")
    return {**values, "intermediate_size": values["intermediate_size"] // 2, "block_types": types}


def _read(values: Values) -> dict[str, Any]:
    width = values["hidden_size"] if values.get("lru_width") is None else values["lru_width"]
    mixer = RgLru(inner_dim=width, blocks=values["num_attention_heads"], taps=values["conv1d_width"])
    pattern = shortest([_KINDS[kind] for kind in values["block_types"]])
    fields: dict[str, Any] = {"layer_pattern": pattern, "window": values["attention_window_size"], "mixer": mixer}
    return fields | {"embedding_multiplier": _in_8_bits(math.sqrt(values["hidden_size"]))}


def _in_8_bits(value: float) -> float:
    """The nearest number of bfloat16."""
    part, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(part, 8)), exponent - 8)


def _write(config: TransformerConfig) -> dict[str, Any]:
    mixer = config.mixer
    if not (isinstance(config, DecoderConfig) and isinstance(mixer, RgLru)):
        return {}
    names = {ours: theirs for theirs, ours in _KINDS.items()}
    written: dict[str, Any] = {"block_types": [names.get(str(kind), "attention") for kind in config.layer_pattern]}
    written |= {"lru_width": mixer.inner_dim, "conv1d_width": mixer.taps, "attention_window_size": config.window}
    return written | {"intermediate_size": 2 * config.mlp_dim}


FAMILIES = (
    (
        Family(
            model_type="recurrent_gemma",
            architectures=("RecurrentGemmaForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}
            | {"logit_soft_cap": "logits_soft_cap"},
            fixed={"norm_scale": "offset", "bias": "out_mlp"},
            defaults={"num_hidden_layers": 26, "vocab_size": 256_000, "hidden_size": 2560, "intermediate_size": 7680}
            | {"num_attention_heads": 10, "attention_window_size": 2048, "conv1d_width": 4, "logits_soft_cap": 30.0}
            | {"rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10_000.0}
            | {"block_types": ["recurrent", "recurrent", "attention"]},
            only={"hidden_activation": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")},
            read_keys=("lru_width", "head_dim"),
            aliases={"sliding_window": "attention_window_size"},
            biases={"attention_bias": "qkv"},
            tied=True,
            activation="hidden_activation",
            fraction=0.5,
            partial=True,
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(_AROUND + _RECURRENT, (_BARE,), BUFFERS),
    ),
)
