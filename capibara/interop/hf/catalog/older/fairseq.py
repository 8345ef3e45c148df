"""Decoders of fairseq: OPT (Meta 2022, arXiv:2205.01068), BioGPT (Microsoft 2022), XGLM (Meta 2021, arXiv:2112.10668)."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import A, M, Names, Rows, linear, norm, rows
from capibara.models.api import DecoderConfig, TransformerConfig


def _table(stem: str, last_norm: str, head: str) -> Rows:
    layer = stem + "layers.{l}."
    return rows(
        [
            (stem + "embed_tokens.weight", "v d", "embedding"),
            (stem + "embed_positions.weight", "p d", "position_embedding"),
            *norm(layer + "self_attn_layer_norm", "layers/attention_norm"),
            *linear(layer + "self_attn.q_proj", "nh d", A + "query"),
            *linear(layer + "self_attn.k_proj", "nh d", A + "key"),
            *linear(layer + "self_attn.v_proj", "nh d", A + "value"),
            *linear(layer + "self_attn.out_proj", "d nh", A + "out"),
            *norm(layer + "final_layer_norm", "layers/mlp_norm"),
            *linear(layer + "fc1", "f d", M + "up"),
            *linear(layer + "fc2", "d f", M + "down"),
            *norm(stem + last_norm, "final_norm"),
            (head, "v d", "output"),
        ]
    )


_KEYS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_length": "max_position_embeddings",
}
_FIXED = {"norm": "layer", "norm_eps": 1e-5, "positions": "learned", "position_offset": 2}


def _read_opt(values: Values) -> dict[str, Any]:
    width = values.get("word_embed_proj_dim")
    if width not in (None, values["hidden_size"]):
        raise UserError(
            f"config.json has word_embed_proj_dim = {width}, must be hidden_size ({values['hidden_size']}) or null: the "
            "projections of other embeddings are not supported, take another model"
        )
    before, unnormed = values["do_layer_norm_before"], values["_remove_final_layer_norm"]
    return {
        "norm_placement": "pre" if before else "post",
        "final_norm": "layer" if before and not unnormed else "none",
        "norm_scale": "one" if values["layer_norm_elementwise_affine"] else "none",
    }


def _write_opt(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    before = config.norm_placement == "pre"
    return {
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and config.final_norm == "none",
        "layer_norm_elementwise_affine": config.norm_scale != "none",
        "word_embed_proj_dim": config.embed_dim,
    }


def _read_scale(values: Values) -> dict[str, Any]:
    return {"embedding_scale": "tokens" if values["scale_embedding"] else "none"}


def _read_xglm(values: Values) -> dict[str, Any]:
    if (values.get("pad_token_id") or 0) not in (0, 1):  # transformers zeroes the position of that number
        raise UserError(f"config.json of an xglm has pad_token_id = {values['pad_token_id']}, must be 0, 1 or null")
    return _read_scale(values)


def _write_scale(config: TransformerConfig) -> dict[str, Any]:
    return {"scale_embedding": config.embedding_scale == "tokens"}


FAMILIES = (
    (
        Family(
            model_type="opt",
            architectures=("OPTForCausalLM",),
            keys=_KEYS | {"mlp_dim": "ffn_dim"},
            fixed=_FIXED,
            defaults={"activation_function": "relu", "max_position_embeddings": 2048, "do_layer_norm_before": True}
            | {"_remove_final_layer_norm": False, "enable_bias": True, "layer_norm_elementwise_affine": True},
            biases={"enable_bias": "all"},
            read_keys=("word_embed_proj_dim",),
            activation="activation_function",
            gated=False,
            rope=False,
            tied=True,
            divides=True,
            read=_read_opt,
            write=_write_opt,
        ),
        Names(_table("model.decoder.", "final_layer_norm", "lm_head.weight"), ((r"^(?=decoder\.)", "model."),)),
    ),
    (
        Family(
            model_type="biogpt",
            architectures=("BioGptForCausalLM",),
            keys=_KEYS | {"mlp_dim": "intermediate_size"},  # layer_norm_eps is a key, and is not computed
            fixed=_FIXED | {"bias": "all"},
            defaults={"hidden_act": "gelu", "max_position_embeddings": 1024, "scale_embedding": True},
            gated=False,
            rope=False,
            tied=True,
            divides=True,
            read=_read_scale,
            write=_write_scale,
        ),
        Names(
            _table("biogpt.", "layer_norm", "output_projection.weight"),
            ((r"^(?=(?:embed_tokens|embed_positions|layers|layer_norm)\.)", "biogpt."),),
        ),
    ),
    (
        Family(
            model_type="xglm",
            architectures=("XGLMForCausalLM",),
            keys={
                "vocab_size": "vocab_size",
                "embed_dim": "d_model",
                "num_layers": "num_layers",
                "num_heads": "attention_heads",
                "mlp_dim": "ffn_dim",
            },
            fixed=_FIXED | {"bias": "all", "positions": "sinusoidal"},
            aliases={"hidden_size": "d_model", "num_hidden_layers": "num_layers"}
            | {"num_attention_heads": "attention_heads"},
            defaults={"activation_function": "gelu", "scale_embedding": True},
            only={"add_cross_attention": (False,)},
            read_keys=("pad_token_id",),
            activation="activation_function",
            gated=False,
            rope=False,
            tied=True,
            divides=True,
            read=_read_xglm,
            write=_write_scale,
        ),
        Names(
            _table("model.", "layer_norm", "lm_head.weight"),
            ((r"^(?=(?:embed_tokens|layers|layer_norm)\.)", "model."),),
            r"embed_positions\.weights$",
        ),
    ),
)
