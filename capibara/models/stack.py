"""Many equal layers as one: parameters stacked along a leading `layers` axis, run by scan, recomputed by policy."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from capibara.sharding import Remat


class LayerLoop(enum.StrEnum):
    """How the layers run: one compiled body (compile time independent of depth), or written out one by one."""

    SCAN = "scan"
    UNROLL = "unroll"


def stacked(make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, num_layers: int) -> nnx.Module:
    """A module like `make(rngs)` whose parameters have a leading axis of `num_layers`, each layer drawn anew."""
    graphdef, template = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key))))

    values = jax.vmap(init)(jax.random.split(rngs.params(), num_layers))
    leaves = jax.tree.leaves(values)
    variables = jax.tree.leaves(template, is_leaf=lambda x: isinstance(x, nnx.Variable))
    stacked_variables = [
        nnx.Param(value, axes=("layers", *variable.axes)) for variable, value in zip(variables, leaves, strict=True)
    ]
    structure = jax.tree.structure(template, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graphdef, jax.tree.unflatten(structure, stacked_variables))


def run(
    layers: nnx.Module, x: jax.Array, apply: Callable[[nnx.Module, jax.Array], jax.Array], loop: LayerLoop, remat: Remat
) -> jax.Array:
    """Applies a stacked module layer after layer.

    Args:
      layers: made by `stacked`.
      x: input of the first layer; every layer's output has its shape.
      apply: (one layer's module, x) -> x.
      loop: scan or unroll.
      remat: what the backward pass recomputes.
    """
    graphdef, state = nnx.split(layers)
    values = nnx.to_pure_dict(state)

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return apply(nnx.merge(graphdef, _as_state(state, layer)), x), None

    if remat is Remat.FULL:
        body = jax.checkpoint(body, prevent_cse=loop is LayerLoop.UNROLL)
    elif remat is Remat.DOTS:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        body = jax.checkpoint(body, prevent_cse=loop is LayerLoop.UNROLL, policy=policy)
    if loop is LayerLoop.SCAN:
        return jax.lax.scan(body, x, values)[0]
    for index in range(jax.tree.leaves(values)[0].shape[0]):
        x, _ = body(x, jax.tree.map(lambda v: v[index], values))
    return x


def _as_state(template: nnx.State, values: Any) -> nnx.State:
    """The template's variables with these values (pure nested dict of the same structure)."""
    state = jax.tree.map(lambda v: v, template)
    nnx.replace_by_pure_dict(state, values)
    return state
