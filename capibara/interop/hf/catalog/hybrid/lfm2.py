"""LFM2 (Liquid AI 2025): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import (
    ATTENTION_BIAS,
    KEYS,
    Family,
    Values,
    recurrent,
    with_rope,
    write_recurrent,
)
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    EXPERTS,
    FIRST_MLP,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    A,
    L,
    M,
    Names,
    experts,
    renamed,
    rows,
    without,
)
from capibara.models.api import DecoderConfig, Moe, ShortConv, TransformerConfig

_X = "layers/mixer/"
_CONV = rows(
    [
        (L + "conv.in_proj.weight", "f d", f"{_X}before {_X}gate {_X}value", "f"),
        (L + "conv.conv.weight", "f u k", _X + "conv"),
        (L + "conv.out_proj.weight", "d f", _X + "out"),
    ],
    {_X + "before": "ldf", _X + "conv": "lfk", _X + "out": "lfd"},
)
_ATTENTION = renamed(
    without(LLAMA, "mlp.") + QK_NORM,
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("o_proj", "out_proj"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
    ("model.norm.", "model.embedding_norm."),
)
_MLP = renamed(
    tuple(row for row in LLAMA if ".mlp." in row.name),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
)

_EXPERT = "feed_forward.experts.{e}."
_EXPERTS = (
    renamed(FIRST_MLP, ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"))
    + experts("feed_forward.gate.weight", *(f"{_EXPERT}{name}.weight" for name in ("w1", "w3", "w2")))
    + rows([(L + "feed_forward.expert_bias", "e", M + "correction")], EXPERTS)
)
_EXPERTS = renamed(_EXPERTS, ("mlp.down_proj", "feed_forward.w2"))


def _prepare(values: Values) -> Values:
    """The MLPs' width as it is, and layer_types."""
    width = values["intermediate_size"]
    if values["block_auto_adjust_ff_dim"]:
        width, factor, multiple = int(2 * width / 3), values["block_ffn_dim_multiplier"], values["block_multiple_of"]
        if factor is not None:
            width = -(-int(factor * width) // multiple) * multiple
    result = {**values, "intermediate_size": width, "block_auto_adjust_ff_dim": False}
    if values.get("layer_types") is None:
        layers = range(values["num_hidden_layers"])
        attending = layers if values.get("full_attn_idxs") is None else values["full_attn_idxs"]
        result["layer_types"] = ["full_attention" if i in attending else "conv" for i in layers]
    return result


def _read(values: Values) -> dict[str, Any]:
    return recurrent(values, "conv") | {"mixer": ShortConv(taps=values["conv_L_cache"])}


def _write(config: TransformerConfig, *, windows: bool = False) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    if not isinstance(config.mixer, ShortConv):
        return {}
    return write_recurrent(config, "conv", windows=windows) | {
        "conv_L_cache": config.mixer.taps,
        "full_attn_idxs": None,
    }


_MOE_KEYS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "first_dense": "num_dense_layers",
    "scale": "routed_scaling_factor",
    "balance_loss": "router_aux_loss_coef",
}


def _read_moe(values: Values) -> dict[str, Any]:
    fields = _read(values)
    experts: dict[str, Any] = {ours: values[theirs] for ours, theirs in _MOE_KEYS.items()} | {"score": "sigmoid"}
    experts["correction"] = "expert" if values["use_expert_bias"] else "none"
    normalized = values["norm_topk_prob"]
    experts |= {"gates": "normalized", "gate_offset": 1e-6} if normalized else {"gates": "scores"}
    return fields | {"moe": Moe(**experts)}


