"""Parameters that become an engine's own, one array after the other, where there is no room for them twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from capibara.core.tree import is_axes
from capibara.core.types import Params
from capibara.inference.engine.runner.programs import on_mesh
from capibara.models.api import Model
from capibara.sharding import Rules, constrain


def served(model: Model, params: Params, mesh: Mesh | None, rules: Rules) -> Params:
    """What `Programs.serving` gives, with no more beside it than the largest array; `params` are deleted.

    Args:
      model, params: whose these are; adapters are merged first, into the arrays that they adapt.
      mesh: on which they lie; None: on one device.
      rules: how they lie there.
    """
    plain = model.plain

    def merged(params: Params) -> Params:
        return jax.tree.map(lambda axes, x: constrain(x, axes), plain.axes, model.merge(params), is_leaf=is_axes)

    def donated(function: Callable[[Any], Any], x: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # they are deleted all the same
            y = jax.block_until_ready(on_mesh(mesh, rules, function, donate_argnums=0)(x))
        for array in jax.tree.leaves(x):
            if not array.is_deleted():
                array.delete()
        return y

    return plain.serving(donated(merged, params) if model.config.lora is not None else params, donated)
