"""A train step as numbers: all that the cost of a plan depends on besides the plan and the chips."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from capibara import optim
from capibara.core import projections, tree
from capibara.core.types import Dataclass, PyTree, UserError
from capibara.data.dataset import Dataset
from capibara.models import api
from capibara.models.api import EncoderConfig, EncoderDecoderConfig, Model, TransformerConfig
from capibara.objectives.loss import Loss, ResidentArrays
from capibara.optim import OptimizerConfig, StateDtype
from capibara.planner.hardware import tiling
from capibara.planner.hardware.chips import Chip
from capibara.sharding import Plan, Rules

# Components of quantized weights: dequantized where they are used, never all at once.
_OF_BLOCKS = ("/codes", "/scales", "/means", "/steps")
_COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class TrainingMethod(Protocol):
    """A run's training method: a training.methods.method.Method.

    Attributes:
      unplanned: why a search does not know what its step needs; None: it does.
      program: what of it decides the compiled step, by name.
    """

    @property
    def unplanned(self) -> str | None: ...
    @property
    def program(self) -> dict[str, str]: ...


class Run(Dataclass, Protocol):
    """A training run as the planner sees it: a training.trainer.Trainer, which this room does not import.

    Attributes:
      model, plan, dataset, optimizer, loss, training_method: the parts that decide the compiled step and what is held beside it.
      steps, ema_decay, z_loss, label_smoothing, loss_normalization, loss_scaling: as in Trainer.
      batch_spec: shape and dtype of every array that a step reads.
    """

    @property
    def model(self) -> TransformerConfig: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def dataset(self) -> Dataset: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def loss(self) -> Loss | None: ...
    @property
    def training_method(self) -> TrainingMethod: ...
    @property
    def steps(self) -> int: ...
    @property
    def ema_decay(self) -> float | None: ...
    @property
    def z_loss(self) -> float: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def loss_normalization(self) -> str | float: ...
    @property
    def loss_scaling(self) -> object: ...

    @property
    def batch_spec(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]: ...


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the state: name, shape, logical axes and bytes per element."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    itemsize: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Part(NamedTuple):
    """An amount that some mesh axes divide.

    Attributes:
      amount: of all devices.
      axes: the mesh axes.
      dims: of bytes, the arrays' dimensions, each with the mesh axes that divide it.
    """

    amount: float
    axes: tuple[str, ...]
    dims: tuple[tuple[int, tuple[str, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An amount, by the mesh axes that divide it.

    Attributes:
      parts: what it is the sum of.
    """

    parts: tuple[Part, ...] = ()

    def __add__(self, other: Sharded) -> Sharded:
        return Sharded(self.parts + other.parts)

    def scaled_to(self, total: float) -> Sharded:
        """The same division of another total."""
        return Sharded(tuple(part._replace(amount=part.amount * total / self.total()) for part in self.parts))

    def total(self) -> float:
        return sum(part.amount for part in self.parts)

    def on_device(self, mesh: Mapping[str, int], without: Iterable[str] = ()) -> float:
        """The share of one device of a mesh (axis -> size); axes in `without` do not divide it."""
        total = 0.0
        for part in self.parts:  # plain loops: a search calls this hundreds of thousands of times
            shards = 1
            for axis in part.axes:
                if axis not in without:
                    shards *= mesh[axis]
            total += part.amount / shards
        return total

    def in_memory(self, mesh: Mapping[str, int], chip: Chip) -> float:
        """The bytes that `on_device` takes there, which are more if a TPU pads the arrays to whole tiles."""
        if not chip.is_tpu:
            return self.on_device(mesh)
        sizes = tuple(mesh.values())
        if sizes not in self._tiled:
            self._tiled[sizes] = sum(_tiled_bytes(part, mesh) for part in self.parts)
        return self._tiled[sizes]

    @functools.cached_property  # by sizes of mesh axes; a search asks for many rows and policies of each mesh
    def _tiled(self) -> dict[tuple[int, ...], float]:
        return {}