def _write_moe(config: TransformerConfig) -> dict[str, Any]:
    moe, written = config.moe, _write(config)
    if moe is None or not written:
        return {}
    written |= {"num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "num_dense_layers": moe.first_dense}
    written |= {"moe_intermediate_size": moe.expert_dim or config.mlp_dim, "routed_scaling_factor": moe.scale}
    written |= {"use_expert_bias": moe.correction == "expert", "norm_topk_prob": moe.gates == "normalized"}
    return {key: value for key, value in written.items() if key != "full_attn_idxs"} | {
        "router_aux_loss_coef": moe.balance_loss
    }


_KEYS = {ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"} | {"norm_eps": "norm_eps"}

_LFM3 = renamed(_ATTENTION, ("self_attn.out_proj", "self_attn.o_proj"), ("_layernorm.", "_norm.")) + rows(
    [
        (L + "self_attn.gate_proj.weight", "n d", A + "head_gate"),
        (L + "post_operator_norm.weight", "d", "layers/attention_post_norm/scale"),
        (L + "post_ffn_norm.weight", "d", "layers/mlp_post_norm/scale"),
    ],
    {A + "head_gate": "ldn"},
)
_LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def _prepare_lfm3(values: Values) -> Values:
    """With a kind for each layer, and the base of all rotary positions where those of windows have none."""
    values = {**with_rope(values, _LFM3_ROPE), "rope_local_base_freq": values["rope_theta"]}
    if values.get("layer_types") is None:
        places = [layer % 4 if layer else 1 for layer in range(values["num_hidden_layers"])]
        kinds = {2: "full_attention", 0: "sliding_attention"}
        values = {**values, "layer_types": [kinds.get(place, "conv") for place in places]}
    if "sliding_attention" in values["layer_types"] and not values.get("sliding_window"):
        raise UserError(
            "config.json of an lfm3 has layer_types 'sliding_attention' without a sliding_window, must be at least 1: try 256"
        )
    return values


def _read_lfm3(values: Values) -> dict[str, Any]:
    pattern = recurrent(values, "conv", windows=True)
    return pattern | {
        "mixer": ShortConv(taps=values["conv_L_cache"]),
        "window": values["sliding_window"] if "local" in pattern["layer_pattern"] else None,
        "norm_placement": "sandwich" if values["use_sandwich_norm"] else "pre",
        "attention_gate": "head_sigmoid" if values["use_attention_gate"] else "none",
    }


def _write_lfm3(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    written = _write(config, windows=True)
    if not written:
        return {}
    return {key: value for key, value in written.items() if key != "full_attn_idxs"} | {
        "sliding_window": config.window or 256,
        "use_sandwich_norm": config.norm_placement == "sandwich",
        "use_attention_gate": config.attention_gate == "head_sigmoid",
    }


FAMILIES = (
    (
        Family(
            model_type="lfm2",
            architectures=("Lfm2ForCausalLM",),
            keys=_KEYS,
            fixed={"qk_norm": "head", "activation": "swiglu"},
            activation="",
            defaults={"rope_theta": 1_000_000.0, "norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3}
            | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
            only={"block_auto_adjust_ff_dim": (False,), "conv_bias": (False, None)},
            mixer_keys={"taps": "conv_L_cache"},
            read_keys=("layer_types", "head_dim", "full_attn_idxs", "block_multiple_of", "block_ffn_dim_multiplier"),
            aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
            tied=True,
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(_ATTENTION + _MLP + _CONV, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="lfm2_moe",
            architectures=("Lfm2MoeForCausalLM",),
            keys=_KEYS,
            fixed={"qk_norm": "head", "activation": "swiglu"},
            activation="",
            defaults={"rope_theta": 1_000_000.0, "norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3}
            | {"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}
            | {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
            | {"intermediate_size": 7168, "router_aux_loss_coef": 0.001},
            only={"conv_bias": (False, None)},
            moe_keys=_MOE_KEYS,
            mixer_keys={"taps": "conv_L_cache"},
            read_keys=("layer_types", "head_dim"),
            aliases={"tie_embedding": "tie_word_embeddings"},
            tied=True,
            read=_read_moe,
            write=_write_moe,
        ),
        Names(_ATTENTION + _EXPERTS + _CONV, *LLAMA_LIKE),
    ),
    (
        # LFM3 (Liquid AI 2026): windows in some layers, norms on both sides, heads with gates.
        Family(
            model_type="lfm3",
            architectures=("Lfm3ForCausalLM",),
            keys=KEYS | {"norm_eps": "norm_eps"},
            fixed={"qk_norm": "head", "activation": "swiglu"},
            activation="",
            defaults={"rope_theta": 1_000_000.0, "norm_eps": 1e-5, "head_dim": 128}
            | {"num_key_value_heads": 4, "conv_L_cache": 7, "sliding_window": 256, "use_sandwich_norm": True}
            | {"use_attention_gate": True},
            only={"conv_bias": (False, None)},
            mixer_keys={"taps": "conv_L_cache"},
            read_keys=("layer_types",),
            aliases={"rms_norm_eps": "norm_eps"},
            biases=ATTENTION_BIAS,
            tied=True,
            rope_by_layer=True,
            old_rope=False,
            prepare=_prepare_lfm3,
            read=_read_lfm3,
            write=_write_lfm3,
        ),
        Names(
            _LFM3 + ATTENTION_BIASES + _MLP + _CONV,
            (*LLAMA_LIKE[0], (r"self_attn\.g_proj\.", "self_attn.gate_proj.")),
            LLAMA_LIKE[1],
        ),
    ),
)
