"""Which tensors of a Hugging Face checkpoint hold our parameters: a table for each model_type. Needs only numpy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from capibara.core import projections, tree
from capibara.interop.hf.layout.rows import (
    ATTENTION_BIASES,
    BARE,
    BUFFERS,
    EXPERTS,
    LLAMA,
    LLAMA_BIASED,
    LLAMA_LIKE,
    QK_NORM,
    QKV,
    QKV_BIAS,
    QWEN2,
    QWEN_EXPERTS,
    SINKS,
    A,
    L,
    M,
    Names,
    Rows,
    experts,
    renamed,
    rows,
    without,
)
from capibara.interop.hf.layout.tensors import Shape, Tensor, letters

QWEN3 = LLAMA + ATTENTION_BIASES + QK_NORM

GEMMA = LLAMA + ATTENTION_BIASES
GEMMA2 = without(GEMMA, "post_attention_layernorm") + rows(
    [
        (L + "post_attention_layernorm.weight", "d", "layers/attention_post_norm/scale"),
        (L + "pre_feedforward_layernorm.weight", "d", "layers/mlp_norm/scale"),
        (L + "post_feedforward_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
    ]
)
GEMMA3 = GEMMA2 + QK_NORM

_U = "layers/altup/"
GEMMA3N = (
    without(GEMMA2, ".bias")
    + QK_NORM
    + rows(
        [
            ("model.embed_tokens_per_layer.weight", "w x", "per_layer_embedding"),
            ("model.per_layer_model_projection.weight", "x d", "per_layer_projection"),
            ("model.per_layer_projection_norm.weight", "y", "per_layer_norm/scale"),
            ("model.altup_projections.{a}.weight", "o d", "stream_projections"),
            ("model.altup_unembed_projections.{a}.weight", "o d", "stream_unprojections"),
            (L + "altup.modality_router.weight", "a d", _U + "modality_router"),
            (L + "altup.router_norm.weight", "d", _U + "router_norm/scale"),
            (L + "altup.prediction_coefs.weight", "bc a", _U + "prediction"),
            (L + "altup.correction_coefs.weight", "b a", _U + "correction"),
            (L + "altup.correct_output_scale", "d", _U + "correct_scale"),
            (L + "laurel.linear_left.weight", "k d", "layers/laurel/left"),
            (L + "laurel.linear_right.weight", "d k", "layers/laurel/right"),
            (L + "laurel.post_laurel_norm.weight", "d", "layers/laurel/norm/scale"),
            (L + "per_layer_input_gate.weight", "y d", "layers/per_layer/input_gate"),
            (L + "per_layer_projection.weight", "d y", "layers/per_layer/projection"),
            (L + "post_per_layer_input_norm.weight", "d", "layers/per_layer/norm/scale"),
        ]
    )
)

PHI3 = without(LLAMA, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") + rows(
    [
        (L + "self_attn.qkv_proj.weight", "nh d", QKV, "n"),
        (L + "mlp.gate_up_proj.weight", "f d", f"{M}gate {M}up", "f"),
    ]
)


_BLOCK = "block_sparse_moe."
MIXTRAL = without(LLAMA, ".mlp.") + experts(
    _BLOCK + "gate.weight", *(f"{_BLOCK}experts.{{e}}.{name}.weight" for name in ("w1", "w3", "w2"))
)
QWEN3_MOE = without(QWEN3, ".mlp.") + QWEN_EXPERTS
# The experts of a layer in one tensor, as transformers 5 stores them in memory.
FUSED_EXPERTS = rows(
    [
        (L + "mlp.gate.weight", "e d", M + "router"),
        (L + "mlp.experts.gate_up_proj", "e f d", f"{M}gate {M}up", "f"),
        (L + "mlp.experts.down_proj", "e d f", M + "down"),
    ],
    EXPERTS,
)
FUSED = ".experts.gate_up_proj"

# Gate and up of gpt-oss are interleaved by output; its matrices have their inputs first.
GPT_OSS = (
    without(LLAMA_BIASED, ".mlp.")
    + SINKS
    + rows(
        [
            (L + "mlp.router.weight", "e d", M + "router"),
            (L + "mlp.router.bias", "e", M + "router_bias"),
            (L + "mlp.experts.gate_up_proj", "e d fi", f"{M}gate {M}up", "i"),
            (L + "mlp.experts.gate_up_proj_bias", "e fi", f"{M}gate_bias {M}up_bias", "i"),
            (L + "mlp.experts.down_proj", "e f d", M + "down"),
            (L + "mlp.experts.down_proj_bias", "e d", M + "down_bias"),
        ],
        EXPERTS,
    )
)

_H = "transformer.h.{l}."
GPT2 = rows(
    [
        ("transformer.wte.weight", "v d", "embedding"),
        ("transformer.wpe.weight", "p d", "position_embedding"),
        (_H + "ln_1.weight", "d", "layers/attention_norm/scale"),
        (_H + "ln_1.bias", "d", "layers/attention_norm/bias"),
        (_H + "attn.c_attn.weight", "d nh", QKV, "n"),
        (_H + "attn.c_attn.bias", "nh", QKV_BIAS, "n"),
        (_H + "attn.c_proj.weight", "nh d", A + "out"),
        (_H + "attn.c_proj.bias", "d", A + "out_bias"),
        (_H + "ln_2.weight", "d", "layers/mlp_norm/scale"),
        (_H + "ln_2.bias", "d", "layers/mlp_norm/bias"),
        (_H + "mlp.c_fc.weight", "d f", M + "up"),
        (_H + "mlp.c_fc.bias", "f", M + "up_bias"),
        (_H + "mlp.c_proj.weight", "f d", M + "down"),
        (_H + "mlp.c_proj.bias", "d", M + "down_bias"),
        ("transformer.ln_f.weight", "d", "final_norm/scale"),
        ("transformer.ln_f.bias", "d", "final_norm/bias"),
        ("lm_head.weight", "v d", "output"),
    ]
)

_G = "gpt_neox.layers.{l}."
GPT_NEOX = rows(
    [
        ("gpt_neox.embed_in.weight", "v d", "embedding"),
        (_G + "input_layernorm.weight", "d", "layers/attention_norm/scale"),
        (_G + "input_layernorm.bias", "d", "layers/attention_norm/bias"),
        (_G + "attention.query_key_value.weight", "nh d", QKV, "h"),  # each head has its query, key, value together
        (_G + "attention.query_key_value.bias", "nh", QKV_BIAS, "h"),
        (_G + "attention.dense.weight", "d nh", A + "out"),
        (_G + "attention.dense.bias", "d", A + "out_bias"),
        (_G + "post_attention_layernorm.weight", "d", "layers/mlp_norm/scale"),
        (_G + "post_attention_layernorm.bias", "d", "layers/mlp_norm/bias"),
        (_G + "mlp.dense_h_to_4h.weight", "f d", M + "up"),
        (_G + "mlp.dense_h_to_4h.bias", "f", M + "up_bias"),
        (_G + "mlp.dense_4h_to_h.weight", "d f", M + "down"),
        (_G + "mlp.dense_4h_to_h.bias", "d", M + "down_bias"),
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


# The encoder of LongT5, by layer and in the first one.
_LOCAL = "encoder.block.{l}.layer.0.LocalSelf"
_FIRST = ("encoder.block.0.layer.0.Self", "encoder.block.0.layer.0.LocalSelf")


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
    return rows([*ends, *_t5_side("encoder", 1, gated, shared), *_t5_side("decoder", 2, gated, shared)])


T5, T5_GATED = _t5(False), _t5(True)
UMT5, UMT5_GATED = _t5(False, shared=False), _t5(True, shared=False)  # each layer has its relative positions
LONGT5, LONGT5_GATED = (renamed(table, ("encoder.block.{l}.layer.0.Self", _LOCAL), _FIRST) for table in (T5, T5_GATED))

_GATED = ((T5, T5_GATED), (UMT5, UMT5_GATED), (LONGT5, LONGT5_GATED))

OUTPUT_NORM = "layers/mlp/output_norm/scale"  # of experts; published files of A.X-K1 have it in other layers, too
SCORE = rows([("score.weight", "u d", "score")])  # of every reward model

T5X_DECODER_TYPE = "t5x_decoder"  # model_type of T5X's decoders: transformers has none with relative positions
_X = "decoder/layers_{l}/"
T5X_DECODER = rows(
    [
        ("decoder/token_embedder/embedding", "v d", "embedding"),
        (_X + "pre_self_attention_layer_norm/scale", "d", "layers/attention_norm/scale"),
        *(
            (
                _X + f"self_attention/{projection.name}/kernel",
                f"{letters(projection.in_axes)} {letters(projection.out_axes)}",
                A + projection.name,
            )
            for projection in projections.ATTENTION
        ),
        (_X + "pre_mlp_layer_norm/scale", "d", "layers/mlp_norm/scale"),
        (_X + "mlp/wi_0/kernel", "d f", M + "gate"),
        (_X + "mlp/wi_1/kernel", "d f", M + "up"),
        (_X + "mlp/wo/kernel", "f d", M + "down"),
        ("decoder/relpos_bias/rel_embedding", "n r", "relative_bias/table"),
        ("decoder/decoder_norm/scale", "d", "final_norm/scale"),
        ("decoder/logits_dense/kernel", "d v", "output"),
    ]
)
T5X_DECODER_PLAIN = without(T5X_DECODER, "mlp/wi_") + rows([(_X + "mlp/wi/kernel", "d f", M + "up")])

_E, _P = "bert.embeddings.", "cls.predictions."
_B = "bert.encoder.layer.{l}."
_PARTS = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}

BERT = rows(
    [
        (_E + "word_embeddings.weight", "v d", "embedding"),
        (_E + "position_embeddings.weight", "p d", "position_embedding"),
        (_E + "token_type_embeddings.weight", "t d", "type_embedding"),
        (_E + "LayerNorm.weight", "d", "embedding_norm/scale"),
        (_E + "LayerNorm.bias", "d", "embedding_norm/bias"),
        *_attention(_B + "attention", "layers/attention", _PARTS),
        (_B + "attention.self.query.bias", "nh", A + "query_bias"),
        (_B + "attention.self.key.bias", "nh", A + "key_bias"),
        (_B + "attention.self.value.bias", "nh", A + "value_bias"),
        (_B + "attention.output.dense.bias", "d", A + "out_bias"),
        (_B + "attention.output.LayerNorm.weight", "d", "layers/attention_norm/scale"),
        (_B + "attention.output.LayerNorm.bias", "d", "layers/attention_norm/bias"),
        (_B + "intermediate.dense.weight", "f d", M + "up"),
        (_B + "intermediate.dense.bias", "f", M + "up_bias"),
        (_B + "output.dense.weight", "d f", M + "down"),
        (_B + "output.dense.bias", "d", M + "down_bias"),
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


NAMES = {
    "llama": Names(LLAMA_BIASED, *LLAMA_LIKE),
    "mistral": Names(LLAMA, *LLAMA_LIKE),
    "gemma": Names(GEMMA, *LLAMA_LIKE),
    "qwen2": Names(QWEN2, *LLAMA_LIKE),
    "qwen3": Names(QWEN3, *LLAMA_LIKE),
    "gemma2": Names(GEMMA2, *LLAMA_LIKE),
    # Folders of the text model may hold what was beside it.
    "gemma3_text": Names(GEMMA3, *LLAMA_LIKE, r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\."),
    "gemma3n_text": Names(
        GEMMA3N,
        (BARE, (r"^(?=(?:embed_tokens_per_layer|per_layer_|altup_)[a-z_.]*)", "model.")),
        BUFFERS,
        r"^(?:model\.)?(?:vision_tower|audio_tower|embed_vision|embed_audio)\.",
    ),
    "phi3": Names(PHI3, *LLAMA_LIKE),
    "mixtral": Names(MIXTRAL, *LLAMA_LIKE),
    "qwen3_moe": Names(QWEN3_MOE, *LLAMA_LIKE),
    "gpt_oss": Names(GPT_OSS, *LLAMA_LIKE),
    "gpt2": Names(GPT2, ((r"^(?=(?:h|wte|wpe|ln_f)\.)", "transformer."),), r"\.attn\.(?:masked_)?bias$"),
    "gpt_neox": Names(
        GPT_NEOX,
        ((r"^(?=(?:embed_in|layers|final_layer_norm)\.)", "gpt_neox."), (r"^lm_head\.", "embed_out.")),
        r"\.attention\.(?:masked_)?bias$|" + BUFFERS,
    ),
    # T5's first checkpoints have an unused table of relative positions for cross-attention.
    "t5": Names(T5, (), r"^(?:en|de)coder\.embed_tokens\.weight$|EncDecAttention\.relative_attention_bias"),
    "mt5": Names(T5, (), r"^(?:en|de)coder\.embed_tokens\.weight$"),
    "umt5": Names(UMT5, (), r"^(?:en|de)coder\.embed_tokens\.weight$|EncDecAttention\.relative_attention_bias"),
    "longt5": Names(LONGT5, (), r"^(?:en|de)coder\.embed_tokens\.weight$"),
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
        ("t5", "mt5", "umt5", "longt5"),
        {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")},
    ),
    "bert": {_P + "decoder.bias": _P + "bias"},
}


def of(
    model_type: str,
    shapes: Mapping[str, Shape],
    layers: tree.LayersOf,
    *,
    fused_experts: bool | None = None,
    fused_mtp: bool = False,
) -> Rows:
    """The rows of an architecture's table that a model uses.

    Args:
      model_type: a key of NAMES.
      shapes: of our parameters, by name.
      layers: TransformerConfig.module_layers.
      fused_experts: whether a layer's experts are one tensor, as transformers 5 stores them in memory; None: as it writes them.
      fused_mtp: the same for the modules that predict further tokens.
    """
    names = NAMES[model_type]
    rows = names.rows if names.chosen is None else names.chosen(shapes)
    if fused_experts is False and names.separate:
        rows = names.separate
    if "encoder/layers/mlp/gate" in shapes:
        rows = next((gated for plain, gated in _GATED if rows is plain), rows)
    if rows is T5X_DECODER and "layers/mlp/gate" not in shapes:
        rows = T5X_DECODER_PLAIN
    mtp = NAMES[model_type].mtp
    of_mtp = () if mtp is None else mtp.rows(_fused(rows) if fused_mtp else rows, shapes)
    if fused_experts and "layers/mlp/router" in shapes:
        rows = _fused(rows)
    there = tuple(_in_layers(row, layers) for row in (*rows, *SCORE) if row.ours[0] in shapes)
    return (there if names.placed is None else names.placed(there, shapes, layers)) + of_mtp


def _fused(rows: Rows) -> Rows:
    """The rows with a layer's experts in one tensor."""
    if is_fused([row.name for row in rows]):
        return rows
    fused = {path for row in FUSED_EXPERTS for path in row.ours}
    return tuple(row for row in rows if row.ours[0] not in fused) + FUSED_EXPERTS


