"""DeepSeek-V2 (2024, arXiv:2405.04434), DeepSeek-V3 (2024, arXiv:2412.19437) and what has their latent attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf.catalog.dense.mistral import read_growth, write_growth
from capibara.interop.hf.catalog.experts.glm import (
    DEEPSEEK_KEYS,
    DEEPSEEK_MOE,
    read_mlp_types,
    write_mlp_types,
)
from capibara.interop.hf.layout import mtp
from capibara.interop.hf.layout.family import KEYS, LATENT_SIZES, MTP_KEY, NO_BIAS, SILU, Family, Values, with_rope
from capibara.interop.hf.layout.rows import (
    DEEPSEEK_EXPERTS,
    EXPERTS,
    FIRST_MLP,
    LLAMA,
    LLAMA_LIKE,
    A,
    L,
    Names,
    rows,
    shared_experts,
    without,
)
from capibara.interop.hf.tables import FUSED_EXPERTS, OUTPUT_NORM
from capibara.models.api import DecoderConfig, Indexer, LatentAttention, TransformerConfig

LATENT_SIZE_KEYS = (*LATENT_SIZES.values(), "qk_nope_head_dim", "num_key_value_heads")
_DEFAULTS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEFAULTS |= {"qk_nope_head_dim": 128}
_LAYOUTS = {
    A + "query_down": "ldq",
    A + "query_norm/scale": "lq",
    A + "query_up": "lqnh",
    A + "kv_down": "ldk",
    A + "kv_norm/scale": "lk",
    A + "key_up": "lknh",
}
LATENT_ROWS = without(LLAMA, "k_proj", "v_proj", ".mlp.") + rows(
    [
        (L + "self_attn.q_a_proj.weight", "q d", A + "query_down"),
        (L + "self_attn.q_a_layernorm.weight", "q", A + "query_norm/scale"),
        (L + "self_attn.q_b_proj.weight", "nh q", A + "query_up"),
        (L + "self_attn.kv_a_proj_with_mqa.weight", "k d", f"{A}kv_down {A}key_rotary", "k"),
        (L + "self_attn.kv_a_layernorm.weight", "k", A + "kv_norm/scale"),
        (L + "self_attn.kv_b_proj.weight", "nh k", f"{A}key_up {A}value_up", "h"),
    ],
    _LAYOUTS,
)
MLP = tuple(row for row in LLAMA if ".mlp." in row.name)


def read_latent(values: Values, indexer: Indexer | None = None) -> dict[str, Any]:
    """Our sizes of latent attention; `indexer` chooses its keys.

    Raises:
      UserError: there are groups of heads.
    """
    heads = values.get("num_key_value_heads")
    if heads is not None and heads != values["num_attention_heads"]:
        raise UserError(
            f"config.json has num_key_value_heads = {heads}, must be num_attention_heads ({values['num_attention_heads']}): "
            "latent attention has keys for each head"
        )
    latent = LatentAttention(**{ours: values[theirs] for ours, theirs in LATENT_SIZES.items()}, indexer=indexer)
    return {"head_dim": values["qk_nope_head_dim"] + latent.rotary_dim, "latent": latent}


def write_latent(config: TransformerConfig) -> dict[str, Any]:
    """The way back."""
    if config.latent is None:
        return {}
    sizes = {theirs: getattr(config.latent, ours) for ours, theirs in LATENT_SIZES.items()}
    nope = config.head_size - config.latent.rotary_dim
    return sizes | {"qk_nope_head_dim": nope, "num_key_value_heads": config.num_heads}


def _prepare_v2(values: Values) -> Values:
    """Without its method the groups have no meaning; the weights are never normalised, whatever norm_topk_prob says."""
    if values.get("topk_method") not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"config.json has topk_method = {values.get('topk_method')!r}, must be 'greedy' or 'group_limited_greedy'"
        )
    in_groups = values["topk_method"] == "group_limited_greedy"
    if in_groups and not (values.get("n_group") and values.get("topk_group")):
        raise UserError("config.json has topk_method = 'group_limited_greedy' without n_group or topk_group: set both")
    return values if in_groups else {**values, "n_group": 1, "topk_group": 1}


def _write_v2(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    in_groups = config.moe is not None and config.moe.groups > 1
    return write_latent(config) | {"topk_method": "group_limited_greedy" if in_groups else "greedy"}


def _write_lite(config: TransformerConfig) -> dict[str, Any]:
    return write_latent(config) | write_mlp_types(config)


def _prepare_sarvam(values: Values) -> Values:
    """YaRN has another name in its first files."""
    rope = values.get("rope_scaling") or {}
    if "deepseek_yarn" not in (rope.get("type"), rope.get("rope_type")):
        return values
    retained = {key: value for key, value in rope.items() if key != "type"}
    return {**values, "rope_scaling": {**retained, "rope_type": "yarn"}}


def _prepare_mistral4(values: Values) -> Values:
    """Checks that the share of heads that rope_parameters rotates is the size of their rotated part."""
    rotated, size = values["qk_rope_head_dim"], values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    heads = values.get("head_dim") or size
    longest = values.get("max_position_embeddings")
    values = with_rope(values, MISTRAL4_ROPE | {"max_position_embeddings": longest})
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope, share = dict(values[name] or {}), "partial_rotary_factor"
    if (rope.get("rope_type") or rope.get("type") or "default") == "default":
        raise UserError(
            f"config.json of a mistral4 has rope_type 'default' in {name}, transformers computes it with scaled ones alone: "
            "take another model"
        )
    fraction = rope.pop(share, values.get(share, rotated / size))
    if int(heads * fraction) != rotated:
        raise UserError(
            f"config.json of a mistral4 has {share} = {fraction} of head_dim = {heads}, must be qk_rope_head_dim = {rotated} "
            "dimensions: leave it out"
        )
    return {**values, name: rope, share: 1.0}


def _read_mistral4(values: Values) -> dict[str, Any]:
    return read_latent(values) | read_growth(values)


def _write_mistral4(config: TransformerConfig) -> dict[str, Any]:
    if config.latent is None:
        return {}
    written = write_growth(config, MISTRAL4)
    share = {"partial_rotary_factor": config.latent.rotary_dim / config.head_size}
    return write_latent(config) | {"rope_parameters": written["rope_parameters"] | share}


_KEYS = {ours: theirs for ours, theirs in KEYS.items() if ours not in ("num_kv_heads", "head_dim")}
_COMMON: dict[str, Any] = dict(only=NO_BIAS, pairs="adjacent", mscale=True)
MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Mistral 4 (Mistral AI 2026): softmax scores, and queries that grow with their position.
MISTRAL4 = Family(
    model_type="mistral4",
    architectures=("Mistral4ForCausalLM",),
    keys=_KEYS,
    defaults=SILU
    | {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64}
    | {"num_experts_per_tok": 4, "n_routed_experts": 128, "moe_intermediate_size": 2048, "norm_topk_prob": True}
    | {"first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    read_keys=(*LATENT_SIZE_KEYS, "head_dim"),
    pairs_key="rope_interleave",
    aliases={"num_local_experts": "n_routed_experts"},
    old_rope=False,
    experts="n_routed_experts",
    moe_keys=DEEPSEEK_KEYS,
    prepare=_prepare_mistral4,
    read=_read_mistral4,
    write=_write_mistral4,
    **_COMMON,
)


def prepare_axk(values: Values) -> Values:
    """With a kind of MLP for each layer, and latents of the queries."""
    if values.get("q_lora_rank") is None:
        raise UserError(
            f"config.json of an {values['model_type']} has q_lora_rank = None, must be at least 1: copy the file again"
        )
    if values.get("mlp_layer_types") is not None:
        return values
    first, every = values["first_k_dense_replace"], values["moe_layer_freq"]
    if every < 1:
        raise UserError(f"config.json has moe_layer_freq = {every}, must be at least 1: copy the file again")
    layers = range(values["num_hidden_layers"])
    kinds = ["sparse" if layer >= first and layer % every == 0 else "dense" for layer in layers]
    return {**values, "mlp_layer_types": kinds}


FAMILIES = (
    (
        Family(
            model_type="deepseek_v3",
            architectures=("DeepseekV3ForCausalLM",),
            keys=_KEYS,
            defaults=SILU
            | _DEFAULTS
            | {"num_experts_per_tok": 8, "n_routed_experts": 256, "moe_intermediate_size": 2048, "norm_topk_prob": True}
            | {"first_k_dense_replace": 3, "n_shared_experts": 1, "n_group": 8, "topk_group": 4}
            | {"routed_scaling_factor": 2.5},
            read_keys=LATENT_SIZE_KEYS,
            pairs_key="rope_interleave",
            mtp_key=MTP_KEY,
            aliases={"num_local_experts": "n_routed_experts"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys=DEEPSEEK_KEYS,
            read=read_latent,
            write=write_latent,
            **_COMMON,
        ),
        Names(LATENT_ROWS + DEEPSEEK_EXPERTS, *LLAMA_LIKE, mtp=mtp.DEEPSEEK),
    ),
    (
        Family(
            model_type="deepseek_v2",
            architectures=("DeepseekV2ForCausalLM",),
            keys=_KEYS,
            defaults=SILU
            | _DEFAULTS
            | {"n_routed_experts": 64, "moe_intermediate_size": 1407, "first_k_dense_replace": 0, "n_shared_experts": 2}
            | {"routed_scaling_factor": 1.0, "topk_method": "greedy"},
            read_keys=(*LATENT_SIZE_KEYS, "n_group", "topk_group"),
            aliases={"num_experts": "n_routed_experts"},
            experts="n_routed_experts",
            moe={"gates": "scores", "group_score": "best"},
            moe_keys=DEEPSEEK_KEYS,
            prepare=_prepare_v2,
            read=read_latent,
            write=_write_v2,
            **_COMMON | {"only": NO_BIAS | {"mlp_bias": (False, None)}},
        ),
        Names(without(LATENT_ROWS + DEEPSEEK_EXPERTS, "e_score_correction_bias"), *LLAMA_LIKE),
    ),
    (
        Family(
            model_type="youtu",
            architectures=("YoutuForCausalLM",),
            keys=_KEYS,
            defaults=SILU | _DEFAULTS,
            read_keys=LATENT_SIZE_KEYS,
            pairs_key="rope_interleave",
            tied=True,
            read=read_latent,
            write=write_latent,
            **_COMMON,
        ),
        Names(LATENT_ROWS + MLP, *LLAMA_LIKE),
    ),
    (
        # GLM 4.7 Flash (Z.ai 2026).
        Family(
            model_type="glm4_moe_lite",
            architectures=("Glm4MoeLiteForCausalLM",),
            keys=_KEYS,
            defaults=SILU
            | {"rms_norm_eps": 1e-5, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256}
            | {"qk_nope_head_dim": 192, "num_experts_per_tok": 4, "n_routed_experts": 64, "n_shared_experts": 1}
            | {"moe_intermediate_size": 1536, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
            | {"routed_scaling_factor": 1.8},
            read_keys=(*LATENT_SIZE_KEYS, "mlp_layer_types"),
            pairs_key="rope_interleave",
            mtp_key=MTP_KEY,
            aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE | {"first_dense": 1},
            moe_keys={ours: key for ours, key in DEEPSEEK_KEYS.items() if ours != "first_dense"},
            read_moe=read_mlp_types,
            read=read_latent,
            write=_write_lite,
            **_COMMON,
        ),
        Names(LATENT_ROWS + DEEPSEEK_EXPERTS, *LLAMA_LIKE, mtp=mtp.DEEPSEEK),
    ),
    (
        # Sarvam 105B (Sarvam 2026), which transformers computes by DeepSeek-V3's class.
        Family(
            model_type="sarvam_mla",
            architectures=("DeepseekV3ForCausalLM", "SarvamMLAForCausalLM"),
            keys=_KEYS,
            defaults=SILU
            | _DEFAULTS
            | {"q_lora_rank": None, "num_experts_per_tok": 8, "n_routed_experts": 128, "moe_intermediate_size": 2048}
            | {"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
            | {"routed_scaling_factor": 2.5},
            read_keys=LATENT_SIZE_KEYS,
            pairs_key="rope_interleave",
            aliases=dict.fromkeys(("num_local_experts", "num_experts"), "n_routed_experts")
            | {"num_shared_experts": "n_shared_experts"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys=DEEPSEEK_KEYS,
            prepare=_prepare_sarvam,
            read=read_latent,
            write=write_latent,
            **_COMMON,
        ),
        Names(LATENT_ROWS + DEEPSEEK_EXPERTS, *LLAMA_LIKE, parts=r"^model\.layers\.61\."),
    ),
    (MISTRAL4, Names(LATENT_ROWS + FIRST_MLP + FUSED_EXPERTS + shared_experts("mlp.shared_experts"), *LLAMA_LIKE)),
    (
        # A.X-K1 (SK Telecom 2026). Its published files have no correction of the choice.
        Family(
            model_type="axk1",
            architectures=("AXK1ForCausalLM",),
            keys=_KEYS,
            defaults=SILU
            | _DEFAULTS
            | {"num_experts_per_tok": 8, "n_routed_experts": 192, "moe_intermediate_size": 2048, "norm_topk_prob": True}
            | {"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_shared_experts": 1, "n_group": 8, "topk_group": 4}
            | {"routed_scaling_factor": 2.5},
            read_keys=(*LATENT_SIZE_KEYS, "mlp_layer_types"),
            pairs_key="rope_interleave",
            aliases={"num_local_experts": "n_routed_experts"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE | {"output_norm": "layer"},
            moe_keys={ours: key for ours, key in DEEPSEEK_KEYS.items() if ours != "first_dense"},
            read_moe=read_mlp_types,
            prepare=prepare_axk,
            read=read_latent,
            write=_write_lite,
            **_COMMON,
        ),
        Names(
            LATENT_ROWS + DEEPSEEK_EXPERTS + rows([(L + "post_mlp_layernorm.weight", "d", OUTPUT_NORM)], EXPERTS),
            (*LLAMA_LIKE[0], (r"mlp\.post_mlp_layernorm\.", "post_mlp_layernorm.")),
            LLAMA_LIKE[1],
            absent={
                L + "mlp.gate.e_score_correction_bias": lambda values: np.zeros(values["n_routed_experts"], np.float32)
            },
        ),
    ),
)
