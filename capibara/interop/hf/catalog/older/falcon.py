"""Falcon (TII 2023, arXiv:2311.16867): parallel branches, and few keys and values, fused with their queries by groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import QKV, A, M, Names, Rows, linear, norm, rows, without
from capibara.interop.hf.layout.tensors import Shape
from capibara.models.api import DecoderConfig, TransformerConfig

_H = "transformer.h.{l}."
_FALCON = rows(
    [
        ("transformer.word_embeddings.weight", "v d", "embedding"),
        *norm(_H + "input_layernorm", "layers/attention_norm"),
        *linear(_H + "self_attention.query_key_value", "gnh d", QKV, "n"),
        *linear(_H + "self_attention.dense", "d nh", A + "out"),
        *norm(_H + "post_attention_layernorm", "layers/mlp_norm"),
        *linear(_H + "mlp.dense_h_to_4h", "f d", M + "up"),
        *linear(_H + "mlp.dense_4h_to_h", "d f", M + "down"),
        *norm("transformer.ln_f", "final_norm"),
        ("lm_head.weight", "v d", "output"),
    ]
)
_TWO_NORMS = without(_FALCON, "layernorm") + rows(
    [*norm(_H + "ln_attn", "layers/attention_norm"), *norm(_H + "ln_mlp", "layers/mlp_norm")]
)


def _chosen(shapes: Mapping[str, Shape]) -> Rows:
    """The new architecture has other names for its two norms; only it has groups of heads."""
    heads, groups = (shapes[f"{A}{of}"][2] for of in ("query", "key"))
    return _TWO_NORMS if 1 < groups < heads and "layers/mlp_norm/scale" in shapes else _FALCON


def _read(values: Values) -> dict[str, Any]:
    heads, new = values["num_attention_heads"], values["new_decoder_architecture"]
    if not new:
        groups = 1 if values["multi_query"] else heads
        residual = "shared" if values["parallel_attn"] else "sequential"
    else:
        groups, norms = values.get("num_kv_heads") or heads, values.get("num_ln_in_parallel_attn")
        residual = "shared" if norms == 1 else "parallel"
        if norms not in (None, 1, 2) or not values["parallel_attn"]:
            raise UserError(
                f"config.json has num_ln_in_parallel_attn = {norms} and parallel_attn = {values['parallel_attn']}, must be 1 or 2 "
                "and true with new_decoder_architecture: copy the file again"
            )
        if residual == "parallel" and not 1 < groups < heads:
            raise UserError(
                f"config.json has num_kv_heads = {groups} with new_decoder_architecture and two norms (num_ln_in_parallel_attn), must "
                f"be above 1 and below num_attention_heads ({heads}): take another model"
            )
    if values["alibi"] and values.get("_attn_implementation") == "eager":
        raise UserError("config.json has _attn_implementation = 'eager', which adds alibi twice: leave it out")
    fields = {"num_kv_heads": groups, "residual": residual}
    return fields | ({"positions": "alibi_rounded"} if values["alibi"] else {})


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    new = config.residual == "parallel" or 1 < config.kv_heads < config.num_heads
    return {
        "new_decoder_architecture": new,
        "num_kv_heads": config.kv_heads if new else config.num_heads,
        "num_ln_in_parallel_attn": (1 if config.residual == "shared" else 2) if new else None,
        "multi_query": config.kv_heads == 1,
        "parallel_attn": config.residual != "sequential",
        "alibi": config.positions == "alibi_rounded",
    }


FAMILIES = (
    (
        Family(
            model_type="falcon",
            architectures=("FalconForCausalLM",),
            keys={
                "vocab_size": "vocab_size",
                "embed_dim": "hidden_size",
                "num_layers": "num_hidden_layers",
                "num_heads": "num_attention_heads",
                "mlp_dim": "ffn_hidden_size",
                "norm_eps": "layer_norm_epsilon",
            },
            fixed={"norm": "layer"},
            aliases={"n_embed": "hidden_size"},
            defaults={"activation": "gelu", "layer_norm_epsilon": 1e-5, "rope_theta": 10_000.0}
            | {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False},
            biases={"bias": "all"},
            read_keys=("num_kv_heads", "num_ln_in_parallel_attn", "_attn_implementation"),
            rope_unless="alibi",
            activation="activation",
            gated=False,
            tied=True,
            divides=True,
            read=_read,
            write=_write,
        ),
        Names(_FALCON, ((r"^(?=(?:h|word_embeddings|ln_f)\.)", "transformer."),), chosen=_chosen),
    ),
)