def is_fused(names: Collection[str]) -> bool:
    """Whether a layer's experts are one tensor, by the tensors' names."""
    return any(name.endswith(FUSED) for name in names)


def of_mtp(model_type: str, num_layers: int, names: Collection[str]) -> set[str]:
    """The tensors of modules that predict further tokens, among these names of tensors."""
    if (mtp := NAMES[model_type].mtp) is None:
        return set()
    pattern = re.compile(mtp.pattern_of(num_layers))
    return {name for name in names if pattern.search(name)}


def turned(rows: Rows, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> Rows:
    """The rows, with matrices in fused tensors turned around where the stored shape is not theirs: Qwen3-VL's.

    Args:
      rows: of the model.
      shapes: of its parameters.
      stored: shapes of the tensors, by the table's names.
    """

    def as_stored(row: Tensor) -> Tensor:
        fused = row in FUSED_EXPERTS[1:]
        if not fused or stored.get(row.named((0,)), row.shape(shapes)) == row.shape(shapes):
            return row
        experts, rows_of_matrix, columns = row.dims.split()
        return dataclasses.replace(row, dims=f"{experts} {columns} {rows_of_matrix}")

    return tuple(map(as_stored, rows))


def _in_layers(row: Tensor, layers: tree.LayersOf) -> Tensor:
    """The row, with the numbers of the layers that have its module if some lack it."""
    numbers = layers.get(row.ours[0].removeprefix("layers/").partition("/")[0])
    return row if numbers is None else dataclasses.replace(row, layers=tuple(numbers))


def unused(rows: Rows, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Names of unused tensors that a checkpoint may have for layers without such a parameter.

    Args:
      rows: of the model.
      shapes: of its parameters.
    """
    depths = {row: shapes[row.ours[0]][0] for row in rows if row.numbered == "l" and _depth_varies(row)}
    deepest = max(depths.values(), default=0)
    layers = {row: range(deepest) if row.layers is None else row.layers for row in depths}
    normed = [(row.name, row.layers) for row in rows if row.ours[0] == OUTPUT_NORM and row.layers]
    absent = {name.format(l=n) for name, layers_of in normed for n in range(max(layers_of)) if n not in layers_of}
    return absent | {row.name.format(l=layer) for row, depth in depths.items() for layer in layers[row][depth:]}


def _depth_varies(row: Tensor) -> bool:
    """Whether a row's parameters may be of the first layers alone (Gemma 3n, Gemma 4)."""
    return row.ours[0].split("/")[1] in ("attention", "global_attention")


def numbers(model_type: str, names: Collection[str]) -> list[str]:
    """The tensors of whole numbers among these names."""
    of = NAMES.get(model_type)
    return [] if of is None else [name for name in names if of.count_of(name) is not None]


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
    return _ALIASES.get(model_type) or dict(NAMES[model_type].aliases)


def ends(model_type: str) -> tuple[str, str]:
    """Names of the head and of the embedding."""
    rows = NAMES[model_type].rows
    head, embedding = (next(row.name for row in rows if row.ours == (ours,)) for ours in ("output", "embedding"))
    return head, embedding