def _tiled_bytes(part: Part, mesh: Mapping[str, int]) -> float:
    shape = tuple(-(-size // math.prod(mesh[axis] for axis in axes)) for size, axes in part.dims)
    return part.amount / math.prod(mesh[axis] for axis in part.axes) * tiling.padding(shape)


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention of a layer.

    Attributes:
      seen_keys: keys that a query sees, averaged over a row.
      scores: scores per head and row that are materialised because no kernel supports them (relative positions); or 0.
    """

    seen_keys: float
    scores: float = 0.0


@dataclasses.dataclass(frozen=True)
class Stack:
    """Equal layers, one after another.

    Attributes:
      name: "decoder", "encoder" or "mtp" (modules that predict further tokens).
      layers: number of layers.
      length: tokens of a row that pass through them.
      attentions: of one layer, averaged over the layers if they differ.
      weights: matmul weights of all layers, in elements, as often as a token passes them; those of experts are in `expert_weights`.
      expert_weights: the same for experts.
      adapted_experts: number of a layer's expert weights that have adapters.
    """

    name: str
    layers: int
    length: int
    attentions: tuple[Attention, ...]
    weights: Sharded
    expert_weights: Sharded
    adapted_experts: int = 0


@dataclasses.dataclass(frozen=True)
class Workload:
    """A train step without its plan.

    Attributes:
      model: the model; its config has the widths.
      rules: logical axes -> mesh axes.
      stacks: its layers.
      length: counted tokens of a row.
      encoder_length: tokens that an encoder reads; None without one.
      params, state: bytes of the parameters, and of the optimizer's state.
      trained: bytes of the trained parameters, and of their gradients.
      casts: bytes of the parameters that are stored in float32.
      relaid: bytes of frozen attention weights in 16 bits, which XLA copies to the layout of its products. It copies
        float32 ones when it casts them; quantized ones are small.
      head: elements of the output head.
      constraints: (parameter, logical axis, size, mesh axes): the mesh axes must divide the size.
      ema: whether the state has a moving average of the parameters.
      held: bytes that training holds beside the state: reference and engine, if it learns from rewards.
      optimizer: the class of the optimizer's configuration, as Gin names it.
    """

    model: Model
    rules: Rules
    stacks: tuple[Stack, ...]
    length: int
    encoder_length: int | None
    params: Sharded
    state: Mapping[StateDtype, Sharded]
    trained: Sharded
    casts: Sharded
    relaid: Sharded
    head: Sharded
    constraints: tuple[tuple[str, str, int, tuple[str, ...]], ...]
    ema: bool
    held: Sharded = Sharded()
    optimizer: str = "Optimizer"

    @functools.cached_property
    def config(self) -> TransformerConfig:
        return self.model.config

    @functools.cached_property
    def compute_bytes(self) -> int:
        """Bytes per element of activations."""
        return _COMPUTE_BYTES[str(self.config.dtype)]

    @functools.cached_property
    def model_flops_per_token(self) -> float:
        """6 per weight, and attention, without recomputation (models/flops.py)."""
        return self.model.flops_per_token(self.length, self.encoder_length)

    @property
    def active_weights(self) -> float:
        """Matmul weights of all layers that a token uses, without embedding and head."""
        moe = self.config.moe
        share = 1.0 if moe is None else moe.top_k / moe.num_experts
        return sum(stack.weights.total() + share * stack.expert_weights.total() for stack in self.stacks)

    @functools.cached_property
    def layer_weights(self) -> dict[str, float]:
        """Weights of one layer by the name of their result; for experts those that a token uses."""
        c = self.config
        sizes = {"embed": c.embed_dim, "expert_embed": c.embed_dim, "mlp": self.expert_dim, "head_dim": c.head_size}
        sizes |= {"heads": c.num_heads, "kv_heads": c.kv_heads, "experts": 1 if c.moe is None else c.moe.top_k}
        layer = projections.of_layer(gated=c.activation.gated, experts=c.moe is not None)
        return {item.result: item.size(sizes) for item in layer if item.result}

    @property
    def expert_dim(self) -> int:
        """Hidden width of one MLP, or of one expert."""
        moe = self.config.moe
        return self.config.mlp_dim if moe is None or moe.expert_dim is None else moe.expert_dim


def describe(
    model: Model,
    optimizer: OptimizerConfig,
    *,
    length: int,
    encoder_length: int | None = None,
    rules: Rules | None = None,
    ema: bool = False,
    state_dtypes: Iterable[StateDtype] | None = None,
    held: Iterable[ResidentArrays] = (),
) -> Workload:
    """The workload of training a model. Computes only shapes.

    Args:
      model: models.api.build(config).
      optimizer: of the run.
      length: tokens of a row.
      encoder_length: tokens of an encoder's row.
      rules: logical axes -> mesh axes; None: the default ones.
      ema: whether a moving average of the parameters is kept.
      state_dtypes: dtypes of the optimizer's state to consider; None: the optimizer's own.
      held: what the run's loss holds beside the state (objectives.loss.ResidentArrays).
    """
    held = tuple(held)
    rules = rules or Rules()
    leaves, stored = _leaves(model.whole_params, model.whole_axes), _leaves(model.abstract_params, model.axes)
    trained = _leaves(model.trained(model.abstract_params), model.trained(model.axes))
    dtypes = tuple(state_dtypes or (optimizer.state_dtype,))
    try:
        optimizers = {dtype: optimizer.with_state_dtype(dtype) for dtype in dtypes}
    except UserError as error:
        raise UserError(f"--state_dtypes={','.join(map(str, dtypes))} {error}: leave it out") from None
    in_layers = ("layers/", "encoder/layers/", "decoder/layers/", "per_layer_embedding")
    heads = [leaf for leaf in leaves if "vocab" in leaf.axes and not leaf.name.startswith(in_layers)]
    return Workload(
        model=model,
        rules=rules,
        stacks=tuple(_stacks(model.config, leaves, rules, length, encoder_length)),
        length=length,
        encoder_length=encoder_length,
        params=_sharded(stored, rules, by_bytes=True),
        state={dtype: _state(model, item, rules) for dtype, item in optimizers.items()},
        optimizer=type(optimizer).__name__,
        trained=_sharded(trained, rules, by_bytes=True),
        casts=_sharded(
            [x for x in stored if x.itemsize == 4 and not x.name.endswith(_OF_BLOCKS)], rules, by_bytes=True
        ),
        relaid=_sharded([x for x in stored if _is_relaid(model, x)], rules, by_bytes=True),
        head=_sharded(heads[-1:], rules),
        constraints=_constraints(stored, rules),
        ema=ema,
        held=_held(held, rules),
    )


def check_one_model(plan: Plan) -> None:
    """Raises UserError if a search would have to lay out several models: it knows one."""
    if plan.node > 1:
        raise UserError(
            f"Plan.node is {plan.node}, must be 1 for a search: plan one node's model on its share of the chips "
            "(--gin.Plan.node=1), or set the axes of the mesh (Plan.fsdp, ...) and ask `capibara prove`"
        )


def check_ordinary(run: Run) -> None:
    """Raises UserError if a search would not know what the run's step needs."""
    of_loss = None if run.loss is None else run.loss.unplanned
    for why in (run.training_method.unplanned, run.model.unplanned, of_loss):
        if why is not None:
            raise UserError(why)


def of_run(run: Run, state_dtypes: Iterable[StateDtype] | None = None) -> Workload:
    """The workload of a run; its plan's mesh and batch are ignored.

    `state_dtypes`: dtypes of the optimizer's state to consider; None: the run's own.
    """
    model = api.build(run.model)
    return describe(
        model,
        run.optimizer,
        length=run.dataset.length,
        encoder_length=run.dataset.encoder_length,
        rules=run.plan.rules,
        ema=run.ema_decay is not None,
        state_dtypes=state_dtypes,
        held=() if run.loss is None else run.loss.resident_arrays(model, run.dataset),
    )


def training_devices(run: Run, slice_devices: int) -> int:
    """How many of a slice's devices train."""
    return slice_devices if run.loss is None else run.loss.training_devices(slice_devices)


def _held(held: Iterable[ResidentArrays], rules: Rules) -> Sharded:
    total = Sharded()
    for item in held:
        if item.spread_as is None:
            total += Sharded((Part(float(item.bytes), ()),))
        else:
            total += _sharded(_leaves(*item.spread_as), rules, by_bytes=True).scaled_to(item.bytes)
    return total


def _leaves(shapes: PyTree, axes: PyTree) -> list[Leaf]:
    names = tree.path_names(shapes)
    parts = zip(names, jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=tree.is_axes), strict=True)
    return [Leaf(name, tuple(leaf.shape), tuple(a), leaf.dtype.itemsize) for name, leaf, a in parts]


def _is_relaid(model: Model, leaf: Leaf) -> bool:
    by_heads = leaf.axes[:1] == ("layers",) and {"heads", "kv_heads"} & set(leaf.axes)
    lora = model.config.lora
    return bool(by_heads) and leaf.itemsize == 2 and lora is not None and not lora.trains(leaf.name)


def _state(model: Model, optimizer: OptimizerConfig, rules: Rules) -> Sharded:
    trained, trained_axes = model.trained(model.abstract_params), model.trained(model.axes)
    tx = optimizer.transformation(1_000_000, trained_axes)
    shapes = jax.eval_shape(tx.init, trained)
    axes = jax.tree.map(lambda _, a: _Axes(a), shapes, optim.state_axes(tx, trained, trained_axes))
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(axes), strict=True)
    leaves = [Leaf("", tuple(leaf.shape), tuple(a.names), leaf.dtype.itemsize) for leaf, a in pairs]
    return _sharded(leaves, rules, by_bytes=True)


