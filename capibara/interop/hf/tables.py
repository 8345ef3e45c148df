"""Which tensors of a Hugging Face checkpoint hold our parameters: a table for each model_type. Needs only numpy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping

from capibara.core import projections
from capibara.interop.hf.tensors import Tensor, letters

# The dimensions of our parameters, in the letters of interop.hf.tensors.
_LAYER = {
    **{f"{name}_norm/{part}": "ld" for name in ("attention", "mlp") for part in ("scale", "bias")},
    **{f"{name}_post_norm/scale": "ld" for name in ("attention", "mlp")},
    **{one.path: "l" + letters(one.axes) for one in projections.ATTENTION + projections.MLP},
    **{f"{one.path}_bias": "l" + letters(one.out_axes) for one in projections.ATTENTION + projections.MLP},
    **{f"{one.path}_norm/scale": "lh" for one in (projections.QUERY, projections.KEY)},
    "attention/sinks": "ln",
}
_CROSS = {f"cross_{path}": layout for path, layout in _LAYER.items() if path.startswith("attention")}
_LAYOUTS = {
    **dict.fromkeys(("embedding", "output"), "vd"),
    "position_embedding": "pd",
    "type_embedding": "td",
    "transform": "do",
    "output_bias": "v",
    **{f"{name}_norm/{part}": "d" for name in ("final", "embedding", "transform") for part in ("scale", "bias")},
    "transform_bias": "d",
    **{f"layers/{path}": layout for path, layout in _LAYER.items()},
    **{
        f"{side}/layers/{path}": layout for side in ("encoder", "decoder") for path, layout in (_LAYER | _CROSS).items()
    },
    "relative_bias/table": "rn",
    **{f"{side}/relative_bias/table": "rn" for side in ("encoder", "decoder")},
    **{f"{side}/layers/relative_bias/table": "lrn" for side in ("encoder", "decoder")},
    **{f"{side}/norm/scale": "d" for side in ("encoder", "decoder")},
}
_LAYOUTS |= {  # of Gemma 3n
    "per_layer_embedding": "wx",
    "per_layer_projection": "dx",
    "per_layer_norm/scale": "y",
    **dict.fromkeys(("stream_projections", "stream_unprojections"), "ado"),
    "layers/altup/modality_router": "lda",
    "layers/altup/prediction": "labc",
    "layers/altup/correction": "lab",
    **dict.fromkeys(("layers/altup/correct_scale", "layers/altup/router_norm/scale"), "ld"),
    "layers/laurel/left": "ldk",
    "layers/laurel/right": "lkd",
    "layers/per_layer/input_gate": "ldy",
    "layers/per_layer/projection": "lyd",
    **dict.fromkeys(("layers/laurel/norm/scale", "layers/per_layer/norm/scale"), "ld"),
}
_EXPERTS = {
    "layers/mlp/router": "lde",
    **{f"layers/{one.path}": "l" + letters(one.axes) for one in projections.EXPERTS},
    "layers/mlp/router_bias": "le",
    **{f"layers/{one.path}_bias": "le" + letters(one.out_axes) for one in projections.EXPERTS},
}

Rows = tuple[Tensor, ...]


def _rows(rows: Iterable[tuple[str, ...]], layouts: Mapping[str, str] = _LAYOUTS) -> Rows:
    """Rows are (name, dims, our parameters, letter of the dimension that concatenates them)."""
    made = []
    for name, dims, ours, *along in rows:
        paths = tuple(ours.split())
        made.append(Tensor(name, dims, paths, along[0] if along else "", layouts[paths[0]]))
    return tuple(made)


def table(rows: Iterable[tuple[str, ...]], layouts: Mapping[str, str] | None = None) -> Rows:
    """The table of a family from user code.

    Args:
      rows: (tensor's name, its dimensions, the parameters of ours that it holds), and, if it concatenates several, the
        letter of that dimension. Dimensions are in the letters of interop.hf.tensors; our names are those of core.tree.
      layouts: dimensions of our parameters that no other family has, by name.
    """
    return _rows(rows, _LAYOUTS | dict(layouts or {}))


def _without(rows: Rows, *words: str) -> Rows:
    return tuple(row for row in rows if not any(word in row.name for word in words))


_L, _A, _M = "model.layers.{l}.", "layers/attention/", "layers/mlp/"

LLAMA = _rows(
    [
        ("model.embed_tokens.weight", "v d", "embedding"),
        (_L + "input_layernorm.weight", "d", "layers/attention_norm/scale"),
        (_L + "self_attn.q_proj.weight", "nh d", _A + "query"),
        (_L + "self_attn.k_proj.weight", "nh d", _A + "key"),
        (_L + "self_attn.v_proj.weight", "nh d", _A + "value"),
        (_L + "self_attn.o_proj.weight", "d nh", _A + "out"),
        (_L + "post_attention_layernorm.weight", "d", "layers/mlp_norm/scale"),
        (_L + "mlp.gate_proj.weight", "f d", _M + "gate"),
        (_L + "mlp.up_proj.weight", "f d", _M + "up"),
        (_L + "mlp.down_proj.weight", "d f", _M + "down"),
        ("model.norm.weight", "d", "final_norm/scale"),
        ("lm_head.weight", "v d", "output"),
    ]
)

QWEN2 = LLAMA + _rows(
    [
        (_L + "self_attn.q_proj.bias", "nh", _A + "query_bias"),
        (_L + "self_attn.k_proj.bias", "nh", _A + "key_bias"),
        (_L + "self_attn.v_proj.bias", "nh", _A + "value_bias"),
    ]
)
# With attention_bias, and with mlp_bias.
_ATTENTION_BIASES = QWEN2[len(LLAMA) :] + _rows([(_L + "self_attn.o_proj.bias", "d", _A + "out_bias")])
_MLP_BIASES = _rows(
    [
        (_L + "mlp.gate_proj.bias", "f", _M + "gate_bias"),
        (_L + "mlp.up_proj.bias", "f", _M + "up_bias"),
        (_L + "mlp.down_proj.bias", "d", _M + "down_bias"),
    ]
)
LLAMA_BIASED = LLAMA + _ATTENTION_BIASES + _MLP_BIASES

_QK_NORM = _rows(
    [
        (_L + "self_attn.q_norm.weight", "h", _A + "query_norm/scale"),
        (_L + "self_attn.k_norm.weight", "h", _A + "key_norm/scale"),
    ]
)
QWEN3 = LLAMA + _ATTENTION_BIASES + _QK_NORM

GEMMA = LLAMA + _ATTENTION_BIASES
GEMMA2 = _without(GEMMA, "post_attention_layernorm") + _rows(
    [
        (_L + "post_attention_layernorm.weight", "d", "layers/attention_post_norm/scale"),
        (_L + "pre_feedforward_layernorm.weight", "d", "layers/mlp_norm/scale"),
        (_L + "post_feedforward_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
    ]
)
GEMMA3 = GEMMA2 + _QK_NORM

_U = "layers/altup/"
GEMMA3N = (
    _without(GEMMA2, ".bias")
    + _QK_NORM
    + _rows(
        [
            ("model.embed_tokens_per_layer.weight", "w x", "per_layer_embedding"),
            ("model.per_layer_model_projection.weight", "x d", "per_layer_projection"),
            ("model.per_layer_projection_norm.weight", "y", "per_layer_norm/scale"),
            ("model.altup_projections.{a}.weight", "o d", "stream_projections"),
            ("model.altup_unembed_projections.{a}.weight", "o d", "stream_unprojections"),
            (_L + "altup.modality_router.weight", "a d", _U + "modality_router"),
            (_L + "altup.router_norm.weight", "d", _U + "router_norm/scale"),
            (_L + "altup.prediction_coefs.weight", "bc a", _U + "prediction"),
            (_L + "altup.correction_coefs.weight", "b a", _U + "correction"),
            (_L + "altup.correct_output_scale", "d", _U + "correct_scale"),
            (_L + "laurel.linear_left.weight", "k d", "layers/laurel/left"),
            (_L + "laurel.linear_right.weight", "d k", "layers/laurel/right"),
            (_L + "laurel.post_laurel_norm.weight", "d", "layers/laurel/norm/scale"),
            (_L + "per_layer_input_gate.weight", "y d", "layers/per_layer/input_gate"),
            (_L + "per_layer_projection.weight", "d y", "layers/per_layer/projection"),
            (_L + "post_per_layer_input_norm.weight", "d", "layers/per_layer/norm/scale"),
        ]
    )
)

_QKV = f"{_A}query {_A}key {_A}value"
_QKV_BIAS = f"{_A}query_bias {_A}key_bias {_A}value_bias"

PHI3 = _without(LLAMA, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") + _rows(
    [
        (_L + "self_attn.qkv_proj.weight", "nh d", _QKV, "n"),
        (_L + "mlp.gate_up_proj.weight", "f d", f"{_M}gate {_M}up", "f"),
    ]
)


def _experts(router: str, gate: str, up: str, down: str) -> Rows:
    rows = [
        (_L + router, "e d", _M + "router"),
        (_L + gate, "f d", _M + "gate"),
        (_L + up, "f d", _M + "up"),
        (_L + down, "d f", _M + "down"),
    ]
    return _rows(rows, _EXPERTS)


_BLOCK, _EXPERT = "block_sparse_moe.", "mlp.experts.{e}."
MIXTRAL = _without(LLAMA, ".mlp.") + _experts(
    _BLOCK + "gate.weight", *(f"{_BLOCK}experts.{{e}}.{name}.weight" for name in ("w1", "w3", "w2"))
)
QWEN3_MOE = _without(QWEN3, ".mlp.") + _experts(
    "mlp.gate.weight", *(f"{_EXPERT}{name}_proj.weight" for name in ("gate", "up", "down"))
)
# The experts of a layer in one tensor, as transformers 5 stores them in memory.
FUSED_EXPERTS = _rows(
    [
        (_L + "mlp.gate.weight", "e d", _M + "router"),
        (_L + "mlp.experts.gate_up_proj", "e f d", f"{_M}gate {_M}up", "f"),
        (_L + "mlp.experts.down_proj", "e d f", _M + "down"),
    ],
    _EXPERTS,
)

# Gate and up of gpt-oss are interleaved by output; its matrices have their inputs first.
GPT_OSS = (
    _without(LLAMA_BIASED, ".mlp.")
    + _rows([(_L + "self_attn.sinks", "n", _A + "sinks")])
    + _rows(
        [
            (_L + "mlp.router.weight", "e d", _M + "router"),
            (_L + "mlp.router.bias", "e", _M + "router_bias"),
            (_L + "mlp.experts.gate_up_proj", "e d fi", f"{_M}gate {_M}up", "i"),
            (_L + "mlp.experts.gate_up_proj_bias", "e fi", f"{_M}gate_bias {_M}up_bias", "i"),
            (_L + "mlp.experts.down_proj", "e f d", _M + "down"),
            (_L + "mlp.experts.down_proj_bias", "e d", _M + "down_bias"),
        ],
        _EXPERTS,
    )
)

_H = "transformer.h.{l}."
GPT2 = _rows(
    [
        ("transformer.wte.weight", "v d", "embedding"),
        ("transformer.wpe.weight", "p d", "position_embedding"),
        (_H + "ln_1.weight", "d", "layers/attention_norm/scale"),
        (_H + "ln_1.bias", "d", "layers/attention_norm/bias"),
        (_H + "attn.c_attn.weight", "d nh", _QKV, "n"),
        (_H + "attn.c_attn.bias", "nh", _QKV_BIAS, "n"),
        (_H + "attn.c_proj.weight", "nh d", _A + "out"),
        (_H + "attn.c_proj.bias", "d", _A + "out_bias"),
        (_H + "ln_2.weight", "d", "layers/mlp_norm/scale"),
        (_H + "ln_2.bias", "d", "layers/mlp_norm/bias"),
        (_H + "mlp.c_fc.weight", "d f", _M + "up"),
        (_H + "mlp.c_fc.bias", "f", _M + "up_bias"),
        (_H + "mlp.c_proj.weight", "f d", _M + "down"),
        (_H + "mlp.c_proj.bias", "d", _M + "down_bias"),
        ("transformer.ln_f.weight", "d", "final_norm/scale"),
        ("transformer.ln_f.bias", "d", "final_norm/bias"),
        ("lm_head.weight", "v d", "output"),
    ]
)

_G = "gpt_neox.layers.{l}."
GPT_NEOX = _rows(
    [
        ("gpt_neox.embed_in.weight", "v d", "embedding"),
        (_G + "input_layernorm.weight", "d", "layers/attention_norm/scale"),
        (_G + "input_layernorm.bias", "d", "layers/attention_norm/bias"),
        (_G + "attention.query_key_value.weight", "nh d", _QKV, "h"),  # each head has its query, key, value together
        (_G + "attention.query_key_value.bias", "nh", _QKV_BIAS, "h"),
        (_G + "attention.dense.weight", "d nh", _A + "out"),
        (_G + "attention.dense.bias", "d", _A + "out_bias"),
        (_G + "post_attention_layernorm.weight", "d", "layers/mlp_norm/scale"),
        (_G + "post_attention_layernorm.bias", "d", "layers/mlp_norm/bias"),
        (_G + "mlp.dense_h_to_4h.weight", "f d", _M + "up"),
        (_G + "mlp.dense_h_to_4h.bias", "f", _M + "up_bias"),
        (_G + "mlp.dense_4h_to_h.weight", "d f", _M + "down"),
        (_G + "mlp.dense_4h_to_h.bias", "d", _M + "down_bias"),
        ("gpt_neox.final_layer_norm.weight", "d", "final_norm/scale"),
        ("gpt_neox.final_layer_norm.bias", "d", "final_norm/bias"),
        ("embed_out.weight", "v d", "output"),
    ]
)


def _attention(theirs: str, ours: str, parts: Mapping[str, str]) -> list[tuple[str, ...]]:
    names = (("q", "query"), ("k", "key"), ("v", "value"))
    rows: list[tuple[str, ...]] = [
        (f"{theirs}.{parts[short]}.weight", "nh d", f"{ours}/{name}") for short, name in names
    ]
    return [*rows, (f"{theirs}.{parts['o']}.weight", "d nh", f"{ours}/out")]


def _t5_side(side: str, mlp_layer: int, gated: bool, shared: bool) -> list[tuple[str, ...]]:
    block, ours, short = f"{side}.block.{{l}}.layer.", f"{side}/layers/", {name: name for name in "qkvo"}
    dense = f"{block}{mlp_layer}.DenseReluDense."
    into = [(f"{dense}wi_0.weight", "f d", f"{ours}mlp/gate"), (f"{dense}wi_1.weight", "f d", f"{ours}mlp/up")]
    cross = [
        *_attention(f"{block}1.EncDecAttention", f"{ours}cross_attention", short),
        (f"{block}1.layer_norm.weight", "d", f"{ours}cross_attention_norm/scale"),
    ]
    table = (f"{block}0.SelfAttention.relative_attention_bias.weight", "r n", f"{ours}relative_bias/table")
    if shared:
        table = (table[0].format(l=0), "r n", f"{side}/relative_bias/table")
    return [
        *_attention(f"{block}0.SelfAttention", f"{ours}attention", short),
        (f"{block}0.layer_norm.weight", "d", f"{ours}attention_norm/scale"),
        *(cross if side == "decoder" else []),
        *(into if gated else [(f"{dense}wi.weight", "f d", f"{ours}mlp/up")]),
        (f"{dense}wo.weight", "d f", f"{ours}mlp/down"),
        (f"{block}{mlp_layer}.layer_norm.weight", "d", f"{ours}mlp_norm/scale"),
        table,
        (f"{side}.final_layer_norm.weight", "d", f"{side}/norm/scale"),
    ]


def _t5(gated: bool, shared: bool = True) -> Rows:
    ends = [("shared.weight", "v d", "embedding"), ("lm_head.weight", "v d", "output")]
    return _rows([*ends, *_t5_side("encoder", 1, gated, shared), *_t5_side("decoder", 2, gated, shared)])


T5, T5_GATED = _t5(False), _t5(True)
UMT5, UMT5_GATED = _t5(False, shared=False), _t5(True, shared=False)  # each layer has its relative positions

T5X_DECODER_TYPE = "t5x_decoder"  # model_type of T5X's decoders: transformers has none with relative positions
_X = "decoder/layers_{l}/"
T5X_DECODER = _rows(
    [
        ("decoder/token_embedder/embedding", "v d", "embedding"),
        (_X + "pre_self_attention_layer_norm/scale", "d", "layers/attention_norm/scale"),
        *(
            (_X + f"self_attention/{one.name}/kernel", f"{letters(one.in_axes)} {letters(one.out_axes)}", _A + one.name)
            for one in projections.ATTENTION
        ),
        (_X + "pre_mlp_layer_norm/scale", "d", "layers/mlp_norm/scale"),
        (_X + "mlp/wi_0/kernel", "d f", _M + "gate"),
        (_X + "mlp/wi_1/kernel", "d f", _M + "up"),
        (_X + "mlp/wo/kernel", "f d", _M + "down"),
        ("decoder/relpos_bias/rel_embedding", "n r", "relative_bias/table"),
        ("decoder/decoder_norm/scale", "d", "final_norm/scale"),
        ("decoder/logits_dense/kernel", "d v", "output"),
    ]
)
T5X_DECODER_PLAIN = _without(T5X_DECODER, "mlp/wi_") + _rows([(_X + "mlp/wi/kernel", "d f", _M + "up")])

_E, _P = "bert.embeddings.", "cls.predictions."
_B = "bert.encoder.layer.{l}."
_PARTS = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}

BERT = _rows(
    [
        (_E + "word_embeddings.weight", "v d", "embedding"),
        (_E + "position_embeddings.weight", "p d", "position_embedding"),
        (_E + "token_type_embeddings.weight", "t d", "type_embedding"),
        (_E + "LayerNorm.weight", "d", "embedding_norm/scale"),
        (_E + "LayerNorm.bias", "d", "embedding_norm/bias"),
        *_attention(_B + "attention", "layers/attention", _PARTS),
        (_B + "attention.self.query.bias", "nh", _A + "query_bias"),
        (_B + "attention.self.key.bias", "nh", _A + "key_bias"),
        (_B + "attention.self.value.bias", "nh", _A + "value_bias"),
        (_B + "attention.output.dense.bias", "d", _A + "out_bias"),
        (_B + "attention.output.LayerNorm.weight", "d", "layers/attention_norm/scale"),
        (_B + "attention.output.LayerNorm.bias", "d", "layers/attention_norm/bias"),
        (_B + "intermediate.dense.weight", "f d", _M + "up"),
        (_B + "intermediate.dense.bias", "f", _M + "up_bias"),
        (_B + "output.dense.weight", "d f", _M + "down"),
        (_B + "output.dense.bias", "d", _M + "down_bias"),
        (_B + "output.LayerNorm.weight", "d", "layers/mlp_norm/scale"),
        (_B + "output.LayerNorm.bias", "d", "layers/mlp_norm/bias"),
        (_P + "transform.dense.weight", "o d", "transform"),
        (_P + "transform.dense.bias", "d", "transform_bias"),
        (_P + "transform.LayerNorm.weight", "d", "transform_norm/scale"),
        (_P + "transform.LayerNorm.bias", "d", "transform_norm/bias"),
        (_P + "bias", "v", "output_bias"),
        (_P + "decoder.weight", "v d", "output"),
    ]
)


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of an architecture, and their alternative names.

    Attributes:
      rows: its table.
      renamed: (pattern, replacement) that map names in other versions of a checkpoint to the table's.
      ignored: pattern of tensors that are no parameters, or stand for one (`fixed_aliases`).
      parts: pattern of tensors of parts that are not supported.
    """

    rows: Rows
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: str = r"(?!)"
    parts: str = r"(?!)"

    def canonical(self, name: str) -> str | None:
        """The table's name of a tensor; None: it is not used."""
        name = self._renamed(name)
        return None if re.search(self.ignored, name) or re.search(self.parts, name) else name

    def of_part(self, name: str) -> bool:
        """Whether a tensor is of a part that is not supported."""
        return re.search(self.parts, self._renamed(name)) is not None

    def _renamed(self, name: str) -> str:
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name


_BARE = (r"^(?=(?:layers|embed_tokens|norm)\.)", "model.")  # a checkpoint of the model without its head
_TEXT = (r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)", "model.")  # the text model of a multimodal one
_TEXT_HEAD = (r"^language_model\.lm_head", "lm_head")
_BUFFERS = r"\.rotary_emb\.inv_freq$"
_LLAMA_LIKE = ((_BARE,), _BUFFERS)

NAMES = {
    "llama": Names(LLAMA_BIASED, *_LLAMA_LIKE),
    "mistral": Names(LLAMA, *_LLAMA_LIKE),
    "gemma": Names(GEMMA, *_LLAMA_LIKE),
    "qwen2": Names(QWEN2, *_LLAMA_LIKE),
    "qwen3": Names(QWEN3, *_LLAMA_LIKE),
    "gemma2": Names(GEMMA2, *_LLAMA_LIKE),
    "gemma3_text": Names(
        GEMMA3, (_TEXT_HEAD, _TEXT, _BARE), _BUFFERS, r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\."
    ),
    "gemma3n_text": Names(
        GEMMA3N,
        (_TEXT_HEAD, _TEXT, _BARE, (r"^(?=(?:embed_tokens_per_layer|per_layer_|altup_)[a-z_.]*)", "model.")),
        _BUFFERS,
        r"^(?:model\.)?(?:vision_tower|audio_tower|embed_vision|embed_audio)\.",
    ),
    "phi3": Names(PHI3, *_LLAMA_LIKE),
    "mixtral": Names(MIXTRAL, *_LLAMA_LIKE),
    "qwen3_moe": Names(QWEN3_MOE, *_LLAMA_LIKE),
    "gpt_oss": Names(GPT_OSS, *_LLAMA_LIKE),
    "gpt2": Names(GPT2, ((r"^(?=(?:h|wte|wpe|ln_f)\.)", "transformer."),), r"\.attn\.(?:masked_)?bias$"),
    "gpt_neox": Names(
        GPT_NEOX,
        ((r"^(?=(?:embed_in|layers|final_layer_norm)\.)", "gpt_neox."), (r"^lm_head\.", "embed_out.")),
        r"\.attention\.(?:masked_)?bias$|" + _BUFFERS,
    ),
    # T5's first checkpoints have an unused table of relative positions for cross-attention.
    "t5": Names(T5, (), r"^(?:en|de)coder\.embed_tokens\.weight$|EncDecAttention\.relative_attention_bias"),
    "umt5": Names(UMT5, (), r"^(?:en|de)coder\.embed_tokens\.weight$|EncDecAttention\.relative_attention_bias"),
    T5X_DECODER_TYPE: Names(T5X_DECODER),
    "bert": Names(
        BERT,
        ((r"^(?=(?:embeddings|encoder)\.)", "bert."), (r"LayerNorm\.gamma$", "LayerNorm.weight"))
        + ((r"LayerNorm\.beta$", "LayerNorm.bias"),),
        r"\.position_ids$|^cls\.predictions\.decoder\.bias$",
        r"^bert\.pooler\.|^cls\.seq_relationship\.",
    ),
}


_ALIASES = {
    **dict.fromkeys(
        ("t5", "umt5"), {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
    ),
    "bert": {_P + "decoder.bias": _P + "bias"},
}


def of(model_type: str, paths: Collection[str], *, fused_experts: bool = False) -> Rows:
    """The rows of an architecture's table that a model uses.

    Args:
      model_type: a key of NAMES.
      paths: our parameters' names.
      fused_experts: whether a layer's experts are one tensor, as transformers 5 stores them in memory.
    """
    rows = NAMES[model_type].rows
    if rows in (T5, UMT5) and "encoder/layers/mlp/gate" in paths:
        rows = T5_GATED if rows is T5 else UMT5_GATED
    if rows is T5X_DECODER and "layers/mlp/gate" not in paths:
        rows = T5X_DECODER_PLAIN
    if fused_experts and "layers/mlp/router" in paths and rows is not GPT_OSS:  # its files always have them fused
        rows = tuple(row for row in rows if not row.ours[0].startswith(_M)) + FUSED_EXPERTS
    return tuple(row for row in rows if row.ours[0] in paths)


def unused(rows: Rows, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Names of unused tensors that a checkpoint may have for layers without such a parameter.

    Args:
      rows: of the model.
      shapes: of its parameters.
    """
    depths = {row: shapes[row.ours[0]][0] for row in rows if row.numbered == "l"}
    deepest = max(depths.values(), default=0)
    return {row.name.format(l=layer) for row, depth in depths.items() for layer in range(depth, deepest)}


def aliases(model_type: str, names: Collection[str]) -> dict[str, str]:
    """Additional names, in a PyTorch state dict, of tensors that several modules share -> that tensor.

    Args:
      model_type: a key of NAMES.
      names: of the checkpoint's tensors.
    """
    head, embedding = ends(model_type)
    tied = {} if head in names else {head: embedding}
    return tied | fixed_aliases(model_type)


def fixed_aliases(model_type: str) -> dict[str, str]:
    """Additional names of tensors other than the head -> the tensor that transformers ties them to."""
    return _ALIASES.get(model_type, {})


def ends(model_type: str) -> tuple[str, str]:
    """Names of the head and of the embedding."""
    rows = NAMES[model_type].rows
    head, embedding = (next(row.name for row in rows if row.ours == (ours,)) for ours in ("output", "embedding"))
    return head, embedding
