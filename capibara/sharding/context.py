"""The mesh and rules of the program that is traced, and the devices that it will run on."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from capibara.core.projections import Axes
from capibara.sharding.axes import NODE_AXIS, ActiveMesh
from capibara.sharding.plan import Pipeline
from capibara.sharding.rows import of_all_nodes
from capibara.sharding.rules import Rules, named_sharding


@dataclasses.dataclass(frozen=True)
class _Active:
    mesh: Mesh
    rules: Rules
    pipeline: Pipeline | None
    independent: tuple[str, ...] = (NODE_AXIS,)


_current: contextvars.ContextVar[_Active | None] = contextvars.ContextVar("active", default=None)


@contextlib.contextmanager
def activate(
    mesh: Mesh, rules: Rules, pipeline: Pipeline | None = None, independent: Sequence[str] = (NODE_AXIS,)
) -> Iterator[None]:
    """A context, for trace time, in which `constrain` uses this mesh and layers run in this pipeline.

    Args:
      mesh, rules, pipeline: what they use.
      independent: the axes whose positions each run a program of their own, inside a shard_map over them.
    """
    token = _current.set(_Active(mesh, rules, pipeline, tuple(independent)))
    try:
        yield
    finally:
        _current.reset(token)


def active() -> tuple[ActiveMesh, Rules] | None:
    """The mesh and rules of the `activate` context; None outside it and on a single device.

    In the program of one of several nodes, or of rows independent, the mesh's axis of these is manual already: then the mesh is
    the abstract one that shard_map and shardings take there.
    """
    current = _current.get()
    if current is None or current.mesh.size == 1:
        return None
    inside = jax.sharding.get_abstract_mesh()
    if not set(current.independent) <= set(inside.manual_axes):
        return current.mesh, of_all_nodes(current.mesh, current.rules)
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
