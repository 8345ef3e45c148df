"""Lowers an engine's programs for devices of a topology, so that the compiler can report what they need."""

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
from capibara.inference.sampling.sampler import GREEDY, History, Settings
from capibara.models.api import Model
from capibara.sharding import Rules


class Step:
    """A decode step of all slots, and the programs that read a prompt before it, as an engine runs them on this mesh.

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
        B, count = self._slots, self._replicated((), jnp.int32)
        settings, next_ = self._settings(B), self._next_tokens(B)
        return self._programs.step.lower(self.params, self.state, settings, next_, count, self._table, 0)

    def lower_prefill(self, tokens: int) -> jax.stages.Lowered:
        """The lowered program that reads a prompt: (logits, row)."""
        return self._programs.prefill.lower(self.params, self._batch(tokens))

    def lower_resume(self, row: PyTree, tokens: int) -> jax.stages.Lowered:
        """The lowered program that reads so many tokens more into a row with a slot's positions: (logits, row)."""
        return self._programs.resume.lower(self.params, self._batch(tokens), row, self._sizes.length)

    def lower_admit(self, logits: jax.ShapeDtypeStruct, row: PyTree) -> jax.stages.Lowered:
        """The lowered program that puts a row into a slot, and chooses its next token."""
        shapes = jax.tree.map(lambda x: self._replicated((1, *x.shape[1:]), x.dtype), self.state["history"])
        slot, settings, next_ = self._replicated((), jnp.int32), self._settings(1), self._next_tokens(1)
        return self._programs.admit.lower(
            self.state, row, logits, slot, settings, next_, History(*shapes), self._table, 0
        )

    @property
    def _table(self) -> jax.ShapeDtypeStruct | None:
        pool = self._sizes.pool
        return None if pool is None else self._replicated((self._slots, pool.of_slot(self._sizes.length)), jnp.int32)

    def _settings(self, rows: int) -> Settings:
        return jax.tree.map(lambda x: self._replicated((rows, *x.shape[1:]), x.dtype), GREEDY)

    def _next_tokens(self, rows: int) -> programs.NextTokens:
        each = self._replicated((rows,), jnp.int32)
        return programs.NextTokens(each, each, self._replicated((rows, self._words), jnp.uint32))

    def _batch(self, tokens: int) -> dict[str, jax.ShapeDtypeStruct | None]:
        return {
            "tokens": self._replicated((1, tokens), jnp.int32),
            "counts": self._replicated((1,), jnp.int32),
            "adapters": None,
        }

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


def outputs(lowered: jax.stages.Lowered, shardings: PyTree) -> PyTree:
    """Shapes of a program's outputs, with shardings that the compiler gave them."""
    placed = lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of)  # noqa: E731
    return jax.tree.map(placed, lowered.out_info, shardings)
