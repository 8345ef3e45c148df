"""GPT-J (EleutherAI 2021) and CodeGen (Salesforce 2022): parallel branches, adjacent pairs are rotated, a head with a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import A, M, Names, linear, norm, rows
from capibara.kernels.rotary import Pairs
from capibara.models.api import DecoderConfig, Rope, TransformerConfig

_H = "transformer.h.{l}."
_BRANCHES = [
    ("transformer.wte.weight", "v d", "embedding"),
    *norm(_H + "ln_1", "layers/attention_norm"),
    (_H + "attn.out_proj.weight", "d nh", A + "out"),
    *linear(_H + "mlp.fc_in", "f d", M + "up"),
    *linear(_H + "mlp.fc_out", "d f", M + "down"),
    *norm("transformer.ln_f", "final_norm"),
    ("lm_head.weight", "v d", "output"),
    ("lm_head.bias", "v", "output_bias"),
]
_GPTJ = rows(
    [
        *_BRANCHES,
        (_H + "attn.q_proj.weight", "nh d", A + "query"),
        (_H + "attn.k_proj.weight", "nh d", A + "key"),
        (_H + "attn.v_proj.weight", "nh d", A + "value"),
    ]
)
# Queries, values and keys, in the four parts of the TPUs that trained it.
_CODEGEN = rows([*_BRANCHES, (_H + "attn.qkv_proj.weight", "4nh d", f"{A}query {A}value {A}key", "n")])


def _read(values: Values) -> dict[str, Any]:
    size, turned = values["n_embd"] // values["n_head"], values["rotary_dim"]
    if not turned or turned % 2 or turned > size:
        raise UserError(
            f"config.json has rotary_dim = {turned}, must be even, above 0 and at most {size}, a head's size"
        )
    return {"rope": Rope(fraction=turned / size, pairs=Pairs.ADJACENT)}


def _read_codegen(values: Values) -> dict[str, Any]:
    if values["n_head"] % 4:  # transformers cuts its four parts through the heads then
        raise UserError(
            f"config.json of a codegen has n_head (num_attention_heads) = {values['n_head']}, must be a multiple of 4"
        )
    return _read(values)


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    return {"rotary_dim": config.rope.rotated_dims(config.head_size), "n_positions": config.max_length or 2048}


def _family(model_type: str, architecture: str, read: Callable[[Values], dict[str, Any]]) -> Family:
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        keys={
            "vocab_size": "vocab_size",
            "embed_dim": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "mlp_dim": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "max_length": "n_positions",
        },
        fixed={"norm": "layer", "bias": "mlp", "residual": "shared", "head_bias": "vocab"},
        aliases={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        | {"max_position_embeddings": "n_positions"},
        defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 2048, "rotary_dim": 64},
        activation="activation_function",
        gated=False,
        rope=False,
        divides=True,
        read=read,
        write=_write,
    )


_NAMES = ((r"^(?=(?:h|wte|ln_f)\.)", "transformer."),), r"\.attn\.(?:masked_bias|bias|causal_mask)$"

FAMILIES = (
    (_family("gptj", "GPTJForCausalLM", _read), Names(_GPTJ, *_NAMES)),
    (_family("codegen", "CodeGenForCausalLM", _read_codegen), Names(_CODEGEN, *_NAMES)),
)
