"""Granite (IBM 2024) and others with factors of the embeddings, the residual branches, the scores and the logits."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout import rope as hf_rope
from capibara.interop.hf.layout.family import KEYS, SILU, Family, Values, first_of, unrotated
from capibara.interop.hf.layout.rows import LLAMA_BIASED, LLAMA_LIKE, A, L, Names, rows
from capibara.models.api import DecoderConfig, Rope, TransformerConfig

_WINDOW = 128  # of the class, which needs one even if no layer has it


def read_factors(values: Values) -> dict[str, Any]:
    """Our factor of the logits."""
    return {"logit_scale": 1 / values["logits_scaling"]}


def write_factors(config: TransformerConfig) -> dict[str, Any]:
    """Granite's factors of the logits and the scores."""
    return {"logits_scaling": 1 / _decoder(config).logit_scale, "attention_multiplier": _scale(config)}


def _decoder(config: TransformerConfig) -> DecoderConfig:
    assert isinstance(config, DecoderConfig), "the family's kind"
    return config


def _scale(config: TransformerConfig) -> float:
    return config.head_size**-0.5 if config.attention_scale is None else config.attention_scale


def _read_swa(values: Values) -> dict[str, Any]:
    """Each layer has a rotary base of its own, 0 for none; ours has one of all layers with a window, and one of others."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    base, count, types = (
        rope.get("rope_theta", values["rope_theta"]),
        values["num_hidden_layers"],
        values["layer_types"],
    )
    thetas = values.get("layer_rope_theta")
    thetas = [base] * count if thetas is None else thetas[:count]
    if len(thetas) != count or len(types) != count:
        raise UserError(
            f"config.json has {len(thetas)} layer_rope_theta and {len(types)} layer_types, must be one for each of {count} "
            "layers: copy the file again"
        )
    fields = unrotated(types, thetas, values.get("sliding_window"), "layer_rope_theta and layer_types")
    of_kind = {
        kind: sorted({theta for theta, item in zip(thetas, types, strict=True) if item == kind and theta})
        for kind in types
    }
    for kind, result in of_kind.items():
        if len(result) > 1:
            raise UserError(
                f"config.json has layer_rope_theta {result[0]} and {result[1]} for layer_types {kind!r}, must be one: take another "
                "model"
            )
    full, local = of_kind.get("full_attention"), of_kind.get("sliding_attention")
    theta = (full or local or [base])[0]
    rotated = {**values, "rope_scaling": None, "rope_parameters": {**rope, "rope_theta": theta}}
    turned = hf_rope.read(rotated, GRANITE_SWA)
    if local and local[0] != theta:
        if turned["scaling"] != "none":
            raise UserError(
                f"config.json has layer_rope_theta {local[0]} for layers with a window, {theta} for others, and scales both by "
                f"rope_parameters (rope_scaling) of type {turned['scaling']!r}: take another model"
            )
        turned["local_theta"] = local[0]
    return read_factors(values) | fields | {"rope": Rope(**turned)}


def _write_swa(config: TransformerConfig) -> dict[str, Any]:
    config = _decoder(config)
    pattern, rope = config.layer_pattern, config.rope
    kinds = [pattern[i % len(pattern)] for i in range(config.num_layers)]
    theta = {"global": rope.theta, "local": rope.local_theta or rope.theta, "unrotated": 0.0}
    return write_factors(config) | {
        "layer_types": ["sliding_attention" if kind == "local" else "full_attention" for kind in kinds],
        "sliding_window": config.window or _WINDOW,
        "layer_rope_theta": [theta.get(kind, 0.0) for kind in kinds],
    }


def _read_post(values: Values) -> dict[str, Any]:
    return {"norm_placement": "sandwich" if values["use_post_norm"] else "pre"}


def _write_post(config: TransformerConfig) -> dict[str, Any]:
    return {"use_post_norm": config.norm_placement == "sandwich", "attention_multiplier": _scale(config)}


FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_scale": "attention_multiplier",
}
FACTORS_READ = dict.fromkeys((*FACTORS.values(), "logits_scaling"), 1.0)
_UNSCALED = {key: value for key, value in FACTORS_READ.items() if key != "attention_multiplier"}
SINKS = rows([(L + "self_attn.sinks", "n", A + "sinks")])
_BIASES = {"attention_bias": "attention", "mlp_bias": "mlp"}
_POST_NORMS = rows(
    [
        (L + "post_norm1.weight", "d", "layers/attention_post_norm/scale"),
        (L + "post_norm2.weight", "d", "layers/mlp_post_norm/scale"),
    ]
)
GRANITE_SWA = Family(
    model_type="granite_swa",
    architectures=("GraniteSWAForCausalLM",),
    keys={ours: theirs for ours, theirs in (KEYS | FACTORS).items() if ours != "head_dim"},
    fixed={"attention_sinks": "head"},
    read_keys=("head_dim", "layer_types", "layer_rope_theta"),
    defaults=SILU | FACTORS_READ | {"rms_norm_eps": 1e-5, "num_key_value_heads": 4, "sliding_window": _WINDOW},
    biases=_BIASES,
    tied=True,
    prepare=first_of(4),
    read=_read_swa,
    write=_write_swa,
)

FAMILIES = (
    (
        Family(
            model_type="granite",
            architectures=("GraniteForCausalLM",),
            keys=KEYS | FACTORS,
            defaults=SILU | FACTORS_READ,
            biases=_BIASES,
            divides=True,
            read=read_factors,
            write=write_factors,
        ),
        Names(LLAMA_BIASED, *LLAMA_LIKE),
    ),
    (GRANITE_SWA, Names(LLAMA_BIASED + SINKS, *LLAMA_LIKE)),
    (
        # HyperCLOVA X (Naver 2025): its logits are multiplied where Granite's are divided.
        Family(
            model_type="hyperclovax",
            architectures=("HyperCLOVAXForCausalLM",),
            keys=KEYS | FACTORS | {"logit_scale": "logits_scaling"},
            defaults=SILU | _UNSCALED | {"use_post_norm": True},
            biases=_BIASES,
            divides=True,
            read=_read_post,
            write=_write_post,
        ),
        Names(LLAMA_BIASED + _POST_NORMS, *LLAMA_LIKE),
    ),
)
