"""The adapters of an engine: each request uses its own, unmerged; they may be loaded and unloaded while others run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Params, PyTree, UserError
from capibara.inference.engine.programs import programs
from capibara.models import api
from capibara.models.api import Adapter, BatchAdapters, Lora, Model, unmerged
from capibara.sharding import Rules


@dataclasses.dataclass(frozen=True)
class AdapterSlots:
    """Room for adapters that are loaded while an engine runs.

    Attributes:
      count: of adapters; 0: none can be loaded.
      rank: the largest rank.
      targets: patterns of weights, as in `Lora`.
    """

    count: int = 0
    rank: int = 16
    targets: tuple[str, ...] = ("all-linear",)


class SlotsBusy(Exception):
    """All slots without an adapter are used by texts of adapters that were unloaded or replaced."""


@dataclasses.dataclass(eq=False)
class LoadedAdapter:
    """An adapter in its slot.

    Attributes:
      number: of its slot, from 1; 0: no adapter.
      version: that no other adapter has ever had in this engine.
      users: number of requests that use it.
      listed: whether requests can name it.
    """

    number: int = 0
    version: int = 0
    users: int = 0
    listed: bool = True


class Adapters:
    """An engine's adapters on its devices; thread-safe.

    An adapter is loaded into a slot that no row uses, one layer after the other, so that steps go on meanwhile. One that is
    unloaded or replaced has its slot until the last request that uses it has ended; hence there is a slot more than
    adapters.

    Args:
      model: that the engine serves, with merged adapters already merged.
      adapters: to serve; empty, without slots: programs are compiled without adapters.
      params: of that model; read only if an adapter has magnitudes.
      mesh: of the devices; None: one device.
      rules: sharding rules.
      slots: for further adapters.

    Raises:
      UserError: an adapter belongs to another model, works only when merged, or has the name of another; or there are slots,
        and no weight can have adapters.
    """

    def __init__(
        self,
        model: Model,
        adapters: Sequence[Adapter],
        params: Params,
        mesh: Mesh | None,
        rules: Rules = Rules(),
        slots: AdapterSlots = AdapterSlots(),
    ):
        names = [item.name for item in adapters]
        for adapter in adapters:
            if names.count(adapter.name) > 1:
                raise UserError(f"two adapters are called {adapter.name!r}: give each a name of its own")
            _check(model, adapter)
        self._model, self._most = model, len(adapters) + slots.count if slots.count else 0
        self._changing, self._loading, self._versions = threading.Lock(), threading.Lock(), itertools.count(1)
        self._named = {name: LoadedAdapter(at, next(self._versions)) for at, name in enumerate(names, 1)}
        self._free = [*range(len(adapters) + 1, self._most + 2)] if slots.count else []
        self._layers: tuple[unmerged.LayerFactors, ...] = ()
        if not (adapters or slots.count):
            return
        gain, weights = programs.on_mesh(mesh, rules, unmerged.gain), dict(_named(params))
        gains = [
            {name: np.asarray(gain(weights[name], *rest)) for name, rest in unmerged.magnitudes_of(item).items()}
            for item in adapters
        ]
        host = self._stacked(adapters, gains, _room(model, slots))
        self._layers = _placed(host, unmerged.axes_of(model, host), mesh, rules, params)
        if slots.count:
            layouts = jax.tree.map(lambda x: x.sharding, self._layers[0])
            self._written = programs.on_mesh(mesh, rules, unmerged.written, out_shardings=layouts)
            self._write(self._stacked((), (), unmerged.room_in(self._layers)), self._free[0])  # compiles the program

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapters that requests can name, in the order of their loading."""
        with self._changing:
            return tuple(self._named)

    def load(self, adapter: Adapter, *, replace: bool = False) -> None:
        """Loads an adapter for requests from now on; waits until it is on the devices.

        Args:
          adapter: the adapter.
          replace: whether it may replace one of its name; requests that use that go on with it.

        Raises:
          UserError: it belongs to another model, there is no room for it, or its name is taken.
          SlotsBusy: too many texts still use adapters that were unloaded.
        """
        _check(self._model, adapter)
        with self._loading:
            self._check_slot(adapter, replace)
            room = unmerged.room_in(self._layers)
            try:
                unmerged.check_room(adapter, room)
            except UserError as error:
                raise UserError(f"adapter {adapter.name!r}: {error}") from None
            host = self._stacked((adapter,), (), dataclasses.replace(room, count=0))
            with self._changing:
                if not self._free:
                    raise SlotsBusy("texts still use the slots of adapters that were unloaded: try again")
                number = self._free.pop()
            self._write(host, number)
            with self._changing:
                previous = self._named.get(adapter.name)
                self._named[adapter.name] = LoadedAdapter(number, next(self._versions))
                if previous is not None:
                    self._retire(previous)

    def unload(self, name: str) -> None:
        """Unloads an adapter: no new request can name it, and those that use it go on.

        Raises:
          UserError: there is no adapter of this name.
        """
        with self._changing:
            if name not in self._named:
                raise UserError(self._unknown(name))
            self._retire(self._named.pop(name))

    def take(self, name: str | None) -> LoadedAdapter:
        """The adapter for a request, which has it until `release`; None: no adapter.

        Raises:
          UserError: there is no adapter of this name.
        """
        if name is None:
            return LoadedAdapter()
        with self._changing:
            if name not in self._named:
                raise UserError(self._unknown(name))
            result = self._named[name]
            result.users += 1
            return result

    def release(self, adapter: LoadedAdapter) -> None:
        """Ends a request's use of an adapter."""
        with self._changing:
            adapter.users -= 1
            if not (adapter.listed or adapter.users):
                self._free.append(adapter.number)

    @contextlib.contextmanager
    def using(self, name: str | None) -> Iterator[int]:
        """The number of an adapter, for `of`, which keeps its slot meanwhile; errors as in `take`."""
        adapter = self.take(name)
        try:
            yield adapter.number
        finally:
            self.release(adapter)

    def of(self, numbers: Sequence[int]) -> BatchAdapters | None:
        """The adapters for a batch whose rows have these numbers."""
        return BatchAdapters(self._layers, np.array(numbers, np.int32)) if self._layers else None

    def _check_slot(self, adapter: Adapter, replace: bool) -> None:
        if not self._most:
            raise UserError("there is no room for further adapters: set Adapters.slots, and start again")
        with self._changing:
            if adapter.name in self._named:
                if not replace:
                    raise UserError(f"adapter {adapter.name!r} is loaded already: unload it first, or replace it")
            elif len(self._named) >= self._most:
                raise UserError(
                    f"{len(self._named)} adapters are loaded, and there is room for {self._most}: unload one, or raise "
                    "Adapters.slots"
                )

    def _stacked(
        self, adapters: Sequence[Adapter], gains: Any, room: unmerged.Room
    ) -> tuple[unmerged.LayerFactors, ...]:
        config = self._model.config
        return unmerged.stack_factors(adapters, config.num_layers, config.dtype.value, gains, room)

    def _write(self, host: Sequence[unmerged.LayerFactors], number: int) -> None:
        """Writes the factors of one adapter into a slot that no row uses; steps in between see some layers of it."""
        for at, new in enumerate(host):
            layer = jax.block_until_ready(self._written(self._layers[at], new, np.int32(number - 1)))
            self._layers = (*self._layers[:at], layer, *self._layers[at + 1 :])

    def _retire(self, adapter: LoadedAdapter) -> None:
        """Removes an adapter that requests can no longer name."""
        adapter.listed = False
        if not adapter.users:
            self._free.append(adapter.number)

    def _unknown(self, name: str) -> str:
        return f"adapter is {name[:100]!r}, must be one of {', '.join(self._named) or 'none: no adapter is loaded'}"


def _check(model: Model, adapter: Adapter) -> None:
    try:
        unmerged.check(model, adapter)
    except UserError as error:
        raise UserError(f"adapter {adapter.name!r}: {error}") from None


def _room(model: Model, slots: AdapterSlots) -> unmerged.Room:
    """The room that slots need.

    Raises:
      UserError: the targets are no weights of this model, or their adapters must be merged.
    """
    if not slots.count:
        return unmerged.Room()
    lora = Lora(rank=slots.rank, targets=slots.targets)
    try:
        adapted = api.build(dataclasses.replace(model.config, lora=lora))
        values = adapted.trained(adapted.abstract_params)
    except UserError as error:
        raise UserError(f"Adapters.targets is {slots.targets!r}: {error}") from None
    result = unmerged.room_of(model, Adapter("", lora, values), slots.count + 1)
    if not result.weights:
        raise UserError(
            f"Adapters.targets is {slots.targets!r}, and adapters of these weights must be merged: no adapter can be loaded "
            "while the model is served"
        )
    return result


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
