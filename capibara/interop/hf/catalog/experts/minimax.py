"""MiniMax's mixtures: MiniMax-Text-01, most of whose layers have lightning attention, MiniMax-M2 (both 2025), and MiniMax-M3.

Queries of most layers of MiniMax-M3 (2026) see the blocks of keys alone that an indexer chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.hf.catalog.experts.glm import DEEPSEEK_MOE, read_mlp_types, write_mlp_types
from capibara.interop.hf.layout.family import (
    KEYS,
    ONLY_SILU,
    SILU,
    Family,
    Values,
    recurrent,
    shortest,
    write_recurrent,
)
from capibara.interop.hf.layout.rows import (
    BARE,
    BUFFERS,
    DEEPSEEK_EXPERTS,
    EXPERTS,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    WHOLE_NORMS,
    A,
    Constant,
    L,
    M,
    Names,
    experts,
    rows,
    with_attention_of,
    without,
)
from capibara.models.api import BlockIndexer, DecoderConfig, Lightning, Multipliers, Rope, TransformerConfig

_BLOCK = "block_sparse_moe."
_ROWS = without(LLAMA, ".mlp.") + experts(
    _BLOCK + "gate.weight", *(f"{_BLOCK}experts.{{e}}.{name}.weight" for name in ("w1", "w3", "w2"))
)
_ALIASES = {"num_experts": "num_local_experts"}
_DEFAULTS = SILU | {"num_key_value_heads": 8, "router_aux_loss_coef": 0.001, "output_router_logits": False}

# --- MiniMax-Text-01 ----------------------------------------------------------------------------------------------

_X = "layers/mixer/"
_MIXER_ROWS = rows(
    [
        (L + "self_attn.qkv_proj.weight", "nih d", " ".join(_X + by.name for by in projections.LIGHTNING), "i"),
        (L + "self_attn.output_gate.weight", "nh d", f"{_X}{projections.LIGHTNING_GATE.name}"),
        (L + "self_attn.norm.weight", "nh", _X + "out_norm/scale"),
        (L + "self_attn.out_proj.weight", "d nh", _X + "out"),
    ],
    {
        **dict.fromkeys((f"{_X}{by.name}" for by in (*projections.LIGHTNING, projections.LIGHTNING_GATE)), "ldnh"),
        _X + "out_norm/scale": "lnh",
        _X + "out": "lnhd",
    },
)


def _slopes(values: Values, layer: int) -> np.ndarray:
    """Of each head: [N, 1, 1]."""
    rates = Lightning(heads=values["num_attention_heads"]).rates(values["num_hidden_layers"])[layer]
    return rates.astype(np.float32)[:, None, None]


def _decays(steps: Callable[[np.ndarray], np.ndarray]) -> Callable[[Values, int], np.ndarray]:
    """What is left of a state after these numbers of tokens, from the number of each token of a block."""
    return lambda values, layer: np.exp(-_slopes(values, layer) * steps(np.arange(values["block_size"])[:, None]))


def _lower(values: Values, layer: int) -> np.ndarray:
    """What is left of each token of a block at those after it: [1, N, block, block]."""
    return np.tril(_decays(lambda tokens: abs(tokens - tokens.T))(values, layer))[None]


def _column(values: Values) -> tuple[int, ...]:
    return values["num_attention_heads"], values["block_size"], 1


# Tensors of a file that follow from its config.json, and that transformers computes where they are missing.
_TABLES = {
    "slope_rate": Constant(lambda values: (values["num_attention_heads"], 1, 1), _slopes),
    "query_decay": Constant(_column, _decays(lambda tokens: tokens + 1)),
    "key_decay": Constant(_column, _decays(lambda tokens: len(tokens) - 1 - tokens)),
    "diagonal_decay": Constant(
        lambda values: (1, values["num_attention_heads"], values["block_size"], values["block_size"]), _lower
    ),
}
_DECAYS = {rf"\.self_attn\.{name}$": constant for name, constant in _TABLES.items()}
_OF_ATTENTION = {"attention_residual": "full_attn_alpha_factor", "attention_output": "full_attn_beta_factor"}
_OF_MIXER = {"mixer_residual": "linear_attn_alpha_factor", "mixer_output": "linear_attn_beta_factor"}
_OF_MLP = {"mlp_residual": "mlp_alpha_factor", "mlp_output": "mlp_beta_factor"}
_MULTIPLIERS = _OF_ATTENTION | _OF_MIXER | _OF_MLP


def _prepare(values: Values) -> Values:
    if values.get("layer_types") is not None:
        return values
    layers = range(values.get("num_hidden_layers") or 0)
    return {**values, "layer_types": ["linear_attention" if i % 2 else "full_attention" for i in layers]}


def _read(values: Values) -> dict[str, Any]:
    pattern = recurrent(values, "linear_attention", both=False)["layer_pattern"]
    used = dict(_OF_MLP)
    fields: dict[str, Any] = {}
    if "recurrent" in pattern:
        heads = values["num_attention_heads"]
        size = values.get("head_dim") or values["hidden_size"] // heads
        used |= _OF_MIXER
        fields["mixer"] = Lightning(heads=heads, head_dim=size)
    if "global" in pattern:
        used |= _OF_ATTENTION
        fields["window"] = window = values.get("sliding_window")
        pattern = pattern if window is None else tuple("local" if kind == "global" else kind for kind in pattern)
    else:
        fields |= {"positions": "none", "rope": Rope()}
    multipliers = Multipliers(**{ours: values[theirs] for ours, theirs in used.items()})
    return fields | {"layer_pattern": pattern, "multipliers": multipliers}


def _write(config: TransformerConfig) -> dict[str, Any]:
    if not (isinstance(config, DecoderConfig) and isinstance(config.mixer, Lightning | None)):
        return {}
    written = write_recurrent(config, "linear_attention") | {"sliding_window": config.window}
    return written | {theirs: getattr(config.multipliers, ours) for ours, theirs in _MULTIPLIERS.items()}


# --- MiniMax-M2 ---------------------------------------------------------------------------------------------------

_MINIMAX_M2 = _ROWS + WHOLE_NORMS + rows([(L + _BLOCK + "e_score_correction_bias", "e", M + "correction")], EXPERTS)

# --- MiniMax-M3 ---------------------------------------------------------------------------------------------------

_SPARSE = {"minimax_m3_sparse": "sparse", "full_attention": "global"}
_INDEXER = {
    "heads": "index_n_heads",
    "head_dim": "index_head_dim",
    "block": "index_block_size",
    "top": "index_topk_blocks",
    "recent": "index_local_blocks",
}
# Where its own files have these sizes, in an object.
_OWN_CONFIG, _OWN_TYPES, _OWN_MLPS = "sparse_attention_config", "sparse_attention_freq", "moe_layer_freq"
_OWN_SIZES = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def _prepare_m3(values: Values) -> Values:
    count, nested = values["num_hidden_layers"], values.get(_OWN_CONFIG) or {}
    if not isinstance(nested, Mapping):
        raise UserError(f"config.json has {_OWN_CONFIG} = {str(nested)[:60]}, must be an object: copy the file again")
    values = {**values, **{key: nested[name] for key, name in _OWN_SIZES.items() if name in nested}}
    for key, kinds, flags in (
        ("layer_types", [*_SPARSE], nested.get(_OWN_TYPES)),
        ("mlp_layer_types", ["sparse", "dense"], values.get(_OWN_MLPS)),
    ):
        if values.get(key) is None:
            usual = kinds[-1] if key == "layer_types" else kinds[0]
            values[key] = [usual] * count if flags is None else [kinds[0] if flag else kinds[1] for flag in flags]
    return values


def _check_rotated(values: Values) -> None:
    """Checks that the indexer's heads have the dimensions that are rotated: transformers cuts their angles off.

    Raises:
      UserError: they have fewer.
    """
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    size, heads = values["index_head_dim"], values["head_dim"]
    if size < int(heads * share):
        raise UserError(
            f"config.json has index_head_dim = {size}, must be at least the dimensions of head_dim = {heads} that rope_parameters "
            f"(rope_scaling) rotate by partial_rotary_factor = {share}: take another model"
        )


def _read_m3(values: Values) -> dict[str, Any]:
    types, count = values["layer_types"], values["num_hidden_layers"]
    if len(types) != count or not {*types} <= {*_SPARSE}:
        raise UserError(
            f"config.json has layer_types {', '.join(map(str, types[:8]))} ({_OWN_TYPES} of {_OWN_CONFIG}), must be one of "
            f"{', '.join(_SPARSE)} for each of num_hidden_layers = {count} layers: take another model"
        )
    fields: dict[str, Any] = {"layer_pattern": shortest([_SPARSE[kind] for kind in types])}
    if "minimax_m3_sparse" in types:
        _check_rotated(values)
        fields["block_indexer"] = BlockIndexer(**{ours: values[theirs] for ours, theirs in _INDEXER.items()})
    return fields


def _write_m3(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    names = {ours: theirs for theirs, ours in _SPARSE.items()}
    written = {"layer_types": [names.get(str(kind)) for kind in config.kinds]} | write_mlp_types(config)
    sizes = config.block_indexer
    return written if sizes is None else written | {key: getattr(sizes, ours) for ours, key in _INDEXER.items()}


_J = f"{A}indexer/"
_M3_ATTENTION = with_attention_of(
    "sparse",
    without(LLAMA, ".mlp.")
    + QK_NORM
    + rows(
        [
            (L + "self_attn.indexer.q_proj.weight", "nh d", _J + "block_query"),
            (L + "self_attn.indexer.k_proj.weight", "h d", _J + "block_key"),
            (L + "self_attn.indexer.q_norm.weight", "h", _J + "query_norm/scale"),
            (L + "self_attn.indexer.k_norm.weight", "h", _J + "key_norm/scale"),
        ],
        {_J + "block_query": "ldnh", _J + "block_key": "ldh"}
        | dict.fromkeys((_J + "query_norm/scale", _J + "key_norm/scale"), "lh"),
    ),
)
_FUSED_MLPS = (("mlp.", "layers/first_mlp/{}"), ("mlp.shared_experts.", f"{M}shared_{{}}"))
_M3 = (
    _M3_ATTENTION
    + without(DEEPSEEK_EXPERTS, "_proj")
    + rows(
        [
            (L + "mlp.experts.gate_up_proj", "e f d", f"{M}gate {M}up", "f"),
            (L + "mlp.experts.down_proj", "e d f", M + "down"),
            *(
                (f"{L}{theirs}gate_up_proj.weight", "f d", f"{ours.format('gate')} {ours.format('up')}", "f")
                for theirs, ours in _FUSED_MLPS
            ),
            *((f"{L}{theirs}down_proj.weight", "d f", ours.format("down")) for theirs, ours in _FUSED_MLPS),
        ],
        EXPERTS,
    )
)
_M3_NAMES = (  # of the files of the whole model
    (r"\.block_sparse_moe\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.self_attn\.index_([qk]_(?:proj|norm))\.", r".self_attn.indexer.\1."),
    *(
        (rf"\.{short}\.weight$", f".{name}_proj.weight")
        for short, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
)

FAMILIES = (
    (
        Family(
            model_type="minimax",
            architectures=("MiniMaxForCausalLM",),
            keys=KEYS,
            fixed={"activation": "swiglu", "norm_placement": "stream"},
            activation="",
            defaults=_DEFAULTS
            | {
                "rope_theta": 1_000_000.0,
                "rms_norm_eps": 1e-5,
                "num_experts_per_tok": 2,
                "num_local_experts": 8,
                "block_size": 256,
            }
            | dict.fromkeys(_MULTIPLIERS.values(), 1.0),
            only=ONLY_SILU,
            aliases=_ALIASES,
            experts="num_local_experts",
            moe={"gates": "normalized"},
            mixer_keys=_MULTIPLIERS,
            read_keys=("layer_types", "sliding_window", "block_size"),
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(_ROWS + _MIXER_ROWS, (BARE,), "|".join([BUFFERS, *_DECAYS]), constants=_DECAYS),
    ),
    (
        Family(
            model_type="minimax_m2",
            architectures=("MiniMaxM2ForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "whole"},
            defaults=_DEFAULTS
            | {"rope_theta": 5_000_000.0, "head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 256},
            aliases=_ALIASES,
            experts="num_local_experts",
            moe={"score": "sigmoid", "gates": "normalized", "correction": "expert"},
            partial=True,
        ),
        Names(_MINIMAX_M2, *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="minimax_m3_vl_text",
            architectures=("MiniMaxM3VLForCausalLM",),
            keys=KEYS
            | {"mlp_dim": "dense_intermediate_size", "swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
            fixed={"qk_norm": "head", "norm_scale": "offset"},
            defaults=_DEFAULTS
            | {"rope_theta": 5_000_000.0, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 4}
            | {"num_local_experts": 128, "intermediate_size": 3072, "dense_intermediate_size": 12_288}
            | {"shared_intermediate_size": 3072, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702}
            | {"swiglu_limit": 7.0, "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128}
            | {"index_topk_blocks": 16, "index_local_blocks": 1},
            aliases=_ALIASES,
            experts="num_local_experts",
            moe=DEEPSEEK_MOE | {"gates": "normalized", "shared_experts": 1},
            moe_keys={
                "expert_dim": "intermediate_size",
                "shared_dim": "shared_intermediate_size",
                "scale": "routed_scaling_factor",
            },
            partial=True,
            mixer_keys=_INDEXER,
            read_moe=read_mlp_types,
            read_keys=("layer_types", "mlp_layer_types", _OWN_CONFIG, _OWN_MLPS),
            prepare=_prepare_m3,
            read=_read_m3,
            write=_write_m3,
        ),
        # The layers that predict several tokens, which transformers leaves out.
        Names(
            _M3,
            (BARE, *_M3_NAMES),
            BUFFERS,
            r"(?:^|\.)mtp\.",
            separate=_M3_ATTENTION + DEEPSEEK_EXPERTS,
        ),
    ),
)
