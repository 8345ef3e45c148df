"""Declares each weight matrix of a layer once: axes, the input it shares, its result's name, LoRA and quantization.

Layers make their weights from these declarations and name their results by them. Rematerialization policies, the planner,
LoRA, quantization and the tables of checkpoints' names read them from here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

Axes = tuple[str | None, ...]

_STACKED = ("layers", "experts")  # leading axes along which independent weights are stacked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """A weight that a layer's activations are multiplied with.

    Attributes:
      part: the module of the layer that has it ("attention", "mlp"); experts are in "mlp", too.
      name: its parameter in that module.
      axes: logical axis of each dimension, without that of stacked layers; None: never sharded.
      reads: the projection of its module that reads the same inputs; by default itself.
      result: what its result is called in Plan.remat_names; None: it has no name.
      needed: whether a backward pass reads its result, so that it is worth keeping.
      adaptable: whether it may have a LoRA adapter, and a frozen base stores it in Lora.base_dtype.
      quantizable: whether `quantize` rounds it (AWQ, GPTQ, round to nearest).
    """

    part: str
    name: str
    axes: Axes
    reads: str = ""
    result: str | None = None
    needed: bool = True
    adaptable: bool = True
    quantizable: bool = False

    @property
    def path(self) -> str:
        """Its name in the layer: "attention/query"."""
        return f"{self.part}/{self.name}"

    @property
    def reads_as(self) -> str:
        """The path of the projection whose inputs these are: "attention/query" for "attention/key"."""
        return f"{self.part}/{self.reads or self.name}"

    @property
    def in_axes(self) -> Axes:
        """The axes that a product with it contracts."""
        start = stack_dims(self.axes)
        return self.axes[start : start + in_dims(self.axes)]

    @functools.cached_property  # a search of plans asks a hundred thousand times
    def out_axes(self) -> Axes:
        """The axes of its result."""
        return self.axes[stack_dims(self.axes) + in_dims(self.axes) :]

    @property
    def contracted(self) -> tuple[int, ...]:
        """The dimensions that a product with it contracts."""
        start = stack_dims(self.axes)
        return tuple(range(start, start + in_dims(self.axes)))

    def size(self, sizes: Mapping[str, float]) -> float:
        """Parameters of one layer, from the size of each logical axis."""
        return product(self.axes, sizes)


def stack_dims(axes: Axes) -> int:
    """Leading dimensions along which independent weights are stacked."""
    return next((index for index, name in enumerate(axes) if name not in _STACKED), len(axes))


def in_dims(axes: Axes) -> int:
    """Dimensions that a product contracts, after those along which weights are stacked: heads and their features, or one."""
    return 2 if axes[stack_dims(axes)] == "heads" else 1


def product(axes: Iterable[str | None], sizes: Mapping[str, float]) -> float:
    """The product of the axes' sizes."""
    total = 1.0
    for axis in axes:
        assert axis is not None
        total *= sizes[axis]
    return total


def _attention(name: str, axes: Axes, result: str, reads: str = "") -> Projection:
    return Projection(part="attention", name=name, axes=axes, result=result, reads=reads, quantizable=True)


QUERY = _attention("query", ("embed", "heads", "head_dim"), "query")
KEY = _attention("key", ("embed", "kv_heads", "head_dim"), "key", reads="query")
VALUE = _attention("value", ("embed", "kv_heads", "head_dim"), "value", reads="query")
OUT = _attention("out", ("heads", "head_dim", "embed"), "attention_out")

# Factors of attention's results, before the output projection (AFMoE, Qwen3-Next).
ATTENTION_GATE = Projection(part="attention", name="gate", axes=QUERY.axes, reads="query")
# One factor for each head (LFM3, Laguna).
HEAD_GATE = dataclasses.replace(ATTENTION_GATE, name="head_gate", axes=("embed", "heads"))

# Of disentangled attention: keys and queries of distances. They read embeddings that all layers share.
POSITION_KEY = Projection(part="attention", name="position_key", axes=QUERY.axes)
POSITION_QUERY = dataclasses.replace(POSITION_KEY, name="position_query", reads="position_key")

