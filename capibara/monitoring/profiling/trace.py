"""Reads a trace of JAX's profiler (xplane.pb): the operations that each device ran, and when."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterator
from typing import Any

from capibara.core.types import UserError
from capibara.monitoring.profiling.categories import category_of

_DEVICE = re.compile(r"^/device:(TPU|GPU):\d+")
# Of a TPU's "%fusion.7 = bf16[8] fusion(...)" and a GPU's "void name<true>(void const*)", the name.
_NAME = re.compile(r"^(?:void )?%?([^\s(<=]+)")
_OP_LINES = ("XLA Ops", "XLA Async Ops")  # of TPU planes: their other lines repeat these as modules and steps


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation as it ran once.

    Attributes:
      name: in the compiled program.
      category: from categories.
      begin_ns, end_ns: on the trace's clock.
    """

    name: str
    category: str
    begin_ns: float
    end_ns: float


@dataclasses.dataclass(frozen=True)
class Lane:
    """What one line of a trace ran: operations nest there, but never overlap otherwise.

    Attributes:
      device: such as "TPU:0", or "CPU:3".
      ops: in the order of their beginning.
    """

    device: str
    ops: tuple[Op, ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """The trace of one host.

    Attributes:
      lanes: of all devices.
      steps_ns: (begin, end) of each step as the host dispatched it.
    """

    lanes: tuple[Lane, ...]
    steps_ns: tuple[tuple[float, float], ...]


def files_of(folder: str) -> list[str]:
    """The traces in a folder, one for each host."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "plugins", "profile", "*", "*.xplane.pb")))


def read(path: str) -> Trace:
    """Reads a trace.

    Raises:
      UserError: it is no trace.
    """
    from jax.profiler import ProfileData

    try:
        planes = list(ProfileData.from_file(path).planes)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path} is no trace of JAX's profiler ({error}): name the folder of a profile") from None
    lanes: list[Lane] = []
    steps: list[tuple[float, float]] = []
    for plane in planes:
        result = _DEVICE.match(plane.name)
        for line in plane.lines:
            if result is None:
                of_cpu, of_steps = _on_host(line.events)
                lanes += [Lane(device, tuple(ops)) for device, ops in of_cpu.items()]
                steps += of_steps
            elif result[1] == "GPU" or line.name in _OP_LINES:
                ops = tuple(sorted(_on_device(line.events), key=_order))
                if ops:
                    lanes.append(Lane(result[0].removeprefix("/device:"), ops))
    return Trace(tuple(lanes), tuple(sorted(steps)))


def _order(op: Op) -> tuple[float, float]:
    return op.begin_ns, -op.end_ns


def _on_device(events: Any) -> Iterator[Op]:
    for event in events:
        stats = dict(event.stats)
        name = _NAME.match(event.name)
        kind = str(stats.get("hlo_category", "")) or None
        category = category_of(event.name.partition(" = ")[0], kind)
        yield Op(event.name if name is None else name[1], category, event.start_ns, event.start_ns + event.duration_ns)


def _on_host(events: Any) -> tuple[dict[str, list[Op]], list[tuple[float, float]]]:
    """The operations of emulated devices, by device, and the steps; both are events of the host's threads."""
    ops: dict[str, list[Op]] = {}
    steps = []
    for event in events:
        if not event.duration_ns:
            continue
        stats = dict(event.stats)
        begin, end = event.start_ns, event.start_ns + event.duration_ns
        if "step_num" in stats:
            steps.append((begin, end))
        elif "hlo_op" in stats and not event.name.startswith("end: "):
            device = f"CPU:{stats.get('device_ordinal', 0)}"
            ops.setdefault(device, []).append(Op(event.name, category_of(event.name), begin, end))
    return {device: sorted(result, key=_order) for device, result in ops.items()}, steps
