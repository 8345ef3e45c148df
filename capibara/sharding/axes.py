"""The axes of meshes."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

# From outermost to innermost: the axes that communicate most get neighbouring chips.
MESH_AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")
# Outside of them, in meshes of several nodes only: replicas that train apart. No rule maps a parameter to it.
NODE_AXIS = "node"
ActiveMesh = Mesh | AbstractMesh  # abstract in the program of one of several nodes; see `active`


def nearest_divisor(size: int, total: int) -> int:
    """The divisor of `total` that is nearest to `size`."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return min(divisors, key=lambda d: (abs(d - size), d))
