"""Generation on each process's own chips: whether the model fits, and how parameters are copied from training's mesh.

A process that generates alone does not wait for others at every token. It needs a copy of the parameters on its own
chips, in the compute dtype; all processes together copy them there.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from capibara import sharding
from capibara.core.types import Params, PyTree, UserError
from capibara.inference.engine.cache.batching import EngineConfig
from capibara.inference.engine.placement import footprint
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.engine.programs.programs import Same
from capibara.models.api import Model
from capibara.sharding import Rules

MEMORY_SHARE = 0.9  # of what is free: prefill needs some, too


class Where(enum.StrEnum):
    """The chips that an engine uses.

    AUTO: a process's own, if parameters and slots fit; else those of all processes.
    OWN: a process's own: each process answers its share.
    ALL: those of all processes, on the mesh of training: they compute each token together.
    """

    AUTO = "auto"
    OWN = "own"
    ALL = "all"


def free_bytes(reserved: int = 0, devices: Sequence[jax.Device] | None = None) -> int | None:
    """Free memory of the fullest device; None: the devices do not report it.

    `reserved`: memory that a concurrent program will need; `devices`: None: all of this process.
    """
    stats = [device.memory_stats() or {} for device in devices or jax.local_devices()]
    if not all("bytes_limit" in item and "bytes_in_use" in item for item in stats):
        return None
    return min(item["bytes_limit"] - item["bytes_in_use"] for item in stats) - reserved


def layout_of(
    model: Model,
    mesh: ServingMesh,
    where: Where,
    config: EngineConfig,
    length: int,
    encoder_length: int | None = None,
    free: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    copies: int = 1,
) -> PyTree | None:
    """Shardings of the plain model's parameters on this process's own chips; None: they do not fit.

    Chooses the sharding that divides each layer among the fewest chips; the other chips hold replicas with their own
    slots.

    Args:
      model: of the parameters; for adapters, what they are merged into.
      mesh: the requested mesh.
      where: which chips to use.
      config, length, encoder_length: of the engine.
      free: least free memory of any device of all processes; None: unknown, assumed sufficient.
      devices: the chips; None: all of this process.
      copies: how many sets of parameters must fit at once.

    Raises:
      UserError: the mesh is impossible, or they do not fit where they must.
    """
    if where is Where.ALL:
        return None
    devices, model = devices or jax.local_devices(), model.plain
    slots = footprint.state_bytes(model, config, length, encoder_length)
    least = math.inf
    for tensor in _tensor_sizes(mesh, devices):
        try:
            _check_divides((tensor or 1) * (mesh.data or 1), len(devices))
            layout = ServingMesh(tensor=tensor, data=mesh.data).shardings(model, devices)
        except UserError:
            if mesh.tensor is not None or tensor in (None, 1):
                raise
            continue
        need = copies * _bytes_of_a_device(model, layout) + slots // (tensor or 1)
        least = min(least, need)
        if free is None or need <= free * MEMORY_SHARE:
            return layout
    if where is Where.OWN and free is not None:
        raise UserError(
            f"a process's own {len(devices)} chips have {free * MEMORY_SHARE / 2**30:,.1f} GiB free each, and parameters and slots "
            f"need {least / 2**30:,.1f} GiB of each: ask for fewer EngineConfig.slots, or let all processes generate "
            "together ('all')"
        )
    return None


def _tensor_sizes(mesh: ServingMesh, devices: Sequence[jax.Device]) -> list[int | None]:
    """Numbers of chips that may share a layer."""
    if mesh.tensor is not None or devices[0].platform == "cpu":
        return [mesh.tensor]
    most = len(devices) // (mesh.data or 1)
    return [n for n in range(1, most + 1) if len(devices) % n == 0]


def _check_divides(used: int, count: int) -> None:
    """Checks that the used devices divide the process's: each copies parameters through all of its devices."""
    if count % used:
        raise UserError(
            f"ServingMesh.tensor x ServingMesh.data ({used}) must divide the {count} devices of a process: try "
            f"{math.gcd(count, used)}"
        )


def _bytes_of_a_device(model: Model, layout: PyTree) -> int:
    computed = jax.eval_shape(model.computed, model.abstract_params)
    sizes = jax.tree.map(lambda x, at: math.prod(at.shard_shape(x.shape)) * x.dtype.itemsize, computed, layout)
    return sum(jax.tree.leaves(sizes))


