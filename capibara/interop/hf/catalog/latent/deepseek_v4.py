"""DeepSeek-V4 (2026): attention to a window and to entries for earlier ones, several residual streams, experts by tables of ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout import rope as hf_rope
from capibara.interop.hf.layout.family import KEYS, ONLY_SILU, Family, Values, shortest
from capibara.interop.hf.layout.rows import (
    BARE,
    BUFFERS,
    EXPERTS,
    A,
    L,
    M,
    Names,
    Rows,
    experts,
    rows,
    with_attention_of,
)
from capibara.kernels.rotary import Pairs
from capibara.models.api import DeepseekV4Config, Indexer, Rope, TransformerConfig

_KINDS = {
    "sliding_attention": "local",
    "heavily_compressed_attention": "compressed",
    "compressed_sparse_attention": "compressed_sparse",
}
_OF_RATIO = dict(zip((0, 128, 4), _KINDS, strict=True))
_RATES = {"rate": "heavily_compressed_attention", "sparse_rate": "compressed_sparse_attention"}
_OLD_RATES = {"heavily_compressed_attention": "compress_rate_hca", "compressed_sparse_attention": "compress_rate_csa"}
_INDEXER = {"heads": "index_n_heads", "head_dim": "index_head_dim", "top": "index_topk"}
_MLPS = ("hash_moe", "moe")
_SCORES = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
_ROTATED = 64 / 512  # where neither partial_rotary_factor nor qk_rope_head_dim says it

# --- tensors ------------------------------------------------------------------------------------------------------

_AT, _C, _I = f"{L}attn.", f"{A}compressor/", f"{A}indexer/"
_ATTENTION = rows(
    [
        (_AT + "wq_a.weight", "q d", A + "query_down"),
        (_AT + "q_norm.weight", "q", A + "query_norm/scale"),
        (_AT + "wq_b.weight", "nh q", A + "query_up"),
        (_AT + "wkv.weight", "h d", A + "kv_down"),
        (_AT + "norm.weight", "h", A + "kv_norm/scale"),
        (_AT + "attn_sink", "n", A + "sinks"),
        (_AT + "wo_a.weight", "ns h", A + "group_out"),
        (_AT + "wo_b.weight", "d nh", A + "out"),
    ],
    {
        A + "query_down": "ldq",
        A + "query_norm/scale": "lq",
        A + "query_up": "lqnh",
        A + "kv_down": "ldh",
        A + "kv_norm/scale": "lh",
        A + "group_out": "lnhs",
    },
)


def _compressor(module: str, ours: str, key: str, gate: str) -> Rows:
    return rows(
        [
            (f"{module}wkv.weight", "h d", ours + key),
            (f"{module}wgate.weight", "h d", ours + gate),
            (f"{module}ape", "s h", f"{ours}position_bias"),
            (f"{module}norm.weight", "h", f"{ours}norm/scale"),
        ],
        {ours + key: "ldh", ours + gate: "ldh", f"{ours}position_bias": "lsh", f"{ours}norm/scale": "lh"},
    )


_ENTRIES = _compressor(f"{_AT}compressor.", _C, "entry_key", "entry_gate")
_INDEX = _compressor(f"{_AT}indexer.compressor.", f"{_I}compressor/", "index_key", "index_gate") + rows(
    [
        (_AT + "indexer.wq_b.weight", "nh q", _I + "index_query"),
        (_AT + "indexer.weights_proj.weight", "n d", _I + "index_weight"),
    ],
    {_I + "index_query": "lqnh", _I + "index_weight": "ldn"},
)
_ATTENTIONS = dict.fromkeys(
    (
        *_ATTENTION,
        *with_attention_of("compressed", _ATTENTION + _ENTRIES),
        *with_attention_of("sparse", _ATTENTION + _ENTRIES + _INDEX),
    )
)
_EXPERT = "ffn.experts.{e}."
_SHARED = (("w1", "f d", "shared_gate"), ("w3", "f d", "shared_up"), ("w2", "d f", "shared_down"))
_MOE = experts("ffn.gate.weight", *(f"{_EXPERT}{name}.weight" for name in ("w1", "w3", "w2"))) + rows(
    [
        *((f"{L}ffn.shared_experts.{name}.weight", dims, M + ours) for name, dims, ours in _SHARED),
        (L + "ffn.gate.bias", "e", M + "correction"),
        (L + "ffn.gate.tid2eid", "v s", M + "expert_table"),
    ],
    EXPERTS | {M + "expert_table": "lvs"},
)
_HASHED = tuple(
    dataclasses.replace(row, ours=tuple(path.replace(M, "layers/hash_mlp/") for path in row.ours)) for row in _MOE
)
_STREAMS = rows(
    [
        *(
            row
            for name, ours in (("attn", "attention"), ("ffn", "mlp"))
            for row in (
                (f"{L}hc_{name}_fn", "m sd", f"layers/{ours}_streams/weights/weight"),
                (f"{L}hc_{name}_base", "m", f"layers/{ours}_streams/weights/bias"),
                (f"{L}hc_{name}_scale", "p", f"layers/{ours}_streams/weights/factor"),
            )
        ),
        ("model.hc_head.hc_fn", "m sd", "stream_head/weights/weight"),
        ("model.hc_head.hc_base", "m", "stream_head/weights/bias"),
        ("model.hc_head.hc_scale", "p", "stream_head/weights/factor"),
        ("model.embed_tokens.weight", "v d", "embedding"),
        (f"{L}attn_norm.weight", "d", "layers/attention_norm/scale"),
        (f"{L}ffn_norm.weight", "d", "layers/mlp_norm/scale"),
        ("model.norm.weight", "d", "final_norm/scale"),
        ("head.weight", "v d", "output"),
    ],
    {
        f"{module}/weights/{name}": f"{layer}{dims}"
        for module, layer in (("layers/attention_streams", "l"), ("layers/mlp_streams", "l"), ("stream_head", ""))
        for name, dims in (("weight", "sdm"), ("bias", "m"), ("factor", "p"))
    },
)
# The files' own names, and those that transformers has in memory: the table has those that it writes.
_RENAMED = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^lm_head\.", "head."),
    (r"^(?:model\.)?hc_head_", "model.hc_head.hc_"),
    (r"^hc_head\.", "model.hc_head."),
    BARE,
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.compressor\.indexer\.(?=kv_|gate_|position)", ".indexer.compressor."),
    (r"\.compressor\.indexer\.(?:scorer\.)?", ".indexer."),
    (r"\.position_bias$", ".ape"),
    (r"\.kv_norm\.", ".norm."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
    (r"(\.attn\..*)kv_proj\.", r"\1wkv."),
    (r"(compressor\.)gate_proj\.", r"\1wgate."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    *(
        (rf"\.shared_experts\.{name}_proj\.", f".shared_experts.{short}.")
        for name, short in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
)

# --- config.json --------------------------------------------------------------------------------------------------


def _layer_types(values: Values) -> list[Any]:
    count, ratios = values["num_hidden_layers"], values.get("compress_ratios")
    if (types := values.get("layer_types")) is None and ratios is not None:
        if strange := [ratio for ratio in ratios if ratio not in _OF_RATIO]:
            raise UserError(
                f"config.json has compress_ratios {strange[0]!r}, must be one of {', '.join(map(str, _OF_RATIO))}"
            )
        types = [_OF_RATIO[ratio] for ratio in ratios]
    if types is None:
        _, dense, sparse = _KINDS
        types = [dense] * min(count, 2) + [sparse if layer % 2 else dense for layer in range(max(count - 2, 0))]
    return list(types[:count])


def _prepare(values: Values) -> Values:
    """The values with what transformers makes of keys of older files, or of none."""
    count, result = values["num_hidden_layers"], {**values}
    result["layer_types"] = _layer_types(values)
    if result.get("mlp_layer_types") is None:
        hashed = min(count, 3 if (stated := values.get("num_hash_layers")) is None else stated)
        result["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (count - hashed)
    result["mlp_layer_types"] = list(result["mlp_layer_types"][:count])
    for key, known in (("layer_types", [*_KINDS]), ("mlp_layer_types", [*_MLPS])):
        types = result[key]
        if len(types) != count or any(kind not in known for kind in types):
            raise UserError(
                f"config.json has {key} {', '.join(map(str, types[:8]))}, must be one of {', '.join(known)} for each of "
                f"num_hidden_layers = {count} layers: take another model"
            )
    rates = dict(result["compress_rates"] or {})
    rates |= {kind: values[key] for kind, key in _OLD_RATES.items() if values.get(key) is not None}
    result["compress_rates"] = rates
    return result


def _rope(values: Values, kinds: Collection[str]) -> Rope:
    """Of layers with entries those of `compress`; of the others those of `main`, where there are any."""
    parameters, size = values.get("rope_scaling") or values.get("rope_parameters") or {}, values["head_dim"]
    fraction = values.get("partial_rotary_factor")
    if fraction is None:
        stated = values.get("qk_rope_head_dim")
        fraction = _ROTATED if stated is None else stated / size
    main, compress = (parameters.get(name) for name in ("main", "compress"))
    if not (isinstance(main, dict) and isinstance(compress, dict)):
        scaling = {key: value for key, value in parameters.items() if key not in ("main", "compress")}
        main = {"rope_theta": values["rope_theta"], "partial_rotary_factor": fraction}
        compress = scaling | {"rope_theta": values["compress_rope_theta"], "partial_rotary_factor": fraction}
        if (scaling.get("rope_type") or scaling.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
    both = {"full_attention": compress, "sliding_attention": main}
    stated = {"rope_parameters": both, "rope_scaling": None, "rope_local_base_freq": values["rope_theta"]}
    fields = hf_rope.read({**values, **stated}, _ROTARY)
    if fields["scaling"] in ("dynamic", "longrope"):
        raise UserError(
            f"config.json has rope_type {fields['scaling']!r} in rope_parameters (rope_scaling), must not depend on a row's length: "
            "take another model"
        )
    if "local" not in kinds:
        del fields["local_theta"], fields["local_fraction"]
    return Rope(**fields)


def _read(values: Values) -> dict[str, Any]:
    kinds = [_KINDS[kind] for kind in values["layer_types"]]
    # The first layers are those before the longest part that repeats a pattern.
    starts = (n for n in range(len(kinds)) if 2 * len(shortest(kinds[n:])) <= len(kinds) - n)
    first, rates = next(starts, 0), values["compress_rates"]
    fields: dict[str, Any] = {"first_kinds": tuple(kinds[:first]), "layer_pattern": shortest(kinds[first:])}
    if missing := [kind for kind in _RATES.values() if kind in values["layer_types"] and rates.get(kind) is None]:
        raise UserError(f"config.json has compress_rates without {missing[0]}, which layers have: copy the file again")
    fields |= {ours: rates[kind] for ours, kind in _RATES.items() if rates.get(kind) is not None}
    sizes = {ours: values[theirs] for ours, theirs in _INDEXER.items()}
    return fields | {
        "rope": _rope(values, kinds),
        "window": values["sliding_window"],
        "indexer": Indexer(**sizes, pairs=Pairs.ADJACENT),
        "sinkhorn_steps": max(1, values["hc_sinkhorn_iters"]),
    }


def _read_moe(values: Values) -> dict[str, Any]:
    types = values["mlp_layer_types"]
    hashed = types.count("hash_moe")
    if types != ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed):
        raise UserError(
            f"config.json has mlp_layer_types {', '.join(types[:8])}, must be 'hash_moe' in the first layers alone: take another model"
        )
    return {"score": _SCORES[values["scoring_func"]], "hash_layers": hashed}


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DeepseekV4Config) and config.moe is not None, "the family's kind"
    kinds, scores = ({ours: theirs for theirs, ours in of.items()} for of in (_KINDS, _SCORES))
    hashed = min(config.moe.hash_layers, config.num_layers)
    rope = hf_rope.write(config, _ROTARY)["rope_parameters"]
    fraction = rope["full_attention"]["partial_rotary_factor"]
    return {
        "layer_types": [kinds[str(kind)] for kind in config.kinds],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (config.num_layers - hashed),
        "compress_rates": {kind: getattr(config, ours) for ours, kind in _RATES.items()},
        "sliding_window": config.window,
        "hc_sinkhorn_iters": config.sinkhorn_steps,
        "scoring_func": scores.get(str(config.moe.score)),
        "rope_theta": rope["sliding_attention"]["rope_theta"],
        "compress_rope_theta": config.rope.theta,
        "partial_rotary_factor": fraction,
        "rope_parameters": {"main": rope["sliding_attention"], "compress": rope["full_attention"]},
        **{theirs: getattr(config.indexer, ours) for ours, theirs in _INDEXER.items()},
    }


_V4 = Family(
    model_type="deepseek_v4",
    architectures=("DeepseekV4ForCausalLM",),
    keys={ours: theirs for ours, theirs in KEYS.items() if ours != "num_kv_heads"}
    | {
        "mlp_dim": "moe_intermediate_size",
        "query_rank": "q_lora_rank",
        "out_groups": "o_groups",
        "out_rank": "o_lora_rank",
    }
    | {"streams": "hc_mult", "stream_eps": "hc_eps", "swiglu_limit": "swiglu_limit"},
    fixed={"activation": "limited_swiglu"},
    activation="",
    rope=False,
    config=DeepseekV4Config,
    defaults={"hidden_act": "silu", "rope_theta": 10_000.0, "compress_rope_theta": 160_000.0, "rms_norm_eps": 1e-6}
    | {"vocab_size": 129_280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43}
    | {"num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024}
    | {"num_experts_per_tok": 6, "n_routed_experts": 256, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}
    | {"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0, "sliding_window": 128}
    | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 512}
    | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}},
    only=ONLY_SILU | {"mlp_bias": (False, None), "scoring_func": tuple(_SCORES)},
    aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
    experts="n_routed_experts",
    moe={"gates": "normalized", "correction": "expert", "shared_experts": 1},
    moe_keys={"scale": "routed_scaling_factor"},
    mixer_keys=_INDEXER,
    read_moe=_read_moe,
    read_keys=(
        "layer_types",
        "mlp_layer_types",
        "compress_rates",
        "compress_ratios",
        "num_hash_layers",
        "qk_rope_head_dim",
    )
    + ("rope_parameters", "rope_scaling", "partial_rotary_factor", "max_position_embeddings", *_OLD_RATES.values()),
    prepare=_prepare,
    read=_read,
    write=_write,
)
_ROTARY = dataclasses.replace(_V4, rope=True, rope_by_layer=True, partial=True, pairs="adjacent")

FAMILIES = (
    (
        _V4,
        # The module that predicts further tokens, which transformers leaves out.
        Names(
            (*_STREAMS, *_ATTENTIONS, *_MOE, *_HASHED),
            _RENAMED,
            BUFFERS,
            r"(?:^|\.)mtp\.",
            numbers={r"\.ffn\.gate\.tid2eid$": "n_routed_experts"},
        ),
    ),
)
