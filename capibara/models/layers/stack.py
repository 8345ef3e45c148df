"""A stack of equal layers: parameters stacked along a leading `layers` axis, run by scan, recomputed by policy."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from capibara import sharding
from capibara.core import projections, tree
from capibara.core.types import Params, PyTree, UserError
from capibara.kernels.gradients import gradients_together
from capibara.models.layers import pipeline
from capibara.models.layers.layers import next_key
from capibara.models.layers.quantized_weights import Frozen
from capibara.sharding import Remat, RematPolicy

Stats = dict[str, jax.Array]  # float32 sums over tokens; for a stack, each with a leading axis of layers
_Layer = TypeVar("_Layer", bound=nnx.Module)
_Rows = TypeVar("_Rows")  # a pytree of arrays
_Kind = TypeVar("_Kind")
_Body = Callable[[jax.Array, PyTree, PyTree], tuple[jax.Array, Stats]]  # (x, a layer's parameters, rows)


class LayerLoop(enum.StrEnum):
    """How layers run: a scan over one compiled body (compile time independent of depth), or unrolled."""

    SCAN = "scan"
    UNROLL = "unroll"


def stacked(make: Callable[[nnx.Rngs], _Layer], rngs: nnx.Rngs, num_layers: int) -> _Layer:
    """A module like `make(rngs)` whose parameters have a leading axis of `num_layers`, initialised layer by layer."""
    graphdef, template = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key))))

    values = jax.vmap(init)(jax.random.split(next_key(rngs), num_layers))
    leaves = jax.tree.leaves(values)
    variables = jax.tree.leaves(template, is_leaf=lambda x: isinstance(x, nnx.Variable))
    stacked_variables = [
        nnx.Param(value, axes=("layers", *variable.axes)) for variable, value in zip(variables, leaves, strict=True)
    ]
    structure = jax.tree.structure(template, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graphdef, jax.tree.unflatten(structure, stacked_variables))


def keep_layers(module: nnx.Module, numbers: Sequence[int]) -> None:
    """Keeps the parameters of a stacked module's layers with these numbers."""
    for name, value in vars(module).items():
        if isinstance(value, nnx.Param):
            setattr(module, name, nnx.Param(value[...][jnp.asarray(numbers)], axes=value.axes))
        elif isinstance(value, nnx.Module):
            keep_layers(value, numbers)


def unstacked(values: Params, layers: tree.LayersOf) -> tuple[Params, ...]:
    """Splits stacked parameters into a tuple with one nested dict per layer; a tuple is returned unchanged.

    A program with unrolled layers reads these in place; it would copy each layer out of stacked parameters. `layers`
    tells which layers have the modules that some lack.
    """
    if isinstance(values, tuple):
        return values
    count = max([depth(values), *(numbers[-1] + 1 for numbers in layers.values())])
    pick = lambda value, rank: jax.tree.map(lambda v: v[rank], value)  # noqa: E731
    return tuple(tree.of_layer(values, number, layers, depth, pick) for number in range(count))


def depth(values: Params) -> int:
    """Number of layers in stacked parameters; some parameters may exist in the first layers only."""
    return max((leaf.shape[0] for leaf in jax.tree.leaves(values)), default=0)


def _between(values: Params, start: int, stop: int) -> Params:
    """Slices a stack from `start` to `stop`; keeps the parameters that exist in all of these layers."""
    if isinstance(values, dict):
        result = {name: _between(value, start, stop) for name, value in values.items() if stop <= depth(value)}
        return {name: value for name, value in result.items() if not isinstance(value, dict) or value}
    return jax.tree.map(lambda v: v[start:stop], values)


