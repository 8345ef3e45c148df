"""DeepSeek-V3's experts with plain attention.

GLM 4.5 (Z.ai 2025, arXiv:2508.06471), dots.llm1 (rednote 2025, arXiv:2506.05767), K-EXAONE (LG 2026), Solar Open
(Upstage 2026) and Sarvam 30B (Sarvam 2026).
"""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.dense.exaone import by_pattern
from capibara.interop.hf.layout import mtp
from capibara.interop.hf.layout.family import ATTENTION_BIAS, KEYS, MTP_KEY, SILU, Family, Values, expert_layers
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    DEEPSEEK_EXPERTS,
    FIRST_MLP,
    LLAMA,
    LLAMA_LIKE,
    QK_NORM,
    QKV,
    QKV_BIAS,
    L,
    Names,
    renamed,
    rows,
    without,
)
from capibara.models.api import TransformerConfig

DEEPSEEK_KEYS = {
    "expert_dim": "moe_intermediate_size",
    "first_dense": "first_k_dense_replace",
    "shared_experts": "n_shared_experts",
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
}
DEEPSEEK_MOE = {"score": "sigmoid", "correction": "expert"}
_GLM4_MOE = without(LLAMA, ".mlp.") + without(ATTENTION_BIASES, "o_proj") + QK_NORM + DEEPSEEK_EXPERTS
_DOTS1 = without(LLAMA, ".mlp.") + ATTENTION_BIASES + QK_NORM + DEEPSEEK_EXPERTS


def _read(values: Values) -> dict[str, Any]:
    return {"qk_norm": "head" if values.get("use_qk_norm") else "none"}


def _write(config: TransformerConfig) -> dict[str, Any]:
    return {"use_qk_norm": config.qk_norm == "head"}


def read_mlp_types(values: Values) -> dict[str, Any]:
    """Our fields for mlp_layer_types; none where a file has none."""
    types, count = values.get("mlp_layer_types"), values["num_hidden_layers"]
    if types is None:
        return {}
    types, of = types[:count], f"mlp_layer_types {', '.join(types[:8])}"
    if len(types) != count or not {*types} <= {"dense", "sparse"}:
        raise UserError(
            f"config.json has {of}, must be 'dense' or 'sparse' for each of num_hidden_layers = {count} layers: take another "
            "model"
        )
    return expert_layers([kind == "sparse" for kind in types], of)


def with_mlp_types(values: Values) -> Values:
    """The values with mlp_layer_types, whose first ones are dense where a file has none.

    Raises:
      UserError: no layer has experts.
    """
    if values.get("mlp_layer_types") is not None:
        return values
    first, count = values["first_k_dense_replace"], values["num_hidden_layers"]
    if first >= count:
        raise UserError(
            f"config.json has first_k_dense_replace = {first}, must be below num_hidden_layers = {count}: take another model"
        )
    return {**values, "mlp_layer_types": ["dense"] * first + ["sparse"] * (count - first)}


def write_mlp_types(config: TransformerConfig) -> dict[str, Any]:
    """The mlp_layer_types of a model."""
    kinds = ["dense" if layer in config.dense_layers else "sparse" for layer in range(config.num_layers)]
    return {"mlp_layer_types": kinds}