class OwnChips:
    """Copies parameters from the mesh of training to each process's own chips; all processes must call it together.

    Args:
      model: of the parameters; adapters are merged.
      layout: shardings of the plain model's parameters on this process's chips (`found`).
      rules: their sharding rules on the mesh of training.
    """

    def __init__(self, model: Model, layout: PyTree, rules: Rules = Rules()):
        self._model, self._layout, self._rules = model, layout, rules
        self._program: Callable[[Params], Params] | None = None

    def __call__(self, params: Params) -> Params:
        """The plain model's parameters, in the compute dtype."""
        params = self._computed(params)
        move = _moved if jax.process_count() == 1 else _moved_to
        return jax.tree.map(move, params, self._layout)

    def _computed(self, params: Params) -> Params:
        """On training's mesh: usually smaller, and without replicas."""
        if self._program is None:
            held = jax.tree.leaves(params)[0].sharding
            mesh = _mesh_of(held) if isinstance(held, NamedSharding) else None
            self._program = make_computed(self._model, mesh, self._rules)
        return self._program(params)


def make_computed(model: Model, mesh: Mesh | None, rules: Rules) -> Callable[[Params], Params]:
    """The program that merges adapters and casts the plain model's parameters to the compute dtype.

    Args:
      model: of the parameters.
      mesh: of training, where they stay; None: one device.
      rules: their sharding rules there.
    """
    return _computed(Same(model), mesh, rules)


@functools.lru_cache(maxsize=8)  # a run evaluates many times
def _computed(same: Same, mesh: Mesh | None, rules: Rules) -> Callable[[Params], Params]:
    model, plain = same.model, same.model.plain
    shardings = None if mesh is None else sharding.shardings(mesh, rules, plain.axes)
    return jax.jit(lambda params: plain.computed(model.merge(params)), out_shardings=shardings)


def _moved(x: jax.Array, target: Sharding) -> jax.Array:
    """Copies an array to other devices of this process, from device to device.

    Where no device of the source has a shard of the target, `jax.device_put` reads the whole array to the host first
    (findings/jax_device_put_through_host.sh).
    """
    if x.sharding.device_set == target.device_set or not isinstance(x.sharding, NamedSharding):
        return jax.device_put(x, target)
    devices = _mesh_of(x.sharding).devices.flatten()
    sizes = {axis: _mesh_of(target).shape[axis] for axis in _axes_of(target)}
    if not sizes or len(devices) % math.prod(sizes.values()):
        whole = resharding(NamedSharding(Mesh(devices, ("copies",)), PartitionSpec()))(x)
        return jax.device_put(whole.addressable_data(0), target)
    assert isinstance(target, NamedSharding)
    mesh = Mesh(devices.reshape(-1, *sizes.values()), ("copies", *sizes))
    return jax.device_put(resharding(NamedSharding(mesh, target.spec))(x), target)


def _axes_of(target: Sharding) -> list[str]:
    """The mesh axes that divide an array."""
    spec = target.spec if isinstance(target, NamedSharding) else ()
    parts = [(part,) if isinstance(part, str) else part or () for part in spec]
    return [axis for part in parts for axis in part]


@functools.lru_cache(maxsize=512)  # one for each layout of an array
def resharding(target: NamedSharding) -> jax.stages.Wrapped:
    """The program that gives an array another sharding on the same devices."""
    return jax.jit(lambda x: x, out_shardings=target)


def _moved_to(x: jax.Array, target: Sharding) -> jax.Array:
    """Copies an array from all processes' devices to those of this process in `target`."""
    everywhere = jax.device_put(x, _on_every_process(target))
    parts = {shard.device: shard.data for shard in everywhere.addressable_shards}
    mine = [parts[device] for device in target.addressable_devices_indices_map(x.shape)]
    return jax.make_array_from_single_device_arrays(x.shape, target, mine)


def _on_every_process(source: Sharding) -> NamedSharding:
    """A sharding that is `source` on this process's devices, and the equivalent on those of all others.

    Devices that `source` leaves out hold replicas during the copy.
    """
    mine = _mesh_of(source).devices
    local = list(jax.local_devices())
    order = [local.index(device) for device in mine.flat]  # the same on every process: their devices are alike
    order += [index for index in range(len(local)) if index not in order]
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    devices = np.array([[by_process[process][index] for index in order] for process in sorted(by_process)])
    axes = _mesh_of(source).axis_names
    mesh = Mesh(devices.reshape(len(by_process), -1, *mine.shape), ("process", "copies", *axes))
    return NamedSharding(mesh, source.spec if isinstance(source, NamedSharding) else PartitionSpec())


def _mesh_of(source: Sharding) -> Mesh:
    if isinstance(source, NamedSharding) and isinstance(source.mesh, Mesh):
        return source.mesh
    return Mesh(np.array(list(source.device_set)), ("data",))
