"""The mesh of a plan, and the shardings of parameters on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from capibara.core import tree
from capibara.core.projections import Axes
from capibara.core.types import PyTree, UserError
from capibara.sharding.axes import MESH_AXES, NODE_AXIS
from capibara.sharding.plan import Plan
from capibara.sharding.rules import Rules


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
