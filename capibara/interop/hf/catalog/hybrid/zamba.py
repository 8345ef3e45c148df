"""Zamba2 (Zyphra 2024): layers of Mamba 2, some of which read blocks of attention and an MLP that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop.hf.catalog.hybrid.mamba import expansion
from capibara.interop.hf.catalog.hybrid.mamba2 import BIASES, mixer_rows
from capibara.interop.hf.layout import rope as hf_rope
from capibara.interop.hf.layout.family import KEYS, OLD_KINDS, Family, Values, shortest
from capibara.interop.hf.layout.rows import LLAMA_LIKE, L, Names, Rows, rows
from capibara.interop.hf.layout.tensors import Shape, Tensor
from capibara.models.api import Mamba2, Rope, TransformerConfig, ZambaConfig

_NORM_EPS = 1e-5  # of the mixers' norms, whatever rms_norm_eps is
_S, _OWN = "shared/layers/", "layers/shared_input/"
_MODULE = f"{L}shared_transformer."
_HEADS = (("q", "query"), ("k", "key"), ("v", "value"))
_MIXER = {"heads": "n_mamba_heads", "groups": "mamba_ngroups", "state_dim": "mamba_d_state", "taps": "mamba_d_conv"}
_LAYOUTS = {
    **{f"{_S}attention/{ours}": "ldnh" for _, ours in _HEADS},
    **{f"{_OWN}{ours}_down": "lds" for _, ours in (*_HEADS, ("", "up"))},
    **{f"{_OWN}{ours}_up": "lsnh" for _, ours in _HEADS},
    **dict.fromkeys((f"{_OWN}gate_up", f"{_OWN}up_up"), "lsf"),
    **dict.fromkeys((f"{_S}mlp/gate", f"{_S}mlp/up"), "ldf"),
    **dict.fromkeys((f"{_S}mlp/gate_bias", f"{_S}mlp/up_bias"), "lf"),
    **dict.fromkeys((f"{_S}attention_norm/scale", f"{_S}mlp_norm/scale", f"{_S}mlp/down_bias"), "ld"),
    f"{_S}attention/out": "lnhd",
    f"{_S}mlp/down": "lfd",
    f"{_OWN}projection": "ldo",
}
_SHARED = rows(
    [
        *((f"{_MODULE}self_attn.{name}_proj.weight", "nh d", f"{_S}attention/{ours}") for name, ours in _HEADS),
        (f"{_MODULE}self_attn.o_proj.weight", "d nh", f"{_S}attention/out"),
        (f"{_MODULE}feed_forward.gate_up_proj.weight", "f d", f"{_S}mlp/gate {_S}mlp/up", "f"),
        (f"{_MODULE}feed_forward.gate_up_proj.bias", "f", f"{_S}mlp/gate_bias {_S}mlp/up_bias", "f"),
        (f"{_MODULE}feed_forward.down_proj.weight", "d f", f"{_S}mlp/down"),
        (f"{_MODULE}feed_forward.down_proj.bias", "d", f"{_S}mlp/down_bias"),
        (f"{_MODULE}input_layernorm.weight", "d", f"{_S}attention_norm/scale"),
        (f"{_MODULE}pre_ff_layernorm.weight", "d", f"{_S}mlp_norm/scale"),
    ],
    _LAYOUTS,
)
# A block holds the adapters of all layers that read it, by their numbers among the layers that read any.
_ADAPTERS = rows(
    [
        *(
            row
            for name, ours in _HEADS
            for row in (
                (f"{_MODULE}self_attn.linear_{name}_adapter_list.{{u}}.0.weight", "s d", f"{_OWN}{ours}_down"),
                (f"{_MODULE}self_attn.linear_{name}_adapter_list.{{u}}.1.weight", "nh s", f"{_OWN}{ours}_up"),
            )
        ),
        (f"{_MODULE}feed_forward.gate_up_proj_adapter_list.{{u}}.0.weight", "s d", f"{_OWN}up_down"),
        (f"{_MODULE}feed_forward.gate_up_proj_adapter_list.{{u}}.1.weight", "f s", f"{_OWN}gate_up {_OWN}up_up", "f"),
    ],
    _LAYOUTS,
)
_AROUND = rows(
    [
        ("model.embed_tokens.weight", "v d", "embedding"),
        (f"{L}linear.weight", "o d", f"{_OWN}projection"),
        ("model.final_layernorm.weight", "d", "final_norm/scale"),
        ("lm_head.weight", "v d", "output"),
    ],
    _LAYOUTS,
)
_MIXERS = mixer_rows("mamba") + rows([(f"{L}input_layernorm.weight", "d", "layers/branch_norm/scale")])


def _placed(rows: Rows, shapes: Mapping[str, Shape], layers: tree.LayersOf) -> Rows:
    """The rows with the names of each layer's tensors.

    A block's tensors are those of the first layer that reads it, and a layer that reads one has its mixer in a module of its own.
    """
    count, blocks = shapes["layers/branch_norm/scale"][0], shapes[f"{_S}attention/out"][0]
    reading = tuple(layers.get("shared_input", range(count)))

    def of_layers(row: Tensor) -> tuple[str, ...] | None:
        if row in _SHARED:
            return tuple(row.name.format(l=layer) for layer in reading[:blocks])
        if any(row.ours == adapter.ours for adapter in _ADAPTERS):
            return tuple(row.name.format(l=reading[use % blocks], u=use) for use in range(len(reading)))
        if row in _MIXERS:
            names = (row.name.replace(L, f"{L}mamba_decoder.") if n in reading else row.name for n in range(count))
            return tuple(name.format(l=number) for number, name in enumerate(names))
        return None

    return tuple(dataclasses.replace(row, of_layers=of_layers(row)) for row in rows)


_USUAL = ["linear_attention"] + (["linear_attention"] * 5 + ["hybrid"]) * 7 + ["linear_attention"] * 4 + ["hybrid"]
_USUAL += ["linear_attention"] * 3 + ["hybrid"] + ["linear_attention"] * 2


def _prepare(values: Values) -> Values:
    result = {**values}
    width, heads = result["hidden_size"], result["num_attention_heads"]
    types = result.get("layers_block_type") or _USUAL
    types = result["layers_block_type"] = [OLD_KINDS.get(kind, kind) for kind in types]
    if len(types) != result["num_hidden_layers"]:
        raise UserError(
            f"config.json has {len(types)} layers_block_type (layer_types), must be one for each of num_hidden_layers = "
            f"{result['num_hidden_layers']}"
        )
    if strange := {*types} - {"linear_attention", "hybrid"}:
        raise UserError(
            f"config.json has layers_block_type (layer_types) {str(min(strange))!r}, must be linear_attention or hybrid: take another model"
        )
    derived = {
        "attention_hidden_size": 2 * width,
        "attention_head_dim": 2 * width // heads,
        "mamba_headdim": int(result["mamba_expand"] * width) // result["n_mamba_heads"],
        "hybrid_layer_ids": [number for number, kind in enumerate(types) if kind == "hybrid"],
    }
    for key, value in derived.items():
        if (stated := result.get(key)) is not None and stated != value:
            raise UserError(
                f"config.json has {key} = {str(stated)[:60]}, must be {str(value)[:60]} by other keys: leave it out"
            )
    if not derived["hybrid_layer_ids"]:
        raise UserError(
            "config.json has layers_block_type (layer_types) without 'hybrid', must have such layers: take Mamba 2"
        )
    result["intermediate_size"] = result.get("intermediate_size") or 4 * width
    result |= {"max_position_embeddings": 16_384} if result["use_long_context"] else {}
    return result


def _read(values: Values) -> dict[str, Any]:
    width, size = values["hidden_size"], 2 * values["hidden_size"] // values["num_attention_heads"]
    inner, heads = int(values["mamba_expand"] * width), values["n_mamba_heads"]
    if inner % heads:
        raise UserError(
            f"config.json has mamba_expand ({values['mamba_expand']}) x hidden_size ({width}) channels, must be a multiple of "
            f"n_mamba_heads ({heads})"
        )
    biased = bool(values["add_bias_linear"])
    fields: dict[str, Any] = {ours: values[theirs] for ours, theirs in _MIXER.items()}
    fields |= {"head_dim": inner // heads, "bias": BIASES[True, biased], "least_step": float(values["time_step_min"])}
    fields |= {"norm_eps": None if values["rms_norm_eps"] == _NORM_EPS else _NORM_EPS}
    names = {"linear_attention": "recurrent", "hybrid": "hybrid"}
    result: dict[str, Any] = {"mixer": Mamba2(**fields), "head_dim": size, "attention_scale": (size / 2) ** -0.5}
    result |= {"bias": "mlp" if biased else "none"}
    result |= {"layer_pattern": shortest([names[kind] for kind in values["layers_block_type"]])}
    result |= {"adapters": "all" if values["use_shared_attention_adapter"] else "mlp"}
    if values["use_mem_rope"]:
        return result | {"rope": Rope(**hf_rope.read(values, _ROTARY))}
    return result | {"positions": "none"}


def _write(config: TransformerConfig) -> dict[str, Any]:
    mixer = config.mixer
    if not isinstance(config, ZambaConfig) or not isinstance(mixer, Mamba2):
        return {}
    written: dict[str, Any] = {theirs: getattr(mixer, ours) for ours, theirs in _MIXER.items()}
    written |= {"mamba_expand": expansion(mixer.heads * mixer.head_dim, config.embed_dim)}
    written |= {"add_bias_linear": config.bias == "mlp", "time_step_min": mixer.least_step}
    names = {"recurrent": "linear_attention"}
    written |= {"layers_block_type": [names.get(str(kind), "hybrid") for kind in config.kinds]}
    written |= {"use_shared_attention_adapter": config.adapters == "all", "use_mem_rope": config.positions == "rope"}
    return written | (hf_rope.write(config, _ROTARY) if config.positions == "rope" else {})


_ZAMBA2 = Family(
    model_type="zamba2",
    architectures=("Zamba2ForCausalLM",),
    keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"}
    | {"shared_blocks": "num_mem_blocks", "adapter_rank": "adapter_rank"},
    rope=False,
    tied=True,
    config=ZambaConfig,
    defaults={"vocab_size": 32_000, "hidden_size": 2560, "num_hidden_layers": 54, "num_attention_heads": 32}
    | {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "num_mem_blocks": 1, "adapter_rank": 128, "time_step_min": 0.001}
    | {"mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8}
    | {"add_bias_linear": False, "use_shared_attention_adapter": False, "use_mem_rope": False}
    | {"use_long_context": False, "rope_theta": 10_000.0},
    only={"tie_word_embeddings": (True,)},  # without, blocks are not shared: findings/zamba2_untied_blocks.sh
    mixer_keys=_MIXER,
    read_keys=("layers_block_type", "attention_hidden_size", "attention_head_dim", "mamba_headdim", "hybrid_layer_ids")
    + ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
    + ("chunk_size", "kv_channels", "num_query_groups", "time_step_floor", "time_step_max", "use_conv_bias"),
    aliases={"layer_types": "layers_block_type", "head_dim": "attention_head_dim"},
    prepare=_prepare,
    read=_read,
    write=_write,
)
_ROTARY = dataclasses.replace(_ZAMBA2, rope=True)

FAMILIES = ((_ZAMBA2, Names(_AROUND + _SHARED + _ADAPTERS + _MIXERS, *LLAMA_LIKE, placed=_placed)),)
