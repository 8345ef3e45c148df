"""Lowers an engine's step for devices of a topology, so that the compiler can report its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core import tree
from capibara.core.projections import Axes
from capibara.core.types import PyTree
from capibara.inference.engine.cache.batching import EngineConfig
from capibara.inference.engine.placement import footprint
from capibara.inference.engine.programs import programs
from capibara.inference.sampling.sampler import GREEDY
from capibara.models.api import Model
from capibara.sharding import Rules


class Step:
    """A decode step of all slots, as an engine runs it on this mesh.

    Args:
      model: a decoder.
      config: how requests are batched.
      length: positions of a slot.
      mesh: of target devices.
      rules: how parameters, slots and heads are sharded.

    Attributes:
      params: shapes and shardings of the parameters in the engine's layout.
      state: shapes and shardings of the slots' state.
    """

    def __init__(self, model: Model, config: EngineConfig, length: int, mesh: Mesh, rules: Rules = Rules()):
        self._mesh, self._slots = mesh, config.slots
        with sharding.activate(mesh, rules):  # choose kernels for these devices, not for the local ones
            self._sizes = footprint.sizes_of(model, config, length, None)
        self._words = programs.allowed_words(model.config.vocab_size)
        self._programs = programs.build(model, model.config.vocab_size, self._sizes, mesh, rules)
        served = jax.eval_shape(self._programs.serving, model.abstract_params)
        state = jax.eval_shape(self._programs.start)
        self.params = self._laid_out(rules, served, model.plain.serving_axes)
        self.state = self._laid_out(rules, state, programs.state_axes(state))

    def lower(self) -> jax.stages.Lowered:
        """The lowered program, with donated state, without likeliest tokens."""
        B, pool = self._slots, self._sizes.pool
        length = self._sizes.length
        settings = jax.tree.map(lambda x: self._replicated((B, *x.shape[1:]), x.dtype), GREEDY)
        table = None if pool is None else self._replicated((B, pool.of_slot(length)), jnp.int32)
        rows, count = self._replicated((B,), jnp.int32), self._replicated((), jnp.int32)
        next_ = programs.NextTokens(rows, rows, self._replicated((B, self._words), jnp.uint32))
        return self._programs.step.lower(self.params, self.state, settings, next_, count, table, 0)

    def _replicated(self, shape: tuple[int, ...], dtype: object) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self._mesh, PartitionSpec()))

    def _laid_out(self, rules: Rules, shapes: PyTree, axes: PyTree) -> PyTree:
        def abstract(names: Axes, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=sharding.named_sharding(self._mesh, rules, names, x.shape)
            )

        return jax.tree.map(abstract, axes, shapes, is_leaf=tree.is_axes)


def device_bytes(shapes: PyTree) -> int:
    """Bytes of sharded arrays on one device."""
    each = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(shapes))
    return sum(int(np.prod(shape)) * size for shape, size in each)
