"""The adapters of an engine: each request uses its own, unmerged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Params, PyTree, UserError
from capibara.inference.engine.programs import programs
from capibara.models.api import Adapter, BatchAdapters, Model, unmerged
from capibara.sharding import Rules


class Adapters:
    """An engine's adapters on its devices.

    Args:
      model: that the engine serves, with merged adapters already merged.
      adapters: to serve; empty: programs are compiled without adapters.
      params: of that model; read only if an adapter has magnitudes.
      mesh: of the devices; None: one device.
      rules: sharding rules.

    Attributes:
      names: of the adapters, in order.

    Raises:
      UserError: an adapter belongs to another model, works only when merged, or has the name of another.
    """

    def __init__(
        self, model: Model, adapters: Sequence[Adapter], params: Params, mesh: Mesh | None, rules: Rules = Rules()
    ):
        self.names = tuple(item.name for item in adapters)
        for adapter in adapters:
            if self.names.count(adapter.name) > 1:
                raise UserError(f"two adapters are called {adapter.name!r}: give each a name of its own")
            try:
                unmerged.check(model, adapter)
            except UserError as error:
                raise UserError(f"adapter {adapter.name!r}: {error}") from None
        self._layers: tuple[unmerged.LayerFactors, ...] = ()
        if adapters:
            gain, weights = programs.on_mesh(mesh, rules, unmerged.gain), dict(_named(params))
            gains = [
                {name: np.asarray(gain(weights[name], *rest)) for name, rest in unmerged.magnitudes_of(item).items()}
                for item in adapters
            ]
            host = unmerged.stack_factors(adapters, model.config.num_layers, model.config.dtype.value, gains)
            self._layers = _placed(host, unmerged.axes_of(model, host), mesh, rules, params)

    def number(self, name: str | None) -> int:
        """The number of an adapter, for `of`; None: no adapter.

        Raises:
          UserError: there is no adapter of this name.
        """
        if name is None:
            return 0
        if name not in self.names:
            raise UserError(
                f"adapter is {name[:100]!r}, must be one of {', '.join(self.names) or 'none: no adapter is loaded'}"
            )
        return 1 + self.names.index(name)

    def of(self, numbers: Sequence[int]) -> BatchAdapters | None:
        """The adapters for a batch whose rows have these numbers."""
        return BatchAdapters(self._layers, np.array(numbers, np.int32)) if self.names else None


def _named(params: Params) -> Iterator[tuple[str, jax.Array]]:
    return zip(tree.path_names(params), jax.tree.leaves(params), strict=True)


def _placed(host: PyTree, axes: PyTree, mesh: Mesh | None, rules: Rules, params: Params) -> PyTree:
    if mesh is None:
        return jax.device_put(host, *jax.tree.leaves(params)[0].devices())

    def place(names: tuple[str | None, ...], x: np.ndarray) -> Any:
        return jax.make_array_from_callback(
            x.shape, sharding.named_sharding(mesh, rules, names, x.shape), lambda at: x[at]
        )

    return jax.tree.map(place, axes, host, is_leaf=tree.is_axes)
