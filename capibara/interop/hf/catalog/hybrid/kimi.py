"""Kimi Linear (Moonshot AI 2025, arXiv:2510.26692): Kimi Delta Attention, and latent attention without positions."""

from __future__ import annotations

from typing import Any

from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.hf.catalog.experts.glm import (
    DEEPSEEK_KEYS,
    DEEPSEEK_MOE,
    read_mlp_types,
    with_mlp_types,
    write_mlp_types,
)
from capibara.interop.hf.catalog.latent.deepseek import LATENT_ROWS, read_latent, write_latent
from capibara.interop.hf.layout.family import (
    LATENT_SIZES,
    NO_BIAS,
    SILU,
    WITHOUT_GROUPS,
    Family,
    Values,
    recurrent,
    write_recurrent,
)
from capibara.interop.hf.layout.rows import DEEPSEEK_EXPERTS, LLAMA_LIKE, L, Names, renamed, rows
from capibara.models.api import DecoderConfig, KimiDelta, TransformerConfig

_CONVOLVED = (projections.DELTA_QUERY, projections.DELTA_KEY, projections.DELTA_VALUE)
_X, _SELF = "layers/mixer/", L + "self_attn."
_LAYOUTS = {
    **dict.fromkeys((_X + "query", _X + "key", _X + "value", _X + "strength"), "ldnh"),
    **dict.fromkeys((_X + "query_conv", _X + "key_conv", _X + "value_conv"), "lnhk"),
    **dict.fromkeys((_X + "decay_down", _X + "gate_down"), "lds"),
    **dict.fromkeys((_X + "decay_up", _X + "gate_up"), "lsnh"),
    _X + "decay_log": "ln",
    _X + "decay_bias": "lnh",
    _X + "norm/scale": "lh",
    _X + "out": "lnhd",
}
_MIXER = rows(
    [
        *((f"{_SELF}{by.name[0]}_proj.weight", "nh d", _X + by.name) for by in _CONVOLVED),
        *((f"{_SELF}{by.name[0]}_conv1d.weight", "nh u k", f"{_X}{by.name}_conv") for by in _CONVOLVED),
        (_SELF + "b_proj.weight", "nh d", _X + "strength"),
        (_SELF + "f_a_proj.weight", "s d", _X + "decay_down"),
        (_SELF + "f_b_proj.weight", "nh s", _X + "decay_up"),
        (_SELF + "g_a_proj.weight", "s d", _X + "gate_down"),
        (_SELF + "g_b_proj.weight", "nh s", _X + "gate_up"),
        (_SELF + "A_log", "u u n u", _X + "decay_log"),
        (_SELF + "dt_bias", "nh", _X + "decay_bias"),
        (_SELF + "o_norm.weight", "h", _X + "norm/scale"),
        (_SELF + "o_proj.weight", "d nh", _X + "out"),
    ],
    _LAYOUTS,
)
# As transformers 5.24 writes them, the MLP of the first layer, too.
_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    ("gate_proj.weight", "w1.weight"),
    ("up_proj.weight", "w3.weight"),
    ("down_proj.weight", "w2.weight"),
)
_EXPERTS = tuple(renamed((row,), *(_NAMES if "{e}" in row.name else _NAMES[:1]))[0] for row in DEEPSEEK_EXPERTS)
_SIZES = {"heads": "linear_num_heads", "head_dim": "linear_head_dim", "taps": "linear_conv_kernel_dim"}
_OLD = "linear_attn_config"  # of the published file
_OLD_SIZES = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
_OLD_SIZES |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}


def _prepare(values: Values) -> Values:
    """With sizes and kinds of layers as transformers 5.24 reads them, from the published file's object too."""
    old, count = values.get(_OLD, {}), values["num_hidden_layers"]
    if not isinstance(old, dict):
        raise UserError(f"config.json has {_OLD} = {old!r}, must be an object: copy the file again")
    sizes = {theirs: old[name] for name, theirs in _OLD_SIZES.items() if name in old}
    types = values.get("layer_types")
    if types is None and {"full_attn_layers", "kda_layers"} <= old.keys():
        kinds = dict.fromkeys(old["full_attn_layers"], "full_attention")
        kinds |= dict.fromkeys(old["kda_layers"], "linear_attention")
        types = [kinds.get(layer + 1) for layer in range(count)]
    elif types is None:
        types = ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(count)]
    values = with_mlp_types(values)
    heads = values.get("num_key_value_heads") or values["num_attention_heads"]
    return {**values, **sizes, "layer_types": types, "num_key_value_heads": heads}


def _read(values: Values) -> dict[str, Any]:
    mixer = KimiDelta(**{ours: values[theirs] for ours, theirs in _SIZES.items()})
    return read_latent(values) | recurrent(values, "linear_attention") | {"mixer": mixer}


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    if not isinstance(config.mixer, KimiDelta) or config.moe is None:
        return {}
    sizes = {theirs: getattr(config.mixer, ours) for ours, theirs in _SIZES.items()}
    renormalized = {"norm_topk_prob": config.moe.gates == "normalized"}
    return (
        write_latent(config)
        | write_recurrent(config, "linear_attention")
        | sizes
        | write_mlp_types(config)
        | renormalized
    )


FAMILIES = (
    (
        Family(
            model_type="kimi_linear",
            architectures=("KimiLinearForCausalLM",),
            keys=WITHOUT_GROUPS,
            fixed={"positions": "none"},
            defaults=SILU
            | {
                "rms_norm_eps": 1e-5,
                "kv_lora_rank": 512,
                "q_lora_rank": None,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            }
            | {"qk_nope_head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 256, "n_shared_experts": 1}
            | {"moe_intermediate_size": 1024, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
            | {"routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "num_key_value_heads": 32}
            | {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
            # The activation is that of the convolutions, too.
            only=NO_BIAS | {"hidden_act": ("silu", "swish")},
            read_keys=(*LATENT_SIZES.values(), "qk_nope_head_dim", "num_key_value_heads", *_SIZES.values())
            + ("layer_types", "mlp_layer_types", _OLD, "first_k_dense_replace"),
            aliases={"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"}
            | {"num_shared_experts": "n_shared_experts", "num_expert_group": "n_group"}
            | {"moe_renormalize": "norm_topk_prob", "model_max_length": "max_position_embeddings"},
            rope=False,
            experts="num_local_experts",
            moe=DEEPSEEK_MOE | {"first_dense": 1},
            moe_keys={ours: key for ours, key in DEEPSEEK_KEYS.items() if ours != "first_dense"},
            read_moe=read_mlp_types,
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(
            LATENT_ROWS + _MIXER + _EXPERTS,
            (*LLAMA_LIKE[0], (r"\.mlp\.", ".block_sparse_moe."), (r"\.forget_gate\.", ".")),
            LLAMA_LIKE[1],
        ),
    ),
)
