"""The rules that map logical axes to mesh axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from capibara.config import configurable
from capibara.core.fields import did_you_mean
from capibara.core.projections import Axes
from capibara.core.types import UserError
from capibara.sharding.axes import MESH_AXES, NODE_AXIS, ActiveMesh


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Logical axis -> mesh axes. `batch` and names with `act_` are axes of activations, the others of parameters.

    Parameters are sharded over every axis that would otherwise replicate them (ZeRO-3), those of experts over the expert
    axis first. `act_residual` is the time axis of the residual stream between blocks: with the tensor axis in it (sequence
    parallelism, Korthikanti et al. 2022, arXiv:2205.05198) norms and residuals are not computed redundantly.

    Attributes:
      embed, vocab, mlp, heads, kv_heads, head_dim: of matrices: the residual stream, the vocabulary, the MLP's hidden units,
        query heads, key/value heads, and the numbers of a head.
      latent: the compressed keys and values of latent attention.
      norm, position: scales of norms; rows of learned positions.
      layers: the layers of stacked parameters.
      experts, expert_embed, router: experts, their side to the residual stream, and the router's outputs.
      batch: rows of a batch.
      act_time, act_residual: tokens of a row within blocks, and between them.
      act_embed, act_mlp, act_heads, act_kv_heads, act_vocab: the dimensions of activations that belong to embed, mlp, heads,
        kv_heads and vocab.
      act_stage: the stages of a pipeline.
    """

    embed: tuple[str, ...] = ("fsdp", "expert", "context")
    vocab: tuple[str, ...] = ("tensor",)
    mlp: tuple[str, ...] = ("tensor",)
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    head_dim: tuple[str, ...] = ()
    latent: tuple[str, ...] = ("fsdp", "expert", "context")
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


def named_sharding(mesh: ActiveMesh, rules: Rules, axes: Axes, shape: Sequence[int]) -> NamedSharding:
    """The sharding that `constrain` gives an array of this shape."""
    spec = rules.spec(axes)
    parts = [dividing(mesh, part, size) for part, size in zip((*spec, *[None] * (len(shape) - len(spec))), shape)]
    return NamedSharding(mesh, PartitionSpec(*parts))


def dividing(mesh: ActiveMesh, part: Any, size: int) -> Any:
    """The leading mesh axes of one dimension's entry of a PartitionSpec that divide the dimension; None: none does."""
    if part is PartitionSpec.UNCONSTRAINED:
        return part
    retained: list[str] = []
    for axis in (part,) if isinstance(part, str) else part or ():
        if size % int(np.prod([mesh.shape[a] for a in (*retained, axis)])):
            break
        retained.append(axis)
    return tuple(retained) or None
