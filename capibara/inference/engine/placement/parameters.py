"""The parameters that an engine serves: a copy of its own, or those it was given where there is no room for them twice."""

from __future__ import annotations

import threading
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


class ServedParams:
    """What the programs of an engine read, until others take its place between two steps.

    Args:
      serving: makes a copy of parameters, as the programs read them.
      current: such a copy.

    Attributes:
      current: the copy that is read now; None: it made room for the next one.
    """

    def __init__(self, serving: Callable[[Params], Params], current: Params):
        self._serving, self.current = serving, current
        self._updated: Params | None = None
        self._taking = threading.Lock()

    def update(self, params: Params, in_use: bool) -> None:
        """Makes a copy for the next step; nothing is compiled again. From any thread.

        `in_use`: the current copy may be read meanwhile, so there must be room for both.
        """
        if not in_use:
            self.current = None
        updated = self._serving(params)
        with self._taking:
            self._updated = updated

    def take(self) -> bool:
        """Reads the newest copy from now on; whether there was one."""
        with self._taking:
            updated, self._updated = self._updated, None
        if updated is not None:
            self.current = updated
        return updated is not None


def donated(model: Model, params: Params, mesh: Mesh | None, rules: Rules) -> Params:
    """What `Programs.serving` gives, with no more beside it than the largest array; `params` are deleted.

    Args:
      model: whose parameters these are; adapters are merged first, into the arrays that they adapt.
      params: given up, one array after the other.
      mesh: on which they lie; None: on one device.
      rules: how they lie there.
    """
    plain = model.plain

    def merged(params: Params) -> Params:
        return jax.tree.map(lambda axes, x: constrain(x, axes), plain.axes, model.merge(params), is_leaf=is_axes)

    def converted(function: Callable[[Any], Any], x: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # they are deleted all the same
            y = jax.block_until_ready(on_mesh(mesh, rules, function, donate_argnums=0)(x))
        for array in jax.tree.leaves(x):
            if not array.is_deleted():
                array.delete()
        return y

    return plain.serving(converted(merged, params) if model.config.lora is not None else params, converted)
