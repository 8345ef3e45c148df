"""Sharding: the plan, the mesh, and the rules that map logical axes to mesh axes.

Parameters and activations have logical axis names; model code never names a mesh axis. `Rules` maps one to the other.
"""

from capibara.sharding.axes import MESH_AXES, NODE_AXIS, ActiveMesh, nearest_divisor
from capibara.sharding.balance import balanced, zigzag
from capibara.sharding.context import (
    activate,
    active,
    active_pipeline,
    constrain,
    device_kind,
    platform,
    psum,
    psum_scatter,
)
from capibara.sharding.mesh import make_mesh, shardings
from capibara.sharding.plan import Pipeline, Plan
from capibara.sharding.remat import REMAT_NAMES, Remat, RematPolicy
from capibara.sharding.rows import (
    batch_axes,
    batch_sharding,
    global_batch,
    host_shards,
    manual_axes,
    of_all_nodes,
    row_places,
)
from capibara.sharding.rules import Rules, dividing, named_sharding

__all__ = [
    "ActiveMesh", "MESH_AXES", "NODE_AXIS", "Pipeline", "Plan", "REMAT_NAMES",
    "Remat", "RematPolicy", "Rules", "activate", "active", "active_pipeline",
    "balanced", "batch_axes", "batch_sharding", "constrain", "device_kind", "dividing",
    "global_batch", "host_shards", "make_mesh", "manual_axes", "named_sharding", "nearest_divisor",
    "of_all_nodes", "platform", "psum", "psum_scatter", "row_places", "shardings",
    "zigzag",
]  # fmt: skip