@dataclasses.dataclass(frozen=True)
class _Axes:
    """Keeps a tuple of names one leaf."""

    names: tuple[str | None, ...]


def _sharded(leaves: Iterable[Leaf], rules: Rules, *, by_bytes: bool = False) -> Sharded:
    sums: Counter[tuple[tuple[str, ...], tuple[tuple[int, tuple[str, ...]], ...]]] = Counter()
    for leaf in leaves:
        of_dims = [tuple(getattr(rules, name)) if name else () for name in leaf.axes]
        dims = tuple(zip(leaf.shape, of_dims, strict=True)) if by_bytes else ()
        sums[tuple(sorted(itertools.chain(*of_dims))), dims] += leaf.size * (leaf.itemsize if by_bytes else 1)
    return Sharded(tuple(Part(float(amount), *key) for key, amount in sums.items()))


def _constraints(leaves: Iterable[Leaf], rules: Rules) -> tuple[tuple[str, str, int, tuple[str, ...]], ...]:
    result: dict[tuple[str, int], tuple[str, str, int, tuple[str, ...]]] = {}
    for leaf in leaves:
        for name, size in zip(leaf.axes, leaf.shape, strict=True):
            if name and getattr(rules, name):
                result.setdefault((name, size), (leaf.name, name, size, getattr(rules, name)))
    return tuple(result.values())