def _of_span(values: Params, start: int, stop: int, layers: tree.LayersOf) -> Params:
    """The parameters of the modules of layers `start` to `stop`."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        ranks = [rank for rank, n in enumerate(layers.get(name, range(stop))) if start <= n < stop]
        result |= _between({name: value}, ranks[0], ranks[-1] + 1) if ranks else {}
    return result


class _Places:
    """Where in each period of a pattern the modules of a span of layers are: each is in all periods at the same places.

    Args:
      layers: module -> numbers of layers, for those that some layers lack.
      start, stop: the span.
      period: length of the pattern.
    """

    def __init__(self, layers: tree.LayersOf, start: int, stop: int, period: int):
        self._every = tuple(range(period))
        inside = {name: [n - start for n in numbers if start <= n < stop] for name, numbers in layers.items()}
        self._some = {name: tuple(sorted({n % period for n in numbers})) for name, numbers in inside.items()}

    def grouped(self, values: PyTree, periods: int) -> PyTree:
        """Parameters of all layers -> those of the first periods, [periods, layers of each with this module, ...]."""
        return self._map(
            lambda v, places: v[: periods * len(places)].reshape(periods, len(places), *v.shape[1:]), values
        )

    def layer(self, values: PyTree, index: int) -> PyTree:
        """The parameters of the layer with this index in the span."""
        period, place = divmod(index, len(self._every))
        return self._map(lambda v, places: v[period * len(places) + places.index(place)], values, place)

    def _map(
        self, fn: Callable[[jax.Array, tuple[int, ...]], jax.Array], values: PyTree, place: int | None = None
    ) -> PyTree:
        """Applies `fn` (array, places of its module) to all, or to those of the modules that are at one place."""
        if isinstance(values, tuple):  # what is beside the parameters, and these
            return jax.tree.map(lambda v: fn(v, self._every), values[0]), self._map(fn, values[1], place)
        if not self._some:
            return jax.tree.map(lambda v: fn(v, self._every), values)
        where = {name: self._some.get(name, self._every) for name in values}
        return {
            name: jax.tree.map(lambda v: fn(v, where[name]), value)  # noqa: B023
            for name, value in values.items()
            if place is None or place in where[name]
        }


def each(layers: _Layer, values: Sequence[Params]) -> Iterator[_Layer]:
    """Yields the layers of a stacked module one by one, with the parameters from `unstacked`."""
    graphdef, state = nnx.split(layers)
    for layer in values:
        yield nnx.merge(graphdef, _as_state(state, layer))


def run(
    layers: _Layer,
    x: jax.Array,
    rows: _Rows,
    apply: Callable[Concatenate[_Layer, jax.Array, _Rows, _Kind, ...], tuple[jax.Array, Stats]],
    pattern: Sequence[_Kind],
    loop: LayerLoop,
    remat: RematPolicy,
    *,
    all_trained: bool = False,
    numbered: bool = False,
    of_layers: PyTree | None = None,
    span: tuple[int, int] | None = None,
    some: tree.LayersOf = MappingProxyType({}),
    repeats: int = 1,
) -> tuple[jax.Array, Stats]:
    """Applies the layers of a stacked module in order; as a pipeline if the active mesh has stages.

    Args:
      layers: made by `stacked`.
      x: [B, ...] input of the first layer; every layer's output has its shape.
      rows: pytree of arrays with leading axis B, passed to every layer.
      apply: (one layer's module, x, rows, its entry of the pattern) -> (x, the layer's statistics).
      pattern: what distinguishes layers besides their parameters, repeated over all layers. A scan runs over groups of
        that many layers; remaining layers run after it.
      loop, remat: scan or unroll, and what the backward pass recomputes of each layer.
      all_trained: whether every parameter gets a gradient; with adapters most get none.
      numbered: whether `apply` is also passed the layer's number.
      of_layers: pytree of arrays with an axis of layers, whose slice is also passed to `apply`; not in a pipeline.
      span: first layer to run and end of the range; `pattern` and `of_layers` start at the first one. None: all layers.
      some: the modules that some layers lack; within the span, layers at the same place of the pattern have the same.
      repeats: how often each layer is applied before the next one; layers without statistics alone have more than 1.

    Returns:
      The last layer's output, and the statistics, each with a leading axis of the layers that have it.
    """
    graphdef, state = nnx.split(layers)
    values: Params = nnx.to_pure_dict(state)
    (start, stop), group = span or (0, depth(values)), len(pattern)
    values, count = values if span is None else _of_span(values, start, stop, some), stop - start
    per_layer = jnp.arange(start, start + count, dtype=jnp.int32) if numbered else of_layers

    def body_of(kind: _Kind, in_scan: bool) -> _Body:
        def body(x: jax.Array, layer: PyTree, rows: _Rows) -> tuple[jax.Array, Stats]:
            parts, layer = ((), layer) if per_layer is None else ((layer[0],), layer[1])
            return apply(nnx.merge(graphdef, _as_state(state, layer)), x, rows, kind, *parts)

        return _repeated(_recomputed(body, remat, in_scan=in_scan or repeats > 1), repeats, numbered)

    frozen = any(isinstance(v, Frozen) for v in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable)))
    scanned, unrolled = ([body_of(kind, in_scan) for kind in pattern] for in_scan in (loop is LayerLoop.SCAN, False))
    bodies = _Bodies(scanned, unrolled, loop, frozen, all_trained, _Places(some, start, stop, group))
    each: PyTree = values if per_layer is None else (per_layer, values)
    if (shape := _active_pipeline(numbered, span is not None)) is None:
        return _in_sequence(bodies, x, each, rows, count)
    _check_stages(count, group, shape)
    size = count // (shape.stages * shape.repeats)
    stage = lambda x, values, rows: _in_sequence(bodies, x, values, rows, size)  # noqa: E731
    return pipeline.run(stage, x, rows, each, shape)


class _Bodies(NamedTuple):
    """A layer's program for each entry of the pattern, in a scan and outside of one; `places` of the modules.

    The others are as for `run`.
    """

    scanned: Sequence[_Body]
    unrolled: Sequence[_Body]
    loop: LayerLoop
    frozen: bool
    all_trained: bool
    places: _Places


def _in_sequence(bodies: _Bodies, x: jax.Array, values: PyTree, rows: PyTree, size: int) -> tuple[jax.Array, Stats]:
    """Runs the first `size` layers of `values`; layer i uses body i modulo the number of bodies."""
    scanned, group, scans = bodies.scanned, len(bodies.scanned), bodies.loop is LayerLoop.SCAN
    if bodies.frozen and group == 1 and scans:
        # What the scan saves of a layer for the backward pass is not copied if it is a slice of the scan's own input.
        return jax.lax.scan(lambda x, layer: scanned[0](x, layer, rows), x, values)
    parts: list[Stats] = []
    whole = size // group if scans else 0
    if whole:
        grouped = bodies.places.grouped(values, whole)

        def body(x: jax.Array, layers: PyTree) -> tuple[jax.Array, Stats]:
            stats = []
            for index, layer in enumerate(scanned):
                x, layer_stats = _finished(x, bodies.places.layer(layers, index), bodies.all_trained and group > 1)
                x, of_layer = layer(x, layer_stats, rows)
                stats.append(of_layer)
            return x, collected(stats, jnp.stack)

        x, stats = jax.lax.scan(body, x, grouped)
        parts.append(jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), stats))
    for index in range(whole * group, size):
        x, layer_stats = _finished(x, bodies.places.layer(values, index), bodies.all_trained)
        x, of_layer = bodies.unrolled[index % group](x, layer_stats, rows)
        parts.append(jax.tree.map(lambda s: s[None], of_layer))
    return x, collected(parts, jnp.concatenate)


def collected(stats: Sequence[Stats], join: Callable[[list[jax.Array]], jax.Array]) -> Stats:
    """The statistics of several layers, each joined over those that have it."""
    names = dict.fromkeys(name for of_layer in stats for name in of_layer)
    return {name: join([of_layer[name] for of_layer in stats if name in of_layer]) for name in names}


def _repeated(body: _Body, repeats: int, numbered: bool) -> _Body:
    """A layer that is applied so many times; if layers have numbers, it has one for each time."""
    if repeats == 1:
        return body

    def repeated(x: jax.Array, layer: PyTree, rows: PyTree) -> tuple[jax.Array, Stats]:
        def once(x: jax.Array, time: jax.Array) -> tuple[jax.Array, Stats]:
            return body(x, (layer[0] * repeats + time, layer[1]) if numbered else layer, rows)

        return jax.lax.scan(once, x, jnp.arange(repeats, dtype=jnp.int32))

    return repeated


def _finished(x: jax.Array, values: PyTree, ties: bool) -> tuple[jax.Array, PyTree]:
    """A layer's input and parameters, whose gradients are all computed before the backward pass enters the layer before.

    A scan's body ends there by itself; of layers that follow each other in a program the TPU's scheduler would postpone
    small gradients (norms, queries) and keep the operands of every layer alive.
    """
    if not ties:  # what is not trained would get gradients of zeros
        return x, values
    leaves, structure = jax.tree.flatten(values)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    x, *tied = gradients_together(x, *(leaf for leaf, tie in zip(leaves, is_float, strict=True) if tie))
    rest = iter(tied)
    return x, jax.tree.unflatten(
        structure, [next(rest) if tie else leaf for leaf, tie in zip(leaves, is_float, strict=True)]
    )


def _active_pipeline(numbered: bool, in_part: bool) -> sharding.Pipeline | None:
    if in_part and sharding.active_pipeline() is not None:
        raise UserError(
            "Plan.stage is above 1, and the model's layers differ in their modules: set Plan.stage to 1, and share out by "
            "fsdp, tensor or context"
        )
    if numbered and sharding.active_pipeline() is not None:
        raise UserError(
            "Plan.stage is above 1, and pipelines have no dropout, no mixer whose layers differ and no streaming heads: set "
            "dropout_rate to 0, and with @Lightning() or @StreamingHeads() Plan.stage to 1"
        )
    return sharding.active_pipeline()


def _check_stages(count: int, group: int, shape: sharding.Pipeline) -> None:
    parts = shape.stages * shape.repeats
    if count % (parts * group):
        pattern = f" with a layer pattern of {group}" if group > 1 else ""
        raise UserError(
            f"num_layers ({count}){pattern} must be a multiple of {parts * group}: Plan.stage ({shape.stages}) x "
            f"Plan.pipeline_repeats ({shape.repeats}){' x pattern' if group > 1 else ''}: "
            f"try {max(1, round(count / (parts * group))) * parts * group} layers or fewer stages"
        )


def _recomputed(body: _Body, remat: RematPolicy, *, in_scan: bool) -> _Body:
    policies = jax.checkpoint_policies
    match remat.kind:
        case Remat.NONE:
            return body
        case Remat.FULL:
            policy = None
        case Remat.DOTS:
            policy = policies.dots_with_no_batch_dims_saveable
        case Remat.MINIMAL:
            policy = policies.save_only_these_names(*projections.RESULTS)
        case Remat.SAVE:
            policy = policies.save_only_these_names(*remat.names)
        case Remat.OFFLOAD:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(remat.names),
                offload_src="device",
                offload_dst="pinned_host",
            )

    def named(x: jax.Array, layer: PyTree, rows: PyTree) -> tuple[jax.Array, Stats]:
        return body(checkpoint_name(x, projections.LAYER_INPUT), layer, rows)

    # Where both passes of a layer are in one computation, XLA would find that it recomputes what it has, and keep it.
    return jax.checkpoint(named, prevent_cse=not in_scan, policy=policy)


def _as_state(template: nnx.State, values: Params) -> nnx.State:
    """The template's variables with these values, a pure nested dict of the same structure."""
    state = jax.tree.map(lambda v: v, template)
    nnx.replace_by_pure_dict(state, dict(values))
    return state