# Of latent attention. What expands latents is no matrix that adapters know: generation applies it to queries and results.
QUERY_DOWN = Projection(part="attention", name="query_down", axes=("embed", None))
QUERY_UP = Projection(part="attention", name="query_up", axes=("latent", "heads", "head_dim"))
KV_DOWN = dataclasses.replace(QUERY_DOWN, name="kv_down", reads="query_down")
KEY_ROTARY = dataclasses.replace(QUERY_DOWN, name="key_rotary", reads="query_down")
KEY_UP = dataclasses.replace(QUERY_UP, name="key_up", adaptable=False)
VALUE_UP = dataclasses.replace(KEY_UP, name="value_up", reads="key_up")

# Of the gate of attention's results that is computed from latents (A.X-K2).
LATENT_GATE = dataclasses.replace(QUERY_UP, name="gate_up", reads="query_up")
# Of the gates of norms.
NORM_DOWN = Projection(part="attention_norm", name="norm_down", axes=("embed", None), adaptable=False)
NORM_UP = dataclasses.replace(NORM_DOWN, name="norm_up", axes=(None, "embed"))

# Of DeepSeek sparse attention: they choose keys, which has no gradient.
INDEX_QUERY = Projection(part="attention", name="index_query", axes=("latent", None, None), adaptable=False)
INDEX_KEY, INDEX_WEIGHT = (
    Projection(part="attention", name=name, axes=("embed", None), reads="query_down", adaptable=False)
    for name in ("index_key", "index_weight")
)

# Of attention to entries that stand for windows of tokens (DeepSeek-V4): what entries are summed of, and with what weights; those
# by which an indexer chooses entries. And what the results of a group of heads are projected by.
ENTRY_KEY, ENTRY_GATE = (
    Projection(part="attention", name=name, axes=("embed", None), reads="query_down")
    for name in ("entry_key", "entry_gate")
)
INDEX_GATE = dataclasses.replace(INDEX_KEY, name="index_gate")
GROUP_OUT = Projection(part="attention", name="group_out", axes=("heads", "head_dim", None), adaptable=False)

# Of block-sparse attention: they choose blocks of keys.
BLOCK_QUERY = Projection(
    part="attention", name="block_query", axes=("embed", None, None), reads="query", adaptable=False
)
BLOCK_KEY = dataclasses.replace(BLOCK_QUERY, name="block_key", axes=("embed", None))

UP = Projection(part="mlp", name="up", axes=("embed", "mlp"), result="mlp_up", quantizable=True)
GATE = dataclasses.replace(UP, name="gate", reads="up", result="mlp_gate")
# The last product of a layer: the backward pass does not read its result again.
DOWN = dataclasses.replace(UP, name="down", axes=("mlp", "embed"), result="mlp_down", needed=False)

_INTO_EXPERTS = ("experts", "expert_embed", "mlp")
EXPERT_UP = Projection(part="mlp", name="up", axes=_INTO_EXPERTS, result="expert_up")
EXPERT_GATE = dataclasses.replace(EXPERT_UP, name="gate", reads="up", result="expert_gate")
# As of `down`: on TPU gates are factors of its inputs, so that their gradients do not read its result.
EXPERT_DOWN = dataclasses.replace(
    EXPERT_UP, name="down", axes=("experts", "mlp", "expert_embed"), result="expert_down", needed=False
)

SHARED_UP = Projection(part="mlp", name="shared_up", axes=("embed", "mlp"))
SHARED_GATE = dataclasses.replace(SHARED_UP, name="shared_gate", reads="shared_up")
SHARED_DOWN = dataclasses.replace(SHARED_UP, name="shared_down", axes=("mlp", "embed"))

LAUREL_LEFT = Projection(part="laurel", name="left", axes=("embed", None))
LAUREL_RIGHT = Projection(part="laurel", name="right", axes=(None, "embed"))
INPUT_GATE = Projection(part="per_layer", name="input_gate", axes=("embed", None))
PER_LAYER = Projection(part="per_layer", name="projection", axes=(None, "embed"))

