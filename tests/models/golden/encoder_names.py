"""Where the parameters of our encoder-decoder and encoder are in T5's and BERT's checkpoints; see hf_names."""

from __future__ import annotations

import hf_names
from hf_names import _table

_STACK = {path.removeprefix("layers/"): dims for path, dims in hf_names.OURS.items() if path.startswith("layers/")}
_CROSS = {f"cross_{path}": dims for path, dims in _STACK.items() if path.startswith("attention")}
hf_names.OURS.update(
    {
        **{
            f"{part}/layers/{path}": dims for part in ("encoder", "decoder") for path, dims in (_STACK | _CROSS).items()
        },
        **{f"{side}/relative_bias/table": "rn" for side in ("encoder", "decoder")},
        **{f"{side}/norm/scale": "d" for side in ("encoder", "decoder")},
        **dict.fromkeys(("embedding_norm/scale", "embedding_norm/bias"), "d"),
        **dict.fromkeys(("transform_norm/scale", "transform_norm/bias", "transform_bias"), "d"),
        "type_embedding": "td",
        "transform": "de",
        "output_bias": "v",
    }
)


def _attention(theirs: str, ours: str, parts: dict[str, str]) -> list[tuple[str, ...]]:
    names = (("q", "query"), ("k", "key"), ("v", "value"))
    rows = [(f"{theirs}.{parts[short]}.weight", "nh d", f"{ours}/{name}") for short, name in names]
    return [*rows, (f"{theirs}.{parts['o']}.weight", "d nh", f"{ours}/out")]


def _t5(side: str, mlp_layer: int, gated: bool) -> list[tuple[str, ...]]:
    block, ours, short = f"{side}.block.{{}}.layer.", f"{side}/layers/", {name: name for name in "qkvo"}
    dense = f"{block}{mlp_layer}.DenseReluDense."
    into = [(f"{dense}wi_0.weight", "f d", f"{ours}mlp/gate"), (f"{dense}wi_1.weight", "f d", f"{ours}mlp/up")]
    cross = [
        *_attention(f"{block}1.EncDecAttention", f"{ours}cross_attention", short),
        (f"{block}1.layer_norm.weight", "d", f"{ours}cross_attention_norm/scale"),
    ]
    return [
        *_attention(f"{block}0.SelfAttention", f"{ours}attention", short),
        (f"{block}0.layer_norm.weight", "d", f"{ours}attention_norm/scale"),
        *(cross if side == "decoder" else []),
        *(into if gated else [(f"{dense}wi.weight", "f d", f"{ours}mlp/up")]),
        (f"{dense}wo.weight", "d f", f"{ours}mlp/down"),
        (f"{block}{mlp_layer}.layer_norm.weight", "d", f"{ours}mlp_norm/scale"),
        (f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "r n", f"{side}/relative_bias/table"),
        (f"{side}.final_layer_norm.weight", "d", f"{side}/norm/scale"),
    ]


def t5(gated: bool) -> tuple[hf_names.Tensor, ...]:
    """T5 1.1 where gated, else T5."""
    ends = [("shared.weight", "v d", "embedding"), ("lm_head.weight", "v d", "output")]
    return _table(*ends, *_t5("encoder", 1, gated), *_t5("decoder", 2, gated))


_E, _P = "bert.embeddings.", "cls.predictions."
_L, _OURS = "bert.encoder.layer.{}.", "layers/"
_PARTS = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}

BERT = _table(
    (_E + "word_embeddings.weight", "v d", "embedding"),
    (_E + "position_embeddings.weight", "p d", "position_embedding"),
    (_E + "token_type_embeddings.weight", "t d", "type_embedding"),
    (_E + "LayerNorm.weight", "d", "embedding_norm/scale"),
    (_E + "LayerNorm.bias", "d", "embedding_norm/bias"),
    *_attention(_L + "attention", _OURS + "attention", _PARTS),
    (_L + "attention.self.query.bias", "nh", _OURS + "attention/query_bias"),
    (_L + "attention.self.key.bias", "nh", _OURS + "attention/key_bias"),
    (_L + "attention.self.value.bias", "nh", _OURS + "attention/value_bias"),
    (_L + "attention.output.dense.bias", "d", _OURS + "attention/out_bias"),
    (_L + "attention.output.LayerNorm.weight", "d", _OURS + "attention_norm/scale"),
    (_L + "attention.output.LayerNorm.bias", "d", _OURS + "attention_norm/bias"),
    (_L + "intermediate.dense.weight", "f d", _OURS + "mlp/up"),
    (_L + "intermediate.dense.bias", "f", _OURS + "mlp/up_bias"),
    (_L + "output.dense.weight", "d f", _OURS + "mlp/down"),
    (_L + "output.dense.bias", "d", _OURS + "mlp/down_bias"),
    (_L + "output.LayerNorm.weight", "d", _OURS + "mlp_norm/scale"),
    (_L + "output.LayerNorm.bias", "d", _OURS + "mlp_norm/bias"),
    (_P + "transform.dense.weight", "e d", "transform"),
    (_P + "transform.dense.bias", "d", "transform_bias"),
    (_P + "transform.LayerNorm.weight", "d", "transform_norm/scale"),
    (_P + "transform.LayerNorm.bias", "d", "transform_norm/bias"),
    (_P + "bias", "v", "output_bias"),
)
