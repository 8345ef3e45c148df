"""DeepSeek-V3.2 (2025), GLM-5 (Z.ai 2026) and A.X-K2 (SK Telecom 2026): latent attention to keys that an indexer chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.experts.glm import (
    DEEPSEEK_KEYS,
    DEEPSEEK_MOE,
    read_mlp_types,
    with_mlp_types,
    write_mlp_types,
)
from capibara.interop.hf.catalog.latent.deepseek import LATENT_ROWS, prepare_axk, read_latent, write_latent
from capibara.interop.hf.layout.family import LATENT_SIZES, NO_BIAS, SILU, WITHOUT_GROUPS, Family, Values
from capibara.interop.hf.layout.rows import DEEPSEEK_EXPERTS, LLAMA_LIKE, A, L, Names, rows, without
from capibara.kernels.rotary import Pairs
from capibara.models.api import DecoderConfig, Indexer, TransformerConfig

_I = A + "indexer/"
_ROWS = rows(
    [
        (L + "self_attn.indexer.wq_b.weight", "nh q", _I + "index_query"),
        (L + "self_attn.indexer.wk.weight", "h d", _I + "index_key"),
        (L + "self_attn.indexer.k_norm.weight", "h", _I + "norm/scale"),
        (L + "self_attn.indexer.k_norm.bias", "h", _I + "norm/bias"),
        (L + "self_attn.indexer.weights_proj.weight", "n d", _I + "index_weight"),
    ],
    {
        _I + "index_query": "lqnh",
        _I + "index_key": "ldh",
        **dict.fromkeys((_I + "norm/scale", _I + "norm/bias"), "lh"),
        _I + "index_weight": "ldn",
    },
)
_SIZES = {"heads": "index_n_heads", "head_dim": "index_head_dim", "top": "index_topk"}
_KINDS = {"F": "full", "S": "shared"}


def _prepare(values: Values) -> Values:
    """With a kind of MLP for each layer: the first ones are dense."""
    if values.get("q_lora_rank") is None:
        raise UserError("config.json has q_lora_rank = None, must be at least 1: the indexer reads these latents")
    return with_mlp_types(values)


def _prepare_glm(values: Values) -> Values:
    """Checks that each layer has an indexer of its own, too.

    Raises:
      UserError: a layer reads the choice of an earlier one.
    """
    count, types, key = values["num_hidden_layers"], values.get("indexer_types"), "indexer_types"
    if types is None and (pattern := values.get("index_topk_pattern")) is not None:
        types, key = [_KINDS.get(kind, kind) for kind in pattern], "index_topk_pattern"
    elif types is None:
        every, offset = max(values["index_topk_freq"], 1), values["index_skip_topk_offset"]
        types, key = (
            ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(count)],
            f"index_topk_freq = {every} and index_skip_topk_offset = {offset}, which is indexer_types",
        )
    if types[:count] != ["full"] * count:
        raise UserError(
            f"config.json has {key} = {str(types)[:60]}, must be 'full' for each of {count} layers: layers that share the "
            "choice of an earlier one are not supported, take another model"
        )
    return _prepare(values)


def _read(pairs: Pairs) -> Callable[[Values], dict[str, Any]]:
    def read(values: Values) -> dict[str, Any]:
        fields: dict[str, Any] = {ours: values[theirs] for ours, theirs in _SIZES.items()} | {"pairs": pairs}
        return read_latent(values, Indexer(**fields))

    return read


def _write(config: TransformerConfig) -> dict[str, Any]:
    if config.latent is None or config.latent.indexer is None:
        return {}
    sizes = {theirs: getattr(config.latent.indexer, ours) for ours, theirs in _SIZES.items()}
    return write_latent(config) | write_mlp_types(config) | sizes


def _write_glm(config: TransformerConfig) -> dict[str, Any]:
    return _write(config) | {"indexer_types": ["full"] * config.num_layers}


_DEFAULTS = SILU | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_experts_per_tok": 8, "n_routed_experts": 256}
_DEFAULTS |= {"moe_intermediate_size": 2048, "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 3}
_DEFAULTS |= {"routed_scaling_factor": 2.5, "index_topk": 2048, "index_head_dim": 128}
_READ_KEYS = (*LATENT_SIZES.values(), "qk_nope_head_dim", "num_key_value_heads", "mlp_layer_types", *_SIZES.values())
_COMMON: dict[str, Any] = dict(
    keys=WITHOUT_GROUPS,
    only=NO_BIAS,
    pairs="adjacent",
    mscale=True,
    aliases=dict.fromkeys(("num_local_experts", "num_experts"), "n_routed_experts"),
    experts="n_routed_experts",
    moe=DEEPSEEK_MOE | {"first_dense": 3},
    moe_keys={ours: key for ours, key in DEEPSEEK_KEYS.items() if ours != "first_dense"},
    read_moe=read_mlp_types,
)

# --- A.X-K2: queries and a gate of all latents, gates of norms -------------------------------------------------------

_RANK = "gated_norm_rank"
_ATTENTION_NORM, _EXPERTS_NORM = "layers/attention_norm/", "layers/gated_mlp_norm/"
_AXK2 = (
    without(LATENT_ROWS, "q_b_proj", "input_layernorm")
    + rows(
        [
            (L + "self_attn.q_b_proj.weight", "nh q", f"{A}query_up {A}gate_up", "h"),
            *(
                row
                for name, ours in (("input", _ATTENTION_NORM), ("post_attention", _EXPERTS_NORM))
                for row in (
                    (f"{L}{name}_layernorm.norm.weight", "d", ours + "scale"),
                    (f"{L}{name}_layernorm.W_down.weight", "s d", ours + "norm_down"),
                    (f"{L}{name}_layernorm.W_up.weight", "d s", ours + "norm_up"),
                )
            ),
        ],
        {
            **dict.fromkeys((A + "query_up", A + "gate_up"), "lqnh"),
            **{
                ours + name: layout
                for ours in (_ATTENTION_NORM, _EXPERTS_NORM)
                for name, layout in (("scale", "ld"), ("norm_down", "lds"), ("norm_up", "lsd"))
            },
        },
    )
    + _ROWS
    + DEEPSEEK_EXPERTS
)
# transformers' names in memory, and those of files.
_AXK2_NAMES = (
    (r"\.self_attn\.q_gate_proj\.", ".self_attn.q_b_proj."),
    (r"layernorm\.mlp\.fc1\.", "layernorm.W_down."),
    (r"layernorm\.mlp\.fc2\.", "layernorm.W_up."),
)


def _prepare_axk2(values: Values) -> Values:
    groups = {key: values.get(key) for key in ("n_group", "topk_group")}
    if len({value is None for value in groups.values()}) > 1:
        raise UserError(f"config.json has {groups}, must be n_group and topk_group or neither: copy the file again")
    return prepare_axk(values)


def _read_axk2(values: Values) -> dict[str, Any]:
    fields = _read(Pairs.HALVES)(values)
    latent: dict[str, Any] = {"queries": "both"}
    return fields | {"latent": dataclasses.replace(fields["latent"], **latent), "norm_gate_rank": values[_RANK]}


def _write_axk2(config: TransformerConfig) -> dict[str, Any]:
    return _write(config) | ({_RANK: config.norm_gate_rank} if isinstance(config, DecoderConfig) else {})


FAMILIES = (
    (
        Family(
            model_type="deepseek_v32",
            architectures=("DeepseekV32ForCausalLM",),
            defaults=_DEFAULTS
            | {"q_lora_rank": 1536, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4}
            | {"index_n_heads": 64},
            read_keys=(*_READ_KEYS, "first_k_dense_replace"),
            prepare=_prepare,
            read=_read(Pairs.HALVES),
            write=_write,
            **_COMMON,
        ),
        Names(LATENT_ROWS + _ROWS + DEEPSEEK_EXPERTS, *LLAMA_LIKE, parts=r"^model\.layers\.61\."),
    ),
    (
        Family(
            model_type="glm_moe_dsa",
            architectures=("GlmMoeDsaForCausalLM",),
            defaults=_DEFAULTS
            | {"rms_norm_eps": 1e-5, "q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1}
            | {"topk_group": 1, "index_n_heads": 32, "index_topk_freq": 1, "index_skip_topk_offset": 2},
            read_keys=(*_READ_KEYS, "first_k_dense_replace", "indexer_types", "index_topk_pattern"),
            prepare=_prepare_glm,
            read=_read(Pairs.ADJACENT),
            write=_write_glm,
            **_COMMON,
        ),
        Names(LATENT_ROWS + _ROWS + DEEPSEEK_EXPERTS, *LLAMA_LIKE, parts=r"^model\.layers\.78\."),
    ),
    (
        Family(
            model_type="axk2",
            architectures=("AXK2ForCausalLM",),
            fixed={"attention_gate": "sigmoid"},
            defaults=_DEFAULTS
            | {
                "kv_lora_rank": 128,
                "q_lora_rank": 384,
                "qk_rope_head_dim": 32,
                "v_head_dim": 64,
                "qk_nope_head_dim": 64,
            }
            | {"num_key_value_heads": 32, "n_routed_experts": 128, "moe_intermediate_size": 512, "index_n_heads": 16}
            | {"first_k_dense_replace": 1, "moe_layer_freq": 1, _RANK: 16},
            read_keys=(*_READ_KEYS, "n_group", "topk_group"),
            prepare=_prepare_axk2,
            read=_read_axk2,
            write=_write_axk2,
            **_COMMON
            | {"aliases": {"num_local_experts": "n_routed_experts"}, "moe": DEEPSEEK_MOE | {"outside": "zero"}},
        ),
        Names(_AXK2, (*LLAMA_LIKE[0], *_AXK2_NAMES), LLAMA_LIKE[1]),
    ),
)
