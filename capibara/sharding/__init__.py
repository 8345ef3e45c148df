"""Sharding: the plan, the mesh, and the rules that map logical axes to mesh axes.

Parameters and activations have logical axis names; model code never names a mesh axis. `Rules` maps one to the other.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from capibara.config import configurable
from capibara.core import projections, tree
from capibara.core.fields import chosen, did_you_mean, unset
from capibara.core.projections import Axes
from capibara.core.types import AUTO, Auto, Batch, PyTree, UserError

# From outermost to innermost: the axes that communicate most get neighbouring chips.
MESH_AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")
# Outside of them, in meshes of several nodes only: replicas that train apart. No rule maps a parameter to it.
NODE_AXIS = "node"
ActiveMesh = Mesh | AbstractMesh  # abstract in the program of one of several nodes; see `active`


class Remat(enum.StrEnum):
    """What the backward pass recomputes of each layer.

    none: nothing. dots: all but matmul results. minimal: all but the results of projections, that is attention and
    elementwise operations. save: all but the results named in Plan.remat_names. offload: the same, with the named
    results kept in host memory. full: everything, from the layer's input.
    """

    NONE = "none"
    DOTS = "dots"
    MINIMAL = "minimal"
    SAVE = "save"
    OFFLOAD = "offload"
    FULL = "full"


# Names of layers' intermediate results; MoE layers have those of the experts in place of the MLP's.
REMAT_NAMES = (*projections.QKV, projections.ATTENDED, *(n for n in projections.RESULTS if n not in projections.QKV))


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """A Remat with the names that `save` and `offload` keep."""

    kind: Remat = Remat.NONE
    names: tuple[str, ...] = projections.QKV


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Logical axis -> mesh axes. `batch` and names with `act_` are axes of activations, the others of parameters.

    Parameters are sharded over every axis that would otherwise replicate them (ZeRO-3), those of experts over the expert
    axis first. `act_residual` is the time axis of the residual stream between blocks: with the tensor axis in it (sequence
    parallelism, Korthikanti et al. 2022, arXiv:2205.05198) norms and residuals are not computed redundantly.
    """

    embed: tuple[str, ...] = ("fsdp", "expert", "context")
    vocab: tuple[str, ...] = ("tensor",)
    mlp: tuple[str, ...] = ("tensor",)
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    head_dim: tuple[str, ...] = ()
    norm: tuple[str, ...] = ()
    position: tuple[str, ...] = ()
    layers: tuple[str, ...] = ("stage",)
    experts: tuple[str, ...] = ("expert",)
    expert_embed: tuple[str, ...] = ("fsdp", "context")
    router: tuple[str, ...] = ()
    batch: tuple[str, ...] = ("data", "fsdp", "expert")
    act_time: tuple[str, ...] = ("context",)
    act_residual: tuple[str, ...] = ("context", "tensor")
    act_embed: tuple[str, ...] = ()
    act_mlp: tuple[str, ...] = ("tensor",)
    act_stage: tuple[str, ...] = ("stage",)
    act_heads: tuple[str, ...] = ("tensor",)
    act_kv_heads: tuple[str, ...] = ("tensor",)
    act_vocab: tuple[str, ...] = ("tensor",)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            for axis in getattr(self, field.name):
                if axis not in MESH_AXES and (field.name, axis) != ("batch", NODE_AXIS):
                    raise UserError(
                        f"Rules.{field.name} names the mesh axis {axis!r}, which must be one of "
                        f"{', '.join(MESH_AXES)}{did_you_mean(axis, MESH_AXES)}"
                    )

    def without(self, mesh_axes: Sequence[str]) -> Rules:
        """The rules that map nothing to these mesh axes."""
        names = (field.name for field in dataclasses.fields(self))
        return Rules(**{name: tuple(a for a in getattr(self, name) if a not in mesh_axes) for name in names})

    def spec(self, axes: Axes) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions have these logical names.

        Args:
          axes: one logical name (or None: not sharded) per dimension.

        Raises:
          UserError: a name has no rule, or two dimensions would lie on one mesh axis.
        """
        owner: dict[str, str] = {}
        parts: list[tuple[str, ...] | str | None] = []
        for name in axes:
            if not isinstance(name, str):  # None, or PartitionSpec.UNCONSTRAINED
                parts.append(name)
                continue
            if not hasattr(self, name):
                names = [f.name for f in dataclasses.fields(self)]
                raise UserError(f"logical axis {name!r} has no rule in Rules{did_you_mean(name, names)}")
            mesh_axes = getattr(self, name)
            for mesh_axis in mesh_axes:
                if mesh_axis in owner:
                    raise UserError(
                        f"Rules.{owner[mesh_axis]} and Rules.{name} both map to the mesh axis {mesh_axis!r} in one "
                        f"array with axes {tuple(axes)}: give one of them another mesh axis or ()"
                    )
                owner[mesh_axis] = name
            parts.append(mesh_axes[0] if len(mesh_axes) == 1 else (mesh_axes or None))
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline: its stages of consecutive layers, its microbatches, and how often each passes the stages."""

    stages: int
    microbatches: int
    repeats: int = 1


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run is laid out on its devices.

    Attributes:
      batch_size: rows of the global batch, all accumulation steps together.
      data, fsdp, expert, context, tensor, stage: sizes of the mesh axes; one of them may be -1 and takes the devices
        that are left. data: rows, with replicated parameters; fsdp: rows, with sharded parameters (ZeRO-3); expert:
        rows, and experts; context: the tokens of a row; tensor: heads and hidden units; stage: layers, as a pipeline.
      node: replicas that train apart, each on its part of every batch; Trainer.strategy brings them together.
      accumulation: micro-batches per step; gradients are averaged over all their real tokens.
      pipeline_microbatches: parts of a micro-batch that pass through the pipeline; None: two for each stage.
      pipeline_repeats: how often a row passes each stage (circular schedule); more repeats shorten the bubble.
      remat: what the backward pass recomputes.
      remat_names: what `save` and `offload` keep.
      rules: logical axes -> mesh axes.
      slice: the TPU slice of the plan ("v5e-64"); None: the devices of this run.

    Fields that are AUTO are not set: fsdp takes the devices that are left, the other axes and `accumulation` are 1, and
    `remat` is none; but with a slice and no mesh axis set, `train` uses the planner's choice of all of them.
    """

    batch_size: int
    data: int | Auto = unset(1)
    fsdp: int | Auto = unset(-1)
    expert: int | Auto = unset(1)
    context: int | Auto = unset(1)
    tensor: int | Auto = unset(1)
    stage: int | Auto = unset(1)
    node: int = 1
    accumulation: int | Auto = unset(1)
    pipeline_microbatches: int | None = None
    pipeline_repeats: int = 1
    remat: Remat | Auto = unset(Remat.NONE)
    remat_names: tuple[str, ...] = RematPolicy.names
    rules: Rules = Rules()
    slice: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "pipeline_repeats", "node"):
            if getattr(self, name) is not AUTO and getattr(self, name) < 1:
                raise UserError(f"Plan.{name} is {getattr(self, name)}, must be at least 1")
        if self.pipeline_microbatches is not None and self.pipeline_microbatches < 1:
            raise UserError(
                f"Plan.pipeline_microbatches is {self.pipeline_microbatches}, must be at least 1, or None: two a stage"
            )
        for name, size in self.axes.items():
            if size < 1 and size != -1:
                raise UserError(f"Plan.{name} is {size}, must be at least 1, or -1 for the devices left")
        if sum(size == -1 for size in self.axes.values()) > 1:
            raise UserError("Plan has more than one mesh axis of -1: only one can take the devices that are left")
        if NODE_AXIS in self.rules.batch:
            raise UserError("Rules.batch names the mesh axis 'node', which has the rows first by itself: leave it out")
        for name in self.remat_names:
            if name not in REMAT_NAMES:
                raise UserError(f"Plan.remat_names has {name!r}, which no layer has{did_you_mean(name, REMAT_NAMES)}")

    @property
    def has_mesh(self) -> bool:
        """Whether a mesh axis is set."""
        return any(getattr(self, name) is not AUTO for name in MESH_AXES)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes without `node`; one may be -1, such as fsdp if it is not set."""
        return {name: chosen(self, name) for name in MESH_AXES}

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return int(chosen(self, "accumulation"))

    @property
    def remat_policy(self) -> RematPolicy:
        return RematPolicy(chosen(self, "remat"), self.remat_names)

    def pipeline(self, mesh: Mesh | AbstractMesh) -> Pipeline | None:
        """The pipeline over the mesh's stage axis; None: the axis has size 1.

        Raises:
          UserError: a repeat needs at least as many microbatches as stages.
        """
        stages = mesh.shape["stage"]
        if stages == 1:
            return None
        microbatches = self.pipeline_microbatches or 2 * stages
        if microbatches < stages:
            raise UserError(
                f"Plan.pipeline_microbatches ({microbatches}) must be at least the stages ({stages}): try {2 * stages}"
            )
        return Pipeline(stages=stages, microbatches=microbatches, repeats=self.pipeline_repeats)

    def mesh_shape(self, device_count: int, of: str | None = None) -> dict[str, int]:
        """Sizes of the mesh axes on `device_count` devices, -1 resolved.

        Args:
          device_count: devices of the whole mesh.
          of: name of the slice, for errors; None: the devices of this run.

        Raises:
          UserError: the sizes do not multiply to the number of devices.
        """
        nodes = {NODE_AXIS: self.node} if self.node > 1 else {}
        sizes = nodes | self.axes
        fixed = int(np.prod([s for s in sizes.values() if s != -1]))
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        if -1 in sizes.values():
            if device_count % fixed:
                raise UserError(
                    f"Plan ({shown}): the fixed axes multiply to {fixed}, which must divide the {device_count} devices: "
                    f"try {_nearest_divisor(fixed, device_count)}"
                )
            return {name: device_count // fixed if size == -1 else size for name, size in sizes.items()}
        if fixed != device_count:
            there, fix = (
                (f"{of} has {device_count}", "")
                if of
                else (f"{device_count} are here", f", or run with --emulate={fixed}")
            )
            raise UserError(f"Plan ({shown}) needs {fixed} devices, {there}: set one axis to -1{fix}")
        return sizes

    def check_batch(self, mesh: Mesh) -> None:
        """Raises UserError, with the nearest batch that works, unless the batch divides over the mesh."""
        rows = batch_axes(mesh.shape, self.rules)
        shards = int(np.prod([mesh.shape[a] for a in rows]))
        pipeline = self.pipeline(mesh)
        host_shards(mesh, self.rules)
        unit = shards * self.micro_batches * (pipeline.microbatches if pipeline else 1)
        if self.batch_size % unit:
            nearest = max(unit, round(self.batch_size / unit) * unit)
            parts = [f"{a}={mesh.shape[a]}" for a in rows if mesh.shape[a] > 1] or ["1 device"]
            parts += [f"{self.micro_batches} accumulation steps"] if self.micro_batches > 1 else []
            parts += [f"{pipeline.microbatches} pipeline microbatches"] if pipeline else []
            raise UserError(
                f"Plan.batch_size ({self.batch_size}) must be a multiple of {unit} ({' x '.join(parts)}): try {nearest}"
            )


def make_mesh(plan: Plan, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a plan; on a TPU slice JAX orders the devices by the slice's real topology.

    Axes are Auto: the compiler propagates shardings from the arguments and the `constrain` calls. Several slices split
    the first of the axes node, data, stage and fsdp whose size they divide.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = plan.mesh_shape(len(devices))
    mesh = Mesh(_arranged(shape, devices), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    plan.check_batch(mesh)
    return mesh


def _arranged(shape: dict[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices in the mesh's shape, with neighbours along the innermost axes."""
    from jax.experimental import mesh_utils

    # jax.make_mesh lets mesh axes share a torus axis only on v5e: for v6e-256 it finds no mesh with a tensor axis of 4.
    sizes, options = tuple(shape.values()), {"allow_split_physical_axes": True}
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, **options)
    outer = next((axis for axis in (NODE_AXIS, *MESH_AXES[:3]) if shape.get(axis, 1) % slices == 0), None)
    if outer is None:
        nodes = f"Plan.node ({shape[NODE_AXIS]}), " if NODE_AXIS in shape else ""
        raise UserError(
            f"{nodes}Plan.data ({shape['data']}), Plan.stage ({shape['stage']}) or Plan.fsdp ({shape['fsdp']}) must be a "
            f"multiple of the {slices} slices: try data={slices}"
        )
    across = tuple(slices if axis == outer else 1 for axis in shape)
    inside = tuple(size // part for size, part in zip(sizes, across))
    return mesh_utils.create_hybrid_device_mesh(inside, across, devices, **options)


def shardings(mesh: Mesh, rules: Rules, axes: PyTree, shapes: PyTree | None = None) -> PyTree:
    """NamedShardings for a tree whose leaves are tuples of logical axis names.

    Args:
      mesh: the mesh.
      rules: logical axes -> mesh axes.
      axes: tree of tuples of logical names.
      shapes: the same tree with `.shape` leaves, to check that every dimension divides; None: no check.

    Raises:
      UserError: a dimension does not divide over its mesh axes; names parameter, dimension and fix.
    """
    result = jax.tree.map(lambda a: NamedSharding(mesh, rules.spec(a)), axes, is_leaf=tree.is_axes)
    if shapes is not None:
        for path, leaf, leaf_axes in zip(
            tree.path_names(shapes), jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=tree.is_axes), strict=True
        ):
            _check_divides(mesh, rules, path, leaf_axes, leaf.shape)
    return result


def _check_divides(mesh: Mesh, rules: Rules, path: str, names: Axes, shape: tuple[int, ...]) -> None:
    if len(names) != len(shape):
        raise ValueError(f"{path} has {len(shape)} dimensions {shape} but {len(names)} axis names {names}")
    for name, size in zip(names, shape):
        mesh_axes = getattr(rules, name) if name else ()
        shards = int(np.prod([mesh.shape[a] for a in mesh_axes]))
        if size % shards:
            where = " x ".join(f"{a}={mesh.shape[a]}" for a in mesh_axes)
            common = math.gcd(size, shards)  # divides the devices too, since the axes of the mesh do
            if name == "layers":  # replicated layers are no alternative: each stage needs its own
                raise UserError(
                    f"num_layers ({size}) must be a multiple of {shards} ({where}): try {-(-size // shards) * shards} "
                    f"layers, or Plan.{' x Plan.'.join(mesh_axes)} = {common} ({path})"
                )
            raise UserError(
                f"{path}: axis {name!r} ({size}) must be a multiple of {where}: try a mesh axis of {common}, "
                f"or Rules.{name} = () to keep it whole on every device"
            )


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Sharding of a [B, T] array of a batch by rows, as hosts read them; each node has consecutive rows."""
    return NamedSharding(mesh, _of_all_nodes(mesh, rules).spec(("batch",)))


def batch_axes(sizes: Mapping[str, int], rules: Rules) -> tuple[str, ...]:
    """The axes over which the rows of a global batch are sharded on a mesh with such axes: the nodes' first."""
    return (NODE_AXIS, *rules.batch) if NODE_AXIS in sizes else rules.batch


def manual_axes(mesh: Mesh, apart: Sequence[str] = (NODE_AXIS,)) -> set[str]:
    """The axes that are manual where each position of the axes `apart` runs a program of its own: these, or all.

    They are all if such a program has a single device: kernels cannot be partitioned, not even over automatic axes of one.
    """
    return set(apart) if mesh.size > math.prod(mesh.shape[axis] for axis in apart) else set(mesh.axis_names)


def _of_all_nodes(mesh: Mesh, rules: Rules) -> Rules:
    """The rules of a program in which all nodes share one batch and one model, such as an evaluation."""
    return dataclasses.replace(rules, batch=batch_axes(mesh.shape, rules)) if NODE_AXIS in mesh.shape else rules


def host_shards(mesh: Mesh, rules: Rules) -> list[int]:
    """For each process, the index of the part of a global batch that its devices hold; parts have equal sizes.

    Processes whose devices hold the same rows (a tensor, context or stage axis that spans hosts) have the same index.

    Raises:
      UserError: the rows of two processes overlap but differ.
    """
    held = _held_shards(mesh, rules)
    parts = sorted(set(held.values()))
    return [parts.index(held[process]) for process in sorted(held)]


def row_places(mesh: Mesh, rules: Rules, rows: int) -> tuple[int, ...] | None:
    """Where on the mesh each row of a global batch comes to lie, as hosts read them; None: each in its own place.

    A host reads consecutive rows for all its devices, whose places need not be consecutive.

    Args:
      mesh, rules: of the run.
      rows: of a global batch.
    """
    each = rows // math.prod(mesh.shape[axis] for axis in batch_axes(mesh.shape, rules))
    parts = sorted(set(_held_shards(mesh, rules).values()))
    places = tuple(shard * each + row for part in parts for shard in part for row in range(each))
    return None if places == tuple(range(rows)) else places


def _held_shards(mesh: Mesh, rules: Rules) -> dict[int, tuple[int, ...]]:
    """Process -> the indices of the batch shards that its devices hold; see `host_shards`."""
    rows = int(np.prod([mesh.shape[axis] for axis in batch_axes(mesh.shape, rules)]))
    held: dict[int, set[int]] = {}
    parts_of: Mapping[jax.Device, tuple[slice, ...]] = batch_sharding(mesh, rules).devices_indices_map((rows,))
    for device, index in parts_of.items():
        held.setdefault(device.process_index, set()).update(range(*index[0].indices(rows)))
    parts = sorted({tuple(sorted(part)) for part in held.values()})
    if sorted(sum(parts, ())) != list(range(rows)) or len({len(part) for part in parts}) > 1:
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        raise UserError(
            f"Plan ({sizes}) splits the batch so that the rows of the {len(held)} hosts overlap or differ in number: each "
            "host must hold whole batch shards, choose axis sizes that divide the devices of a host or are multiples"
        )
    return {process: tuple(sorted(shards)) for process, shards in held.items()}


def global_batch(sharding: NamedSharding, host_batch: Batch) -> dict[str, jax.Array]:
    """Turns this host's rows (numpy, [B / hosts, T]) into global arrays [B, T]."""
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in host_batch.items()}


def balanced(batch: Batch) -> dict[str, jax.Array]:
    """Reorders the columns so that each context shard has an early and a late part of every row (traceable).

    Under a causal mask the last shard of a row in its own order would do twice the mean work. Attention and the capacity
    of experts depend on the order: for them the new entry `row_positions` [T] holds each column's index in the row
    before the move. Outside `activate`, without a context axis, or where a row does not divide, the batch stays as it
    is. Encoder entries keep their order.
    """
    current = active()
    shards = current[0].shape["context"] if current else 1
    length = batch["tokens"].shape[1]
    if shards == 1 or length % (2 * shards):
        return dict(batch)
    row_positions_T = zigzag(length, shards)
    moved = {k: v if k.startswith("encoder_") or v.ndim < 2 else v[:, row_positions_T] for k, v in batch.items()}
    return moved | {"row_positions": np.asarray(row_positions_T, np.int32)}


def zigzag(length: int, shards: int) -> np.ndarray:
    """Column indices [length] in the order of the shards: shard i has parts i and 2 * shards - 1 - i of 2 * shards."""
    parts = np.arange(length).reshape(2 * shards, -1)
    return np.concatenate([parts[[i, 2 * shards - 1 - i]] for i in range(shards)]).reshape(-1)


@dataclasses.dataclass(frozen=True)
class _Active:
    mesh: Mesh
    rules: Rules
    pipeline: Pipeline | None
    apart: tuple[str, ...] = (NODE_AXIS,)


_current: contextvars.ContextVar[_Active | None] = contextvars.ContextVar("active", default=None)


@contextlib.contextmanager
def activate(
    mesh: Mesh, rules: Rules, pipeline: Pipeline | None = None, apart: Sequence[str] = (NODE_AXIS,)
) -> Iterator[None]:
    """A context, for trace time, in which `constrain` uses this mesh and layers run in this pipeline.

    Args:
      mesh, rules, pipeline: what they use.
      apart: the axes whose positions each run a program of their own, inside a shard_map over them.
    """
    token = _current.set(_Active(mesh, rules, pipeline, tuple(apart)))
    try:
        yield
    finally:
        _current.reset(token)


def active() -> tuple[ActiveMesh, Rules] | None:
    """The mesh and rules of the `activate` context; None outside it and on a single device.

    In the program of one of several nodes, or of rows apart, the mesh's axis of these is manual already: then the mesh is
    the abstract one that shard_map and shardings take there.
    """
    current = _current.get()
    if current is None or current.mesh.size == 1:
        return None
    inside = jax.sharding.get_abstract_mesh()
    if not set(current.apart) <= set(inside.manual_axes):
        return current.mesh, _of_all_nodes(current.mesh, current.rules)
    return None if len(inside.manual_axes) == len(inside.axis_names) else (inside, current.rules)


def active_pipeline() -> Pipeline | None:
    """The pipeline of the `activate` context."""
    current = _current.get()
    return None if current is None else current.pipeline


def platform() -> str:
    """The platform that the traced program will run on: "cpu", "gpu" or "tpu".

    Inside `activate` it is that of the mesh's devices, since a program for a TPU slice can be lowered in a process that
    has only a CPU. Elsewhere it is that of JAX's default devices.
    """
    current = _current.get()
    return jax.default_backend() if current is None else current.mesh.devices.flat[0].platform


def device_kind() -> str:
    """JAX's name for the kind of device that the traced program will run on ("TPU v5 lite"); see `platform`."""
    current = _current.get()
    return (jax.devices() if current is None else current.mesh.devices.flat)[0].device_kind


def psum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """jax.lax.psum for a shard_map in which other axes stay automatic.

    On CPUs it sums in float32: XLA's CPU compiler crashes on such a sum in 16 bits ("Invalid binary instruction opcode
    copy").
    """
    if platform() == "cpu" and x.dtype.itemsize < 4:
        return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)
    return jax.lax.psum(x, axes)


def psum_scatter(x: jax.Array, axes: Sequence[str], dimension: int) -> jax.Array:
    """jax.lax.psum_scatter, tiled along a dimension; as `psum`."""
    scatter = functools.partial(jax.lax.psum_scatter, axis_name=axes, scatter_dimension=dimension, tiled=True)
    if platform() == "cpu" and x.dtype.itemsize < 4:
        return scatter(x.astype(jnp.float32)).astype(x.dtype)
    return scatter(x)


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Constrains the sharding of an activation; outside `activate` it returns `x` as it is.

    A dimension is sharded only over the leading mesh axes of its rule that divide it: a single key/value head is
    replicated over a tensor axis.
    """
    current = active()
    if current is None:
        return x
    return jax.lax.with_sharding_constraint(x, named_sharding(*current, axes, x.shape))


def named_sharding(mesh: ActiveMesh, rules: Rules, axes: Axes, shape: Sequence[int]) -> NamedSharding:
    """The sharding that `constrain` gives an array of this shape."""
    spec = rules.spec(axes)
    parts = [dividing(mesh, part, size) for part, size in zip((*spec, *[None] * (len(shape) - len(spec))), shape)]
    return NamedSharding(mesh, PartitionSpec(*parts))


def dividing(mesh: ActiveMesh, part: Any, size: int) -> Any:
    """The leading mesh axes of one dimension's entry of a PartitionSpec that divide the dimension; None: none does."""
    if part is PartitionSpec.UNCONSTRAINED:
        return part
    kept: list[str] = []
    for axis in (part,) if isinstance(part, str) else part or ():
        if size % int(np.prod([mesh.shape[a] for a in (*kept, axis)])):
            break
        kept.append(axis)
    return tuple(kept) or None


def _nearest_divisor(size: int, total: int) -> int:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return min(divisors, key=lambda d: (abs(d - size), d))