# Of mixers: a gated convolution; Gated DeltaNet, whose heads of keys have their values beside each other; Mamba 2.
CONV_IN = Projection(part="mixer", name="before", axes=("embed", "mlp"))
CONV_GATE = dataclasses.replace(CONV_IN, name="gate", reads="before")
CONV_VALUE = dataclasses.replace(CONV_IN, name="value", reads="before")
CONV_OUT = dataclasses.replace(CONV_IN, name="out", axes=("mlp", "embed"))
DELTA_QUERY = Projection(part="mixer", name="query", axes=KEY.axes)
DELTA_KEY, DELTA_VALUE, DELTA_GATE = (
    dataclasses.replace(DELTA_QUERY, name=name, reads="query") for name in ("key", "value", "gate")
)
DELTA_STRENGTH, DELTA_DECAY = (
    dataclasses.replace(DELTA_QUERY, name=name, reads="query", axes=("embed", "kv_heads", None))
    for name in ("strength", "decay")
)
# Of Kimi Delta Attention: decays and gates of every channel, through few dimensions.
KIMI_DECAY_DOWN, KIMI_GATE_DOWN = (
    dataclasses.replace(DELTA_QUERY, name=f"{name}_down", reads="query", axes=("embed", None))
    for name in ("decay", "gate")
)
KIMI_DECAY_UP, KIMI_GATE_UP = (
    Projection(part="mixer", name=f"{name}_up", axes=("latent", "kv_heads", "head_dim")) for name in ("decay", "gate")
)
DELTA_OUT = Projection(part="mixer", name="out", axes=("heads", "head_dim", "embed"))
MAMBA_GATE = Projection(part="mixer", name="gate", axes=QUERY.axes)
MAMBA_VALUE = dataclasses.replace(MAMBA_GATE, name="value", reads="gate")
MAMBA_KEY, MAMBA_QUERY = (dataclasses.replace(MAMBA_VALUE, name=name, axes=KEY.axes) for name in ("key", "query"))
MAMBA_STEP = dataclasses.replace(MAMBA_VALUE, name="step", axes=("embed", "heads", None))
MAMBA_OUT = DELTA_OUT
# Of lightning attention, all of whose heads have keys of their own.
LIGHTNING_QUERY = Projection(part="mixer", name="query", axes=QUERY.axes)
LIGHTNING_KEY, LIGHTNING_VALUE, LIGHTNING_GATE = (
    dataclasses.replace(LIGHTNING_QUERY, name=name, reads="query") for name in ("key", "value", "gate")
)
LIGHTNING_OUT = DELTA_OUT
# Of Mamba, a state space for each channel: steps, keys and queries are projected from the channels.
SSM_GATE = Projection(part="mixer", name="gate", axes=("embed", "mlp"))
SSM_VALUE = dataclasses.replace(SSM_GATE, name="value", reads="gate")
SSM_STEP_DOWN = Projection(part="mixer", name="step_down", axes=("mlp", None))
SSM_KEY, SSM_QUERY = (dataclasses.replace(SSM_STEP_DOWN, name=name, reads="step_down") for name in ("key", "query"))
SSM_STEP_UP = Projection(part="mixer", name="step_up", axes=(None, "mlp"))
SSM_OUT = CONV_OUT
# Of RWKV-4: each reads another mixture of a token and the one before.
RWKV_KEY, RWKV_VALUE, RWKV_GATE = (
    Projection(part="mixer", name=name, axes=("embed", "mlp")) for name in ("key", "value", "receptance")
)
RWKV_OUT = CONV_OUT
CHANNEL_GATE = Projection(part="mlp", name="receptance", axes=("embed", None))
# What a layer of Zamba2 adds to the projections of a block that several layers share, and what reads the block's results. `up`
# and `gate` have one product with the input.
SHARED_ADAPTED = (QUERY, KEY, VALUE, UP, GATE)
SHARED_INTO = {
    of: Projection(
        part="shared_input", name=f"{of.reads if of is GATE else of.name}_down", axes=("embed", None), adaptable=False
    )
    for of in SHARED_ADAPTED
}
SHARED_FROM = {
    of: Projection(part="shared_input", name=f"{of.name}_up", axes=(None, *of.out_axes), adaptable=False)
    for of in SHARED_ADAPTED
}
SHARED_RESULT = Projection(part="shared_input", name="projection", axes=("embed", None))