_DEFAULTS = SILU | {
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_EXAONE_MOE = without(LLAMA, ".mlp.") + QK_NORM + renamed(DEEPSEEK_EXPERTS, ("mlp.gate.e_score", "mlp.e_score"))
_SOLAR_OPEN = without(LLAMA, ".mlp.") + without(ATTENTION_BIASES, "o_proj") + DEEPSEEK_EXPERTS[len(FIRST_MLP) :]
# Sarvam's own names, which transformers writes, and those that it has in memory.
_SARVAM_NAMES = (
    ("model.embed_tokens.", "model.word_embeddings."),
    (".self_attn.o_proj.", ".attention.dense."),
    (".self_attn.q_norm.", ".attention.query_layernorm."),
    (".self_attn.k_norm.", ".attention.key_layernorm."),
    (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
)
_SARVAM_MOE = renamed(
    without(LLAMA, ".mlp.", "q_proj", "k_proj", "v_proj") + QK_NORM + DEEPSEEK_EXPERTS, *_SARVAM_NAMES
)
_SARVAM_MOE += rows(
    [
        (L + "attention.query_key_value.weight", "nh d", QKV, "n"),
        (L + "attention.query_key_value.bias", "nh", QKV_BIAS, "n"),
    ]
)

FAMILIES = (
    (
        Family(
            model_type="glm4_moe",
            architectures=("Glm4MoeForCausalLM",),
            keys=KEYS,
            defaults=SILU
            | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 8, "n_routed_experts": 128}
            | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1}
            | {"topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "use_qk_norm": False},
            biases={"attention_bias": "qkv"},
            aliases={"num_local_experts": "n_routed_experts"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys=DEEPSEEK_KEYS,
            partial=True,
            fraction=0.5,
            mtp_key=MTP_KEY,
            read=_read,
            write=_write,
        ),
        Names(_GLM4_MOE, *LLAMA_LIKE, mtp=mtp.DEEPSEEK),
    ),
    (
        Family(
            model_type="dots1",
            architectures=("Dots1ForCausalLM",),
            keys=KEYS,
            fixed={"qk_norm": "head"},
            defaults=SILU
            | {"num_key_value_heads": 32, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
            | {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "sliding_window": 4096, "max_window_layers": 62},
            biases=ATTENTION_BIAS,
            window="types",
            aliases={"num_local_experts": "n_routed_experts"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys=DEEPSEEK_KEYS,
        ),
        Names(_DOTS1, *LLAMA_LIKE),
    ),
    (
        # Its layers without a window have no rotary positions.
        Family(
            model_type="exaone_moe",
            architectures=("ExaoneMoeForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
            fixed={"qk_norm": "head"},
            defaults=_DEFAULTS
            | {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4, "num_experts": 64}
            | {"moe_intermediate_size": 1024, "first_k_dense_replace": 1, "num_shared_experts": 1}
            | {"routed_scaling_factor": 2.5},
            read_keys=("head_dim", "mlp_layer_types"),
            window="types",
            kinds={"full_attention": "unrotated", "sliding_attention": "local"},
            experts="num_experts",
            moe=DEEPSEEK_MOE,
            moe_keys=DEEPSEEK_KEYS | {"shared_experts": "num_shared_experts"},
            read_moe=read_mlp_types,
            prepare=by_pattern,
            mtp_key=MTP_KEY,
            mtp={"mlp": "dense", "kind": "local"},
            write=write_mlp_types,
        ),
        Names(_EXAONE_MOE, (*LLAMA_LIKE[0], (r"mlp\.gate\.e_score", "mlp.e_score")), LLAMA_LIKE[1], mtp=mtp.EXAONE),
    ),
    (
        Family(
            model_type="solar_open",
            architectures=("SolarOpenForCausalLM",),
            keys=KEYS | {"mlp_dim": "moe_intermediate_size"},
            defaults=_DEFAULTS
            | {"rope_theta": 1_000_000.0, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128}
            | {"moe_intermediate_size": 1280, "n_shared_experts": 1, "routed_scaling_factor": 1.0},
            biases={"attention_bias": "qkv"},
            aliases={"num_local_experts": "n_routed_experts"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys={ours: key for ours, key in DEEPSEEK_KEYS.items() if ours not in ("expert_dim", "first_dense")},
        ),
        Names(_SOLAR_OPEN, *LLAMA_LIKE),
    ),
    (
        # transformers computes it by GLM 4.5's class.
        Family(
            model_type="sarvam_moe",
            architectures=("Glm4MoeForCausalLM", "SarvamMoEForCausalLM"),
            keys=KEYS,
            defaults=_DEFAULTS
            | {"rms_norm_eps": 1e-6, "rope_theta": 8_000_000.0, "num_key_value_heads": 4, "head_dim": 64}
            | {"num_experts_per_tok": 6, "n_routed_experts": 128, "moe_intermediate_size": 1024, "n_shared_experts": 1}
            | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True},
            biases={"attention_bias": "qkv"},
            aliases=dict.fromkeys(("num_local_experts", "num_experts"), "n_routed_experts")
            | {"num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"},
            experts="n_routed_experts",
            moe=DEEPSEEK_MOE,
            moe_keys=DEEPSEEK_KEYS,
            partial=True,
            read=_read,
            write=_write,
        ),
        Names(
            _SARVAM_MOE,
            (*LLAMA_LIKE[0], *((f"^{old}" if old.startswith("model") else old, new) for old, new in _SARVAM_NAMES)),
            LLAMA_LIKE[1],
            r"^model\.layers\.(?:46|92)\.",
        ),
    ),
)
