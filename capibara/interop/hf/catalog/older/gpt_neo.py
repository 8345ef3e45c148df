"""GPT-Neo (EleutherAI 2021): GPT-2 with windows in every second layer, and scores that are not scaled."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import A, M, Names, linear, norm, rows
from capibara.models.api import DecoderConfig, TransformerConfig

_H = "transformer.h.{l}."
_O = _H + "attn.attention."
_GPT_NEO = rows(
    [
        ("transformer.wte.weight", "v d", "embedding"),
        ("transformer.wpe.weight", "p d", "position_embedding"),
        *norm(_H + "ln_1", "layers/attention_norm"),
        (_O + "q_proj.weight", "nh d", A + "query"),
        (_O + "k_proj.weight", "nh d", A + "key"),
        (_O + "v_proj.weight", "nh d", A + "value"),
        *linear(_O + "out_proj", "d nh", A + "out"),
        *norm(_H + "ln_2", "layers/mlp_norm"),
        *linear(_H + "mlp.c_fc", "f d", M + "up"),
        *linear(_H + "mlp.c_proj", "d f", M + "down"),
        *norm("transformer.ln_f", "final_norm"),
        ("lm_head.weight", "v d", "output"),
    ]
)


def _read(values: Values) -> dict[str, Any]:
    layers: list[Any] = []
    for kinds, times in values["attention_types"] or [[["global", "local"], 12]]:
        layers += list(kinds) * times
    if len(layers) != values["num_layers"] or not set(layers) <= {"global", "local"}:
        raise UserError(
            f"config.json has attention_types for {len(layers)} layers ({', '.join(map(str, layers[:4]))} ...), must be 'global' "
            f"or 'local' for each of {values['num_layers']}: copy the file again"
        )
    size = next(n for n in range(1, len(layers) + 1) if all(item == layers[i % n] for i, item in enumerate(layers)))
    width = values.get("intermediate_size")
    return {"layer_pattern": tuple(layers[:size]), "window": values["window_size"] if "local" in layers else None} | (
        {} if width is None else {"mlp_dim": width}
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    pattern, layers = [str(kind) for kind in config.layer_pattern], config.num_layers
    times = [[pattern, layers // len(pattern)]] if layers >= len(pattern) else []
    rest = [[pattern[: layers % len(pattern)], 1]] if layers % len(pattern) else []
    written = {"attention_types": times + rest, "intermediate_size": config.mlp_dim}
    return written | ({} if config.window is None else {"window_size": config.window})


FAMILIES = (
    (
        Family(
            model_type="gpt_neo",
            architectures=("GPTNeoForCausalLM",),
            keys={
                "vocab_size": "vocab_size",
                "embed_dim": "hidden_size",
                "num_layers": "num_layers",
                "num_heads": "num_heads",
                "norm_eps": "layer_norm_epsilon",
                "max_length": "max_position_embeddings",
            },
            fixed={"norm": "layer", "bias": "out_mlp", "positions": "learned", "attention_scale": 1.0},
            aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
            read_keys=("intermediate_size",),
            defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048}
            | {"attention_types": None, "window_size": 256},
            activation="activation_function",
            gated=False,
            rope=False,
            tied=True,
            divides=True,
            read=_read,
            write=_write,
        ),
        Names(
            _GPT_NEO,
            ((r"^(?=(?:h|wte|wpe|ln_f)\.)", "transformer."),),
            r"\.attn\.attention\.(?:masked_)?bias$",
        ),
    ),
)