ATTENTION = (QUERY, KEY, VALUE, OUT)
MLP = (UP, GATE, DOWN)
EXPERTS = (EXPERT_UP, EXPERT_GATE, EXPERT_DOWN)
SHARED = (SHARED_UP, SHARED_GATE, SHARED_DOWN)  # experts that every token meets
INDEX = (INDEX_QUERY, INDEX_KEY, INDEX_WEIGHT, INDEX_GATE, BLOCK_QUERY, BLOCK_KEY)
ENTRIES = (ENTRY_KEY, ENTRY_GATE, GROUP_OUT)
LATENT = (QUERY_DOWN, QUERY_UP, KV_DOWN, KEY_ROTARY, KEY_UP, VALUE_UP, LATENT_GATE)
NORM_GATES = (NORM_DOWN, NORM_UP)
GEMMA3N = (LAUREL_LEFT, LAUREL_RIGHT, INPUT_GATE, PER_LAYER)
CONV = (CONV_IN, CONV_GATE, CONV_VALUE, CONV_OUT)
DELTA = (DELTA_QUERY, DELTA_KEY, DELTA_VALUE, DELTA_GATE, DELTA_STRENGTH, DELTA_DECAY, DELTA_OUT)
KIMI = (KIMI_DECAY_DOWN, KIMI_DECAY_UP, KIMI_GATE_DOWN, KIMI_GATE_UP)
MAMBA_CONVOLVED = (MAMBA_VALUE, MAMBA_KEY, MAMBA_QUERY)
MAMBA = (MAMBA_GATE, *MAMBA_CONVOLVED, MAMBA_STEP)
LIGHTNING = (LIGHTNING_QUERY, LIGHTNING_KEY, LIGHTNING_VALUE)
RWKV = (RWKV_KEY, RWKV_VALUE, RWKV_GATE)
SSM_NORMED = (SSM_STEP_DOWN, SSM_KEY, SSM_QUERY)
SSM = (SSM_GATE, SSM_VALUE, *SSM_NORMED, SSM_STEP_UP)
POSITIONS = (POSITION_KEY, POSITION_QUERY)
ALL = (
    ATTENTION
    + (ATTENTION_GATE, HEAD_GATE)
    + POSITIONS
    + MLP
    + EXPERTS
    + SHARED
    + LATENT
    + INDEX
    + ENTRIES
    + NORM_GATES
    + GEMMA3N
    + CONV
    + DELTA
    + KIMI
    + MAMBA
    + LIGHTNING
    + SSM
    + (*RWKV, CHANNEL_GATE)
    + (*SHARED_INTO.values(), *SHARED_FROM.values(), SHARED_RESULT)
)

QUANTIZABLE = tuple(projection for projection in ALL if projection.quantizable)
ADAPTABLE = tuple(dict.fromkeys(projection.name for projection in ALL if projection.adaptable))  # names of parameters

# Names of results in Plan.remat_names. Attention itself is no projection; its result lies between the values and `out`.
QKV = tuple(projection.result for projection in (QUERY, KEY, VALUE) if projection.result)
# A layer's input has no weights: it is what the residual stream brings.
ATTENDED = "attention"
LAYER_INPUT = "layer_input"
RESULTS = tuple(projection.result for projection in ALL if projection.result)
NEEDED = tuple(projection.result for projection in ALL if projection.result and projection.needed)


def of_layer(*, gated: bool, experts: bool) -> tuple[Projection, ...]:
    """The projections of a layer of self-attention and an MLP, or experts in its place; `gated`: the MLP has a gate."""
    return ATTENTION + tuple(item for item in (EXPERTS if experts else MLP) if gated or item.name != "gate")


def readers(path: str) -> tuple[str, ...]:
    """Names of the quantizable projections that read the same inputs as this one ("attention/query"), itself among them."""
    return tuple(item.name for item in QUANTIZABLE if item.reads_as == path)