def _stacks(
    sizes: TransformerConfig, leaves: list[Leaf], rules: Rules, length: int, encoder_length: int | None
) -> Iterable[Stack]:
    def stack(name: str, prefix: str, layers: int, length: int, attentions: tuple[Attention, ...]) -> Stack:
        part_leaves = [leaf for leaf in leaves if leaf.name.startswith(prefix)]
        experts = [leaf for leaf in part_leaves if "experts" in leaf.axes]
        others = [leaf for leaf in part_leaves if "experts" not in leaf.axes]
        adapted = sum(leaf.name.endswith("_lora/a") for leaf in experts)
        return Stack(name, layers, length, attentions, _sharded(others, rules), _sharded(experts, rules), adapted)

    match sizes:
        case EncoderDecoderConfig():
            S, biased = encoder_length or length, sizes.positions.biases
            yield stack("encoder", "encoder/layers/", sizes.encoder_layers, S, (Attention(S, S * S * biased),))
            seen = _seen_keys(sizes.windows, length)
            cross = (Attention(seen, length * length * biased), Attention(S))
            yield stack("decoder", "decoder/layers/", sizes.num_layers, length, cross)
        case EncoderConfig():
            once = stack(
                "encoder",
                "layers/",
                sizes.depth,
                length,
                (Attention(length, 0.0 if sizes.disentangled is None else length**2),),
            )
            total = once.weights.total() * sizes.depth / sizes.num_layers
            yield dataclasses.replace(once, weights=once.weights.scaled_to(total))
        case _:
            decoder = stack(
                "decoder", "layers/", sizes.num_layers, length, (Attention(_seen_keys(sizes.windows, length)),)
            )
            for name in sizes.shared_modules:
                shared = _sharded([leaf for leaf in leaves if leaf.name.startswith(f"{name}/")], rules)
                decoder = dataclasses.replace(
                    decoder, weights=decoder.weights + shared.scaled_to(shared.total() * sizes.passes(f"{name}/"))
                )
            yield decoder
            if windows := sizes.mtp_windows:
                yield stack("mtp", f"{api.MTP}/", len(windows), length, (Attention(_seen_keys(windows, length)),))


def _seen_keys(of_layers: Sequence[int | None], length: int) -> float:
    """Keys that a token of a decoder sees, averaged over its row and over layers with these windows."""
    windows = [length if window is None else min(window, length) for window in of_layers]
    return sum(window - window**2 / (2 * length) for window in windows) / len(windows)
