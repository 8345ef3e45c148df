"""Rows of the tables of Hugging Face checkpoints, and the rows that most decoders share. Needs only numpy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from capibara.core import projections, tree
from capibara.interop.hf.layout.mtp import MtpNames
from capibara.interop.hf.layout.tensors import Shape, Tensor, letters

# The dimensions of our parameters, in the letters of interop.hf.tensors.
_LAYER = {
    **{f"{name}_norm/{part}": "ld" for name in ("attention", "mlp", "branch") for part in ("scale", "bias")},
    **{f"{name}_post_norm/scale": "ld" for name in ("attention", "mlp")},
    **{projection.path: "l" + letters(projection.axes) for projection in projections.ATTENTION + projections.MLP},
    **{f"first_{projection.path}": "l" + letters(projection.axes) for projection in projections.MLP},
    **{
        f"{projection.path}_bias": "l" + letters(projection.out_axes)
        for projection in projections.ATTENTION + projections.MLP
    },
    **{
        f"{projection.path}_norm/{part}": "lh"
        for projection in (projections.QUERY, projections.KEY)
        for part in ("scale", "bias")
    },
    "attention/sinks": "ln",
}
_BY_KIND = {
    f"{kind}_{path}": layout
    for path, layout in _LAYER.items()
    for kind in ("local", "sparse", "compressed")
    if path.startswith("attention/")
}
_CROSS = {f"cross_{path}": layout for path, layout in _LAYER.items() if path.startswith("attention")}
_LAYOUTS = {
    **dict.fromkeys(("embedding", "output"), "vd"),
    "position_embedding": "pd",
    **dict.fromkeys(("type_embedding", "task_embedding"), "td"),
    "projection": "od",
    "projection_bias": "d",
    "transform": "do",
    "output_bias": "v",
    "score": "d",
    **{f"{name}_norm/{part}": "d" for name in ("final", "embedding", "transform") for part in ("scale", "bias")},
    "transform_bias": "d",
    **{f"layers/{path}": layout for path, layout in (_LAYER | _BY_KIND).items()},
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
EXPERTS = {
    "layers/mlp/router": "lde",
    **{f"layers/{projection.path}": "l" + letters(projection.axes) for projection in projections.EXPERTS},
    "layers/mlp/router_bias": "le",
    "layers/mlp/correction": "le",
    "layers/mlp/output_norm/scale": "ld",
    "layers/mlp/shared_switch": "lds",
    **{f"layers/{projection.path}": "l" + letters(projection.axes) for projection in projections.SHARED},
    **{f"layers/{projection.path}_bias": "le" + letters(projection.out_axes) for projection in projections.EXPERTS},
}

Rows = tuple[Tensor, ...]
# The language model of one that reads images, too.
_TEXT = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?!lm_head)", "model."),
)


def rows(declared: Iterable[tuple[str, ...]], layouts: Mapping[str, str] | None = None) -> Rows:
    """The rows of a table.

    Args:
      declared: (tensor's name, its dimensions, the parameters of ours that it holds), and, if it concatenates several, the
        letter of that dimension. Dimensions are in the letters of interop.hf.layout.tensors; our names are those of core.tree.
      layouts: dimensions of our parameters that no other family has, by name.
    """
    created, known = [], _LAYOUTS | dict(layouts or {})
    for name, dims, ours, *along in declared:
        paths = tuple(ours.split())
        created.append(Tensor(name, dims, paths, along[0] if along else "", known[paths[0]]))
    return tuple(created)


L, A, M = "model.layers.{l}.", "layers/attention/", "layers/mlp/"


def experts(router: str, gate: str, up: str, down: str) -> Rows:
    """The rows of a router and its experts, by the ends of their tensors' names in a layer."""
    declared = [
        (L + router, "e d", M + "router"),
        (L + gate, "f d", M + "gate"),
        (L + up, "f d", M + "up"),
        (L + down, "d f", M + "down"),
    ]
    return rows(declared, EXPERTS)


def shared_experts(module: str) -> Rows:
    """The rows of the experts that every token meets, in a module of a layer."""
    names = ("gate_proj", "f d", "shared_gate"), ("up_proj", "f d", "shared_up"), ("down_proj", "d f", "shared_down")
    return rows([(f"{L}{module}.{name}.weight", dims, M + ours) for name, dims, ours in names], EXPERTS)


def linear(name: str, dims: str, ours: str, *along: str, out: int = 0) -> list[tuple[str, ...]]:
    """A weight and its bias, for `rows`. `out` is the dimension of its outputs: the first, or the second (GPT-2)."""
    biases = " ".join(f"{path}_bias" for path in ours.split())
    return [(f"{name}.weight", dims, ours, *along), (f"{name}.bias", dims.split()[out], biases, *along)]


def attention(module: str, ours: str, out: str) -> list[tuple[str, ...]]:
    """The projections of attention with their biases, for `rows`; `out` is the last one's name."""
    names = (("q_proj", "nh d", "query"), ("k_proj", "nh d", "key"), ("v_proj", "nh d", "value"), (out, "d nh", "out"))
    return [row for name, dims, of in names for row in linear(f"{module}.{name}", dims, f"{ours}/{of}")]


def norm(name: str, ours: str, dim: str = "d") -> list[tuple[str, ...]]:
    """A norm's scale and its bias, for `rows`."""
    return [(f"{name}.weight", dim, f"{ours}/scale"), (f"{name}.bias", dim, f"{ours}/bias")]


def without(rows: Rows, *words: str) -> Rows:
    """The rows whose tensors have none of these words in their names."""
    return tuple(row for row in rows if not any(word in row.name for word in words))


def with_attention_of(kind: str, rows: Rows) -> Rows:
    """The rows, and those of the attention of layers of a kind ("local", "sparse") whose heads are others."""
    of_kind = [
        dataclasses.replace(row, ours=tuple(path.replace(A, f"layers/{kind}_attention/") for path in row.ours))
        for row in rows
        if all(path.startswith(A) for path in row.ours)
    ]
    return (*rows, *of_kind)


def renamed(rows: Rows, *pairs: tuple[str, str]) -> Rows:
    """The rows with parts of their tensors' names replaced."""
    for old, new in pairs:
        rows = tuple(dataclasses.replace(row, name=row.name.replace(old, new)) for row in rows)
    return rows


LLAMA = rows(
    [
        ("model.embed_tokens.weight", "v d", "embedding"),
        (L + "input_layernorm.weight", "d", "layers/attention_norm/scale"),
        (L + "self_attn.q_proj.weight", "nh d", A + "query"),
        (L + "self_attn.k_proj.weight", "nh d", A + "key"),
        (L + "self_attn.v_proj.weight", "nh d", A + "value"),
        (L + "self_attn.o_proj.weight", "d nh", A + "out"),
        (L + "post_attention_layernorm.weight", "d", "layers/mlp_norm/scale"),
        (L + "mlp.gate_proj.weight", "f d", M + "gate"),
        (L + "mlp.up_proj.weight", "f d", M + "up"),
        (L + "mlp.down_proj.weight", "d f", M + "down"),
        ("model.norm.weight", "d", "final_norm/scale"),
        ("lm_head.weight", "v d", "output"),
    ]
)

QWEN2 = LLAMA + rows(
    [
        (L + "self_attn.q_proj.bias", "nh", A + "query_bias"),
        (L + "self_attn.k_proj.bias", "nh", A + "key_bias"),
        (L + "self_attn.v_proj.bias", "nh", A + "value_bias"),
    ]
)
# With attention_bias, and with mlp_bias.
ATTENTION_BIASES = QWEN2[len(LLAMA) :] + rows([(L + "self_attn.o_proj.bias", "d", A + "out_bias")])
MLP_BIASES = rows(
    [
        (L + "mlp.gate_proj.bias", "f", M + "gate_bias"),
        (L + "mlp.up_proj.bias", "f", M + "up_bias"),
        (L + "mlp.down_proj.bias", "d", M + "down_bias"),
    ]
)
LLAMA_BIASED = LLAMA + ATTENTION_BIASES + MLP_BIASES

QK_NORM = rows(
    [
        (L + "self_attn.q_norm.weight", "h", A + "query_norm/scale"),
        (L + "self_attn.k_norm.weight", "h", A + "key_norm/scale"),
    ]
)
SINKS = rows([(L + "self_attn.sinks", "n", A + "sinks")])
QKV = f"{A}query {A}key {A}value"
QKV_BIAS = f"{A}query_bias {A}key_bias {A}value_bias"


class Cut(NamedTuple):
    """A tensor that a checkpoint may hold in others: rows `start` to `stop` of these, one after the other."""

    held_in: tuple[str, ...]
    start: int
    stop: int


class Constant(NamedTuple):
    """A tensor of what our model computes: its shape, and its values in a layer by number, from the values of config.json."""

    shape: Callable[[Mapping[str, Any]], Shape]
    value: Callable[[Mapping[str, Any], int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of an architecture, and their alternative names.

    Attributes:
      rows: its table.
      renamed: (pattern, replacement) that map names in other versions of a checkpoint to the table's.
      ignored: pattern of tensors that are no parameters: those that stand for one (`fixed_aliases`) and `constants` are compared;
        the rest are tables of older files (masks, position_ids, frequencies), which transformers computes and never reads.
        tests/interop/families/test_extra_tensors.py draws all of them.
      parts: pattern of tensors of parts that are not supported.
      aliases: other names of the table's tensors, of tensors that transformers ties to them.
      absent: tensors that a checkpoint may lack -> what transformers has in their place, from the values of config.json;
        with {l}: of the layers in which their module has others.
      constants: patterns of tensors that are no parameters, and that a checkpoint may have -> what they must be, for
        transformers takes them as they are.
      cuts: shapes of a checkpoint's tensors -> those that are cut elsewhere than the table has them; None: there are none.
      chosen: shapes of our parameters -> the rows, where their names depend on these; None: they do not.
      placed: (rows, shapes of our parameters, modules that some layers lack) -> the rows, with the names that tensors have in
        each layer; None: they differ by the number alone.
      mtp: the tensors of modules that predict further tokens; None: they are not supported.
      numbers: pattern of tensors of whole numbers, stored as int64 -> the key of config.json with how many there are, from 0 on.
      separate: the table of checkpoints whose experts are tensors of their own, where those of `rows` are fused.
    """

    rows: Rows
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: str = r"(?!)"
    parts: str = r"(?!)"
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Callable[[Mapping[str, Any]], np.ndarray]] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Constant] = dataclasses.field(default_factory=dict)
    cuts: Callable[[Mapping[str, Shape]], dict[str, Cut]] | None = None
    chosen: Callable[[Mapping[str, Shape]], Rows] | None = None
    placed: Callable[[Rows, Mapping[str, Shape], tree.LayersOf], Rows] | None = None
    mtp: MtpNames | None = None
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    separate: Rows = ()

    def canonical(self, name: str) -> str | None:
        """The table's name of a tensor; None: it is not used."""
        name = self.todays(name)
        return None if re.search(self.ignored, name) or re.search(self.parts, name) else name

    def of_part(self, name: str) -> bool:
        """Whether a tensor is of a part that is not supported."""
        return re.search(self.parts, self.todays(name)) is not None

    def count_of(self, name: str) -> str | None:
        """Of a tensor of whole numbers, the key of config.json with their count; None: it is another."""
        name = self.todays(name)
        return next((key for pattern, key in self.numbers.items() if re.search(pattern, name)), None)

    def todays(self, name: str) -> str:
        """The name of a tensor in today's checkpoints."""
        for pattern, replacement in _TEXT + self.renamed:
            name = re.sub(pattern, replacement, name)
        return name


BARE = (r"^(?=(?:layers|embed_tokens|norm)\.)", "model.")  # a checkpoint of the model without its head
BUFFERS = r"\.rotary_emb\.inv_freq$"  # of files of 2023: transformers computes them, and reads none
LLAMA_LIKE = ((BARE,), BUFFERS)

_EXPERT = "mlp.experts.{e}."
# The experts of Qwen2-MoE and of what has followed it.
QWEN_EXPERTS = experts("mlp.gate.weight", *(f"{_EXPERT}{name}_proj.weight" for name in ("gate", "up", "down")))
# The same beside an expert that every token meets, behind a gate.
QWEN_SHARED_EXPERTS = (
    QWEN_EXPERTS
    + shared_experts("mlp.shared_expert")
    + rows([(L + "mlp.shared_expert_gate.weight", "s d", M + "shared_switch")], EXPERTS)
)
# MLPs in the first layers, then experts with a correction of the choice beside shared ones (DeepSeek-V3).
_DENSE = (("gate_proj", "f d", "gate"), ("up_proj", "f d", "up"), ("down_proj", "d f", "down"))
FIRST_MLP = rows([(f"{L}mlp.{name}.weight", dims, f"layers/first_mlp/{ours}") for name, dims, ours in _DENSE])
DEEPSEEK_EXPERTS = (
    FIRST_MLP
    + QWEN_EXPERTS
    + shared_experts("mlp.shared_experts")
    + rows([(L + "mlp.gate.e_score_correction_bias", "e", M + "correction")], EXPERTS)
)
# Norms of the branches' outputs (OLMo 2).
OUTPUT_NORMS = rows(
    [
        (L + "post_attention_layernorm.weight", "d", "layers/attention_post_norm/scale"),
        (L + "post_feedforward_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
    ]
)
# Norms over all heads of the queries, and of the keys.
WHOLE_NORMS = rows(
    [
        (L + "self_attn.q_norm.weight", "nh", A + "query_norm/scale"),
        (L + "self_attn.k_norm.weight", "nh", A + "key_norm/scale"),
    ],
    {A + "query_norm/scale": "lnh", A + "key_norm/scale": "lnh"},
)
