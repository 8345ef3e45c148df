"""Kimi Delta Attention beside latent attention: Kimi Linear (Moonshot AI 2025, arXiv:2510.26692) and Ling 3 (InclusionAI 2026).

Kimi Linear's latent attention has no positions; that of Ling 3 (bailing_hybrid) has, and a gate of each head.
"""

from __future__ import annotations

import re
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
from capibara.interop.hf.layout.rows import DEEPSEEK_EXPERTS, LLAMA_LIKE, A, L, Names, renamed, rows, without
from capibara.models.api import DecoderConfig, KimiDelta, TransformerConfig

_CONVOLVED = (projections.DELTA_QUERY, projections.DELTA_KEY, projections.DELTA_VALUE)
_X, _SELF = "layers/mixer/", L + "self_attn."
_LAYOUTS = {
    **dict.fromkeys((_X + "query", _X + "key", _X + "value", _X + "strength"), "ldnh"),
    **dict.fromkeys((_X + "query_conv", _X + "key_conv", _X + "value_conv"), "lnhk"),
    **dict.fromkeys((_X + "decay_down", _X + "gate_down"), "lds"),
    **dict.fromkeys((_X + "decay_up", _X + "gate_up"), "lsnh"),
    **dict.fromkeys((_X + "decay", _X + "gate"), "ldnh"),
    A + "head_gate": "ldn",
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


_ALIASES = {"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"}
_ALIASES |= {"num_shared_experts": "n_shared_experts", "num_expert_group": "n_group"}
_ALIASES |= {"moe_renormalize": "norm_topk_prob", "model_max_length": "max_position_embeddings"}

# --- Ling 3 -------------------------------------------------------------------------------------------------------

_LING_NAMES = (  # those of files, for those that transformers has in memory
    (".self_attn.o_proj.", ".attention.dense."),
    (".self_attn.", ".attention."),
    ("model.embed_tokens.", "model.word_embeddings."),
    (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
)
_LING_MIXER = without(_MIXER, ".f_", ".g_", "A_log") + rows(
    [
        (_SELF + "f_proj.weight", "nh d", _X + "decay"),
        (_SELF + "g_proj.weight", "nh d", _X + "gate"),
        (_SELF + "A_log", "n", _X + "decay_log"),
        (_SELF + "g_proj.weight", "n d", A + "head_gate"),
    ],
    _LAYOUTS,
)
# A size of the mixer -> the key that has it where the first one is missing.
_USUAL_SIZES = {
    "linear_num_heads": "num_attention_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_GROUP, _BOUND, _BOUNDED = "layer_group_size", "kda_lower_bound", "kda_safe_gate"


def _prepare_ling(values: Values) -> Values:
    every, count = values[_GROUP], values["num_hidden_layers"]
    if not isinstance(every, int) or every < 1:
        raise UserError(f"config.json has {_GROUP} = {every!r}, must be at least 1: try 6")
    values = with_mlp_types(
        {**values, **{key: values.get(key) or values[usual] for key, usual in _USUAL_SIZES.items()}}
    )
    types = values.get("layer_types")
    if types is None:
        types = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(count)]
    heads = values.get("num_key_value_heads") or values["num_attention_heads"]
    return {**values, "layer_types": types, "num_key_value_heads": heads}


def _read_ling(values: Values) -> dict[str, Any]:
    fields: dict[str, Any] = {ours: values[theirs] for ours, theirs in _SIZES.items()} | {"maps": "whole"}
    mixer = KimiDelta(**fields, least_decay=values[_BOUND] if values[_BOUNDED] else None)
    return read_latent(values) | recurrent(values, "linear_attention") | {"mixer": mixer}


def _write_ling(config: TransformerConfig) -> dict[str, Any]:
    written = _write(config)
    if not isinstance(config.mixer, KimiDelta) or not written:
        return {}
    least = config.mixer.least_decay
    bound = {_BOUNDED: least is not None} | ({} if least is None else {_BOUND: least})
    return written | {"head_dim": config.mixer.head_dim} | bound


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
            aliases=_ALIASES,
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
    (
        Family(
            model_type="bailing_hybrid",
            architectures=("BailingHybridForCausalLM",),
            keys=WITHOUT_GROUPS,
            fixed={"attention_gate": "head_sigmoid"},
            defaults=SILU
            | {"rope_theta": 6_000_000.0, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64}
            | {"v_head_dim": 128, "qk_nope_head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 512}
            | {
                "n_shared_experts": 1,
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
                "n_group": 8,
                "topk_group": 4,
            }
            | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "num_key_value_heads": 32, "head_dim": 128}
            | {"short_conv_kernel_size": 4, _GROUP: 6, _BOUNDED: True, _BOUND: -5.0},
            # The activation is that of the convolutions, too.
            only=NO_BIAS | {"hidden_act": ("silu", "swish")},
            read_keys=(*LATENT_SIZES.values(), "qk_nope_head_dim", *_USUAL_SIZES, "layer_types", "mlp_layer_types"),
            aliases=_ALIASES | {"num_nextn_predict_layers": "num_mtp_layers"},
            pairs="adjacent",
            mscale=True,
            experts="num_local_experts",
            moe=DEEPSEEK_MOE | {"first_dense": 2},
            moe_keys={ours: key for ours, key in DEEPSEEK_KEYS.items() if ours != "first_dense"},
            mixer_keys={"least_decay": _BOUND},
            read_moe=read_mlp_types,
            prepare=_prepare_ling,
            read=_read_ling,
            write=_write_ling,
        ),
        # The layer after the last one, which predicts several tokens: transformers leaves it out by its number.
        Names(
            renamed(LATENT_ROWS + _LING_MIXER + DEEPSEEK_EXPERTS, *_LING_NAMES),
            (*LLAMA_LIKE[0], (r"\.forget_gate\.", "."), *((re.escape(old), new) for old, new in _LING_NAMES)),
            LLAMA_LIKE[1],
            r"^model\.layers\.42\.",
        ),
    ),
)
