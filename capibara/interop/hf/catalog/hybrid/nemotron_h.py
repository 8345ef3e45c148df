"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624): layers that are a Mamba 2, attention, an MLP or experts, one of them."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.hybrid.mamba import AROUND, BACKBONE, BACKBONE_NAMES
from capibara.interop.hf.catalog.hybrid.mamba2 import BIASES, mixer_rows, steps
from capibara.interop.hf.layout.family import KEYS, OLD_KINDS, Family, Values, shortest
from capibara.interop.hf.layout.rows import EXPERTS, LLAMA, M, Names, renamed, rows
from capibara.models.api import DecoderConfig, Mamba2, Moe, TransformerConfig

_KINDS = {"linear_attention": "recurrent", "full_attention": "global", "mlp": "feed_forward", "moe": "feed_forward"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MIXER = {"heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "taps": "conv_kernel"}
_MIXER |= {"state_dim": "ssm_state_size"}
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "shared_dim": "moe_shared_expert_intermediate_size",
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
}
# transformers 5.24 keeps steps above time_step_min, which in other models is for new weights alone.
_NO_LIMIT = [0.0, {"__float__": "Infinity"}]
_CHOICE = {"score": "sigmoid", "correction": "expert", "shared_experts": 1}


def _prepare(values: Values) -> Values:
    """The values with layers_block_type, whose length is the number of layers whatever num_hidden_layers says."""
    types, pattern = values.get("layers_block_type"), values.get("hybrid_override_pattern")
    if types is None and isinstance(pattern, str):
        if strange := sorted(set(pattern) - set(_LETTERS)):
            raise UserError(
                f"config.json has {strange[0]!r} in hybrid_override_pattern, must be of {' '.join(_LETTERS)}"
            )
        types = [_LETTERS[letter] for letter in pattern]
    if not isinstance(types, list) or not types:
        raise UserError(
            f"config.json has layers_block_type = {str(types)[:60]}, must be a list with one entry for each layer"
        )
    types = [OLD_KINDS.get(kind, kind) for kind in types]
    if unknown := [kind for kind in types if kind not in _KINDS]:
        raise UserError(
            f"config.json has layers_block_type {str(unknown[0])[:60]!r}, must be one of {', '.join(_KINDS)}"
        )
    if {"mlp", "moe"} <= set(types):
        raise UserError(
            "config.json has 'mlp' and 'moe' in layers_block_type, must have one of them: take another model"
        )
    return {**values, "layers_block_type": types, "num_hidden_layers": len(types)}


def _read(values: Values) -> dict[str, Any]:
    types = values["layers_block_type"]
    fields: dict[str, Any] = {"layer_pattern": shortest([_KINDS[kind] for kind in types])}
    if "linear_attention" in types:
        fields |= {"mixer": _read_mixer(values)}
    if "full_attention" not in types:
        fields |= {"num_heads": 1, "num_kv_heads": 1, "head_dim": values["hidden_size"]}
    if "moe" in types:
        return fields | _read_experts(values)
    return fields if "mlp" in types else fields | {"mlp_dim": 0}


def _read_mixer(values: Values) -> Mamba2:
    if steps(values["time_step_limit"]) != steps(_NO_LIMIT):
        raise UserError(
            f"config.json has time_step_limit = {str(values['time_step_limit'])[:60]}, which transformers does not read: "
            "leave it out, or write time_step_min"
        )
    sizes: dict[str, Any] = {ours: values[theirs] for ours, theirs in _MIXER.items()}
    sizes |= {"bias": BIASES[bool(values["use_conv_bias"]), bool(values["use_bias"])]}
    return Mamba2(**sizes, least_step=values["time_step_min"])


def _read_experts(values: Values) -> dict[str, Any]:
    for key in ("mlp_bias", "moe_latent_size"):
        if values.get(key):
            raise UserError(
                f"config.json has {key} = {values[key]} and 'moe' in layers_block_type, must be without: take another model"
            )
    experts: dict[str, Any] = {ours: values[theirs] for ours, theirs in _EXPERTS.items()} | _CHOICE
    experts |= {"gates": "normalized" if values["norm_topk_prob"] else "scores"}
    return {"moe": Moe(**experts), "mlp_dim": experts["expert_dim"]}


def _write(config: TransformerConfig) -> dict[str, Any]:
    mixer, moe = config.mixer, config.moe
    if not (isinstance(config, DecoderConfig) and isinstance(mixer, Mamba2 | None)):
        return {}
    names = {"recurrent": "linear_attention", "feed_forward": "mlp" if moe is None else "moe"}
    written: dict[str, Any] = {"layers_block_type": [names.get(kind, "full_attention") for kind in config.kinds]}
    if mixer is not None:
        written |= {theirs: getattr(mixer, ours) for ours, theirs in _MIXER.items()}
        written |= {"use_conv_bias": mixer.bias.of_conv, "use_bias": mixer.bias.of_projections}
        written |= {"time_step_min": mixer.least_step}
    if moe is None:
        return written
    written |= {theirs: getattr(moe, ours) for ours, theirs in _EXPERTS.items()}
    width = moe.expert_dim or config.mlp_dim
    written |= {"moe_intermediate_size": width, "moe_shared_expert_intermediate_size": moe.shared_dim or width}
    return written | {"norm_topk_prob": moe.gates == "normalized"}


_ROWS = (
    AROUND
    + renamed(mixer_rows("mixer"), BACKBONE)
    + renamed(
        tuple(row for row in LLAMA if ".self_attn." in row.name),
        BACKBONE,
        (".self_attn.", ".mixer."),
    )
)
_B = "backbone.layers.{l}.mixer."
_MLP = rows(
    [
        (_B + "up_proj.weight", "f d", M + "up"),
        (_B + "up_proj.bias", "f", M + "up_bias"),
        (_B + "down_proj.weight", "d f", M + "down"),
        (_B + "down_proj.bias", "d", M + "down_bias"),
    ]
)
_MOE = rows(
    [
        (_B + "gate.weight", "e d", M + "router"),
        (_B + "gate.e_score_correction_bias", "e", M + "correction"),
        (_B + "experts.{e}.up_proj.weight", "f d", M + "up"),
        (_B + "experts.{e}.down_proj.weight", "d f", M + "down"),
        (_B + "shared_experts.up_proj.weight", "f d", M + "shared_up"),
        (_B + "shared_experts.down_proj.weight", "d f", M + "shared_down"),
    ],
    EXPERTS,
)

FAMILIES = (
    (
        Family(
            model_type="nemotron_h",
            architectures=("NemotronHForCausalLM",),
            keys=KEYS | {"norm_eps": "layer_norm_epsilon"},
            fixed={"positions": "none"},
            activation="mlp_hidden_act",
            gated=False,
            rope=False,
            only={"mamba_hidden_act": ("silu", "swish")},
            defaults={"vocab_size": 131_072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
            | {"head_dim": 128, "intermediate_size": 21_504, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5}
            | {"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4}
            | {"use_bias": False, "use_conv_bias": True, "time_step_limit": _NO_LIMIT, "time_step_min": 0.001}
            | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "n_group": 1}
            | {"moe_shared_expert_intermediate_size": 7688, "topk_group": 1, "routed_scaling_factor": 1.0}
            | {"norm_topk_prob": True},
            aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"}
            | {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
            | {"mamba_dt_limit": "time_step_limit", "mamba_dt_min": "time_step_min"},
            moe_keys=_EXPERTS,
            mixer_keys=_MIXER,
            read_keys=("layers_block_type", "hybrid_override_pattern", "moe_latent_size"),
            biases={"mlp_bias": "mlp"},
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(
            _ROWS,
            BACKBONE_NAMES,
            parts=r"^mtp\.",
            chosen=lambda shapes: _ROWS + (_MOE if M + "router" in shapes else _MLP),
        ),
    ),
)
