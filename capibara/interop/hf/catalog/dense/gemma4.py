"""Gemma 4 (Google 2026): heads of two sizes, values that are keys, last layers that read earlier keys and values.

Its mixtures have an MLP and experts side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import KEYS, NO_BIAS, TANH_DEFAULT, Family, Values, typed, with_rope
from capibara.interop.hf.layout.rows import (
    BARE,
    BUFFERS,
    EXPERTS,
    L,
    M,
    Names,
    Rows,
    renamed,
    rows,
    shared_experts,
    without,
)
from capibara.interop.hf.layout.tensors import Shape
from capibara.interop.hf.tables import GEMMA3N
from capibara.models.api import Gemma4Config, Moe, TransformerConfig

_GLOBAL = "layers/global_attention/"
_LAYOUTS = {
    **dict.fromkeys((_GLOBAL + "query", _GLOBAL + "key", _GLOBAL + "value"), "ldnh"),
    _GLOBAL + "out": "lnhd",
    **dict.fromkeys((_GLOBAL + "query_norm/scale", _GLOBAL + "key_norm/scale"), "lh"),
    "layers/layer_scale": "l",
}
_OURS = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
_ROWS = without(GEMMA3N, "altup", "laurel") + rows(
    [
        *((f"{L}self_attn.{theirs}.weight", "nh d", _GLOBAL + ours) for theirs, ours in _OURS.items()),
        (L + "self_attn.o_proj.weight", "d nh", _GLOBAL + "out"),
        (L + "self_attn.q_norm.weight", "h", _GLOBAL + "query_norm/scale"),
        (L + "self_attn.k_norm.weight", "h", _GLOBAL + "key_norm/scale"),
        (L + "layer_scalar", "u", "layers/layer_scale"),
    ],
    _LAYOUTS,
)
# With experts: the MLP is a shared one, whose norms are its own.
_NORMS = {
    "pre_feedforward_layernorm": "shared_norm",
    "post_feedforward_layernorm_1": "shared_post_norm",
    "pre_feedforward_layernorm_2": "experts_norm",
    "post_feedforward_layernorm_2": "experts_post_norm",
}
_FACTORS = {M + "router_scale": "ld", M + "expert_scale": "le"}
_MIXTURE = (
    without(_ROWS, ".mlp.", "pre_feedforward_layernorm")
    + renamed(shared_experts("mlp.shared"), (".shared.", "."))
    + rows(
        [
            (L + "router.proj.weight", "e d", M + "router"),
            (L + "router.scale", "d", M + "router_scale"),
            (L + "router.per_expert_scale", "e", M + "expert_scale"),
            (L + "experts.gate_up_proj", "e f d", f"{M}gate {M}up", "f"),
            (L + "experts.down_proj", "e d f", M + "down"),
            *((f"{L}{theirs}.weight", "d", f"{M}{ours}/scale") for theirs, ours in _NORMS.items()),
        ],
        EXPERTS | _FACTORS | {f"{M}{ours}/scale": "ld" for ours in _NORMS.values()},
    )
)
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_HEAD_DIM, _KV_HEADS = "global_head_dim", "num_global_key_value_heads"
_BY_LAYER = "per_layer_config"
_EXPERT_KEYS = {"num_experts": "num_experts", "top_k": "top_k_experts", "expert_dim": "moe_intermediate_size"}
_OF_LAYER = {"head_dim": _HEAD_DIM, "num_key_value_heads": _KV_HEADS}


def _prepare(values: Values) -> Values:
    """With a kind for each layer, the last one without a window, and the sizes of heads in layers without one."""
    values = with_rope(typed(values, lambda layer: (layer + 1) % 6 == 0), _ROPE)
    types = values["layer_types"]
    if isinstance(types, list) and types:
        values = {**values, "layer_types": [*types[:-1], "full_attention"]}
    if not values.get("sliding_window"):
        raise UserError("config.json of a gemma4_text has no sliding_window, must be at least 1: try 512")
    return {**values, **_global_sizes(values)}


def _global_sizes(values: Values) -> dict[str, Any]:
    """The sizes of heads in layers without a window.

    Raises:
      UserError: per_layer_config has other sizes, or not the same for all of these layers.
    """
    if _BY_LAYER not in values:
        heads = values.get(_KV_HEADS) if values["attention_k_eq_v"] else None
        return {_HEAD_DIM: values[_HEAD_DIM], _KV_HEADS: heads or values["num_key_value_heads"]}
    usual = {key: values[key] for key in _OF_LAYER}
    overrides = values[_BY_LAYER] or {}
    if not isinstance(overrides, Mapping) or not all(isinstance(of, Mapping) for of in overrides.values()):
        raise UserError(f"config.json has {_BY_LAYER} = {str(overrides)[:60]}, must be an object of objects")
    sizes = {int(layer): usual | dict(of) for layer, of in overrides.items() if str(layer).isdigit()}
    of_global = usual
    for layer, kind in enumerate(values["layer_types"]):
        of_layer = sizes.pop(layer, usual)
        if kind == "full_attention":
            of_global = of_layer if of_global is usual else of_global
        allowed = of_global if kind == "full_attention" else usual
        if of_layer != allowed or of_layer.keys() != usual.keys():
            raise UserError(
                f"config.json has {_BY_LAYER} with {str(of_layer)[:60]} for layer {layer} ({kind}), must be "
                f"{str({key: allowed[key] for key in usual})}: the layers of a kind must be alike, in {' and '.join(usual)} alone"
            )
    if sizes or len(overrides) != len({int(layer) for layer in overrides if str(layer).isdigit()}):
        raise UserError(f"config.json has {_BY_LAYER} for layers {list(overrides)[:8]}, must be numbers of layers")
    return {_OF_LAYER[key]: value for key, value in of_global.items()}


def _read(values: Values) -> dict[str, Any]:
    layers, shared, width = values["num_hidden_layers"], values["num_kv_shared_layers"], values["intermediate_size"]
    wide = bool(values["use_double_wide_mlp"] and shared)
    return _experts(values, wide) | {
        "mlp_dim": 2 * width if wide else width,
        "mlp_dims": (width,) * (layers - shared) + (2 * width,) * shared if wide else None,
        "per_layer_dim": values["hidden_size_per_layer_input"] or 0,
        "global_head_dim": values[_HEAD_DIM],
        "global_kv_heads": values[_KV_HEADS],
        "global_values": "keys" if values["attention_k_eq_v"] else "projected",
    }


def _experts(values: Values, wide: bool) -> dict[str, Any]:
    """Our Moe, where layers have experts beside their MLPs.

    Raises:
      UserError: a size of experts is missing, or MLPs differ.
    """
    if not values["enable_moe_block"]:
        return {}
    if missing := [key for key in _EXPERT_KEYS.values() if values.get(key) is None]:
        raise UserError(f"config.json has enable_moe_block = True without {missing[0]}: copy the file again")
    if wide:
        raise UserError(
            "config.json has enable_moe_block = True, use_double_wide_mlp = True and num_kv_shared_layers = "
            f"{values['num_kv_shared_layers']}, must be MLPs of one width beside experts: take another model"
        )
    sizes = {ours: values[theirs] for ours, theirs in _EXPERT_KEYS.items()}
    return {"moe": Moe(**sizes, shared_experts=1, shared_dim=values["intermediate_size"])}


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, Gemma4Config), "the family's configuration"
    wide = config.mlp_dims is not None and len(set(config.mlp_dims)) > 1
    as_values = config.global_values == "keys"
    whole = config.attention_of(config.kinds[-1])
    sizes = {"head_dim": whole.head_size} | ({"num_key_value_heads": whole.kv_heads} if as_values else {})
    moe = config.moe
    width = config.mlp_dim if moe is None else moe.shared_dim or moe.expert_dim or config.mlp_dim
    experts = {} if moe is None else {theirs: getattr(moe, ours) for ours, theirs in _EXPERT_KEYS.items()}
    return experts | {
        "enable_moe_block": moe is not None,
        "intermediate_size": min(config.mlp_dims or (width,)),
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": config.per_layer_dim,
        "attention_k_eq_v": as_values,
        "sliding_window": config.window or 512,  # transformers has one for models whose layers have none
        _BY_LAYER: {str(layer): sizes for layer, kind in enumerate(config.kinds) if kind == "global"},
    }


def _chosen(shapes: Mapping[str, Shape]) -> Rows:
    return _MIXTURE if M + "router" in shapes else _ROWS


FAMILIES = (
    (
        Family(
            model_type="gemma4_text",
            architectures=("Gemma4ForCausalLM",),
            keys={ours: key for ours, key in KEYS.items() if ours != "mlp_dim"}
            | {"logit_soft_cap": "final_logit_softcapping", "mlp_dim": "intermediate_size"}
            | {"per_layer_vocab_size": "vocab_size_per_layer_input", "kv_shared_layers": "num_kv_shared_layers"},
            rope_by_layer=True,
            old_rope=False,
            read_keys=(_BY_LAYER, _HEAD_DIM, _KV_HEADS, "use_double_wide_mlp", "attention_k_eq_v")
            + ("hidden_size_per_layer_input", *_EXPERT_KEYS.values()),
            fixed={
                "embedding_scale": "sqrt_dim",
                "norm_placement": "sandwich",
                "qk_norm": "head",
                "attention_scale": 1.0,
            },
            defaults=TANH_DEFAULT
            | {"hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
            | {"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
            | {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 512}
            | {"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0}
            | {"attention_k_eq_v": False, "use_double_wide_mlp": False, _HEAD_DIM: 512, "enable_moe_block": False},
            only=NO_BIAS | {"use_bidirectional_attention": (None, "vision")},
            tied=True,
            activation="hidden_activation",
            window="types",
            config=Gemma4Config,
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(
            _ROWS,
            (BARE, (r"^(?=(?:embed_tokens_per_layer|per_layer_)[a-z_.]*)", "model.")),
            BUFFERS,
            chosen=_chosen,
        ),
    ),
)
