"""The parameters that an engine serves: its own copy, or donated ones if both do not fit."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from capibara.core.tree import is_axes
from capibara.core.types import Params
from capibara.inference.engine.programs.programs import on_mesh
from capibara.models.api import Model
from capibara.sharding import Rules, constrain


class ServedParams:
    """The parameters that an engine's programs read; can be replaced between two steps.

    Args:
      serving: copies parameters into the layout that programs read.
      current: such a copy.

    """

    def __init__(self, serving: Callable[[Params], Params], current: Params):
        self._serving = serving
        self._current: Params | None = current
        self._updated: Params | None = None
        self._taking = threading.Lock()

    @property
    def current(self) -> Params:
        """The copy in use."""
        assert self._current is not None, "a step runs after the new parameters are there"
        return self._current

    def update(self, params: Params, in_use: bool) -> None:
        """Makes a copy for the next step; recompiles nothing. Thread-safe.

        `in_use`: whether the current copy may be read meanwhile, so that both need to fit.
        """
        if not in_use:
            self._current = None  # makes room for the next one
        updated = self._serving(params)
        with self._taking:
            self._updated = updated

    def take(self) -> bool:
        """Switches to the newest copy; returns whether there was one."""
        with self._taking:
            updated, self._updated = self._updated, None
        if updated is not None:
            self._current = updated
        return updated is not None


def donated(model: Model, params: Params, mesh: Mesh | None, rules: Rules) -> Params:
    """The result of `Programs.serving`, using only the memory of the largest array in addition; `params` are deleted.

    Args:
      model: of the parameters; adapters are merged first, in place.
      params: given up, one array after the other.
      mesh: of the parameters; None: one device.
      rules: their sharding rules.
    """
    plain = model.plain

    def merged(params: Params) -> Params:
        return jax.tree.map(lambda axes, x: constrain(x, axes), plain.axes, model.merge(params), is_leaf=is_axes)

    def converted(function: Callable[[Any], Any], x: object) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # they are deleted anyway
            y = jax.block_until_ready(on_mesh(mesh, rules, function, donate_argnums=0)(x))
        for array in jax.tree.leaves(x):
            if not array.is_deleted():
                array.delete()
        return y

    return plain.serving(converted(merged, params) if model.config.lora is not None else params, converted)
