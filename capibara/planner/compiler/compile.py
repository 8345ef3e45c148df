"""Compiles a lowered train step with the TPU compiler; reports its memory and costs. Nothing is executed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from capibara.planner.compiler import assignment, hbm_peak, hlo
from capibara.planner.hardware import chips

_ALIVE = 16  # number of buffers in a report
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# An out-of-memory error says "Used 18.04G of 15.75G hbm."; or, if temporaries alone do not fit, "the total memory
# required for HLO temporaries (20.42G) exceeds available HBM (15.75G)"; or, far beyond, "Requires 3.84T, has 15.75G".
_SIZE = r"([\d.]+)([KMGT]?)"
_USED = re.compile(
    rf"Used {_SIZE} of {_SIZE} hbm|temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)|"
    rf"Requires {_SIZE}, has {_SIZE} available",
    re.IGNORECASE,
)
# libtpu before 0.0.50 does not name the error: only its text tells.
_OUT_OF_HBM = ("memory space hbm", "Ran out of memory on HBM", "unlikely to have enough memory")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's report of one step on one device.

    For a step that does not fit, only fits, peak_bytes, limit_bytes and compile_s are meaningful.

    Attributes:
      fits: whether the step fits the device's HBM. The compiler decides; no sum of the figures below is its limit.
      peak_bytes: HBM of arguments, results and temporaries as the compiler packs them, host buffers excluded; with
        code_bytes it is what the compiler compares with the limit. For a step that does not fit, what it would need.
      compile_s: wall-clock seconds.
      limit_bytes: usable HBM, from the compiler or, for a step that fits, from chips.py; None: unknown.
      argument_bytes: state and batch.
      output_bytes: results; the donated state is not counted twice.
      temporary_bytes: everything else; libtpu counts gaps between packed buffers twice: with the others more than the peak.
      code_bytes: the program itself, which the peak does not include.
      host_argument_bytes, host_output_bytes, host_temporary_bytes: the same for buffers in the host's memory
        (pinned_host: offloaded optimizer state or activations).
      chip: planner.hardware.chips' name of the device; None for an unknown device.
      costs: read from the optimised HLO.
      alive_bytes: the peak as hbm_peak computes it from the schedule, close to the compiler's.
      alive: the largest buffers at that peak, without arguments.
      text: the optimised HLO; not in the JSON form.
    """

    fits: bool
    peak_bytes: int | None
    compile_s: float
    limit_bytes: int | None = None
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    host_argument_bytes: int = 0
    host_output_bytes: int = 0
    host_temporary_bytes: int = 0
    chip: str | None = None
    costs: hlo.Costs = dataclasses.field(default_factory=hlo.Costs)
    alive_bytes: int = 0
    alive: tuple[hbm_peak.Buffer, ...] = ()
    text: str = ""

    @property
    def host_bytes(self) -> int:
        """Host memory used by one device's buffers, in bytes."""
        return self.host_argument_bytes + self.host_output_bytes + self.host_temporary_bytes

    @property
    def fitting_bytes(self) -> int:
        """`peak_bytes` of a step that fits, which is never None."""
        assert self.peak_bytes is not None
        return self.peak_bytes

    @property
    def flops(self) -> float:
        """FLOPs of matrix products, with loop trip counts; attention kernels count as if nothing were masked."""
        return self.costs.matmul_flops + self.costs.kernel_flops

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the Pallas kernels, without the compiler's own custom calls, whose names are capitalised."""
        return tuple(sorted(name for name in self.costs.kernels if not name[:1].isupper()))

    @property
    def compiled_s(self) -> float | None:
        """The compiler's estimate of the scheduled instructions' time in seconds; None if the chip's clock is unknown.

        Excludes Pallas kernels and collectives (planner.model.cost has terms for them), so it is not the whole step.
        """
        known = chips.find(self.chip) if self.chip else None
        return self.costs.cycles / known.clock_hz if known and self.costs.cycles else None

    @property
    def host_exposed_s(self) -> float:
        """Seconds of copies to and from the host's memory that no scheduled instruction hides, without Pallas kernels."""
        known = chips.find(self.chip) if self.chip else None
        return self.costs.host_exposed_cycles / known.clock_hz if known else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values without the HLO's text, for `from_json`."""
        separate = ("costs", "alive", "text")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in separate}
        values["alive"] = [dataclasses.asdict(buffer) for buffer in self.alive]
        costs = {f.name: getattr(self.costs, f.name) for f in dataclasses.fields(self.costs)}
        return values | {"costs": {name: dict(v) if isinstance(v, Counter) else v for name, v in costs.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Compiled:
        """Reads the result of `to_json`.

        Raises:
          ValueError: the values are not those of a report.
        """
        try:
            costs: dict[str, Any] = {
                k: Counter(v) if isinstance(v, Mapping) else float(v) for k, v in values["costs"].items()
            }
            alive = tuple(hbm_peak.Buffer(**buffer) for buffer in values["alive"])
            report = cls(**{**values, "costs": hlo.Costs(**costs), "alive": alive})
            numbers = [getattr(report, f.name) for f in dataclasses.fields(report) if f.name.endswith(("_bytes", "_s"))]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a compiler report: {error}") from error
        if not isinstance(report.fits, bool) or not all(n is None or isinstance(n, (int, float)) for n in numbers):
            raise ValueError("not a compiler report: fits must be true or false, sizes and times numbers")
        if report.fits and report.peak_bytes is None:
            raise ValueError("not a compiler report: a step that fits must have a peak")
        return report


def compile_train_step(lowered: jax.stages.Lowered, flags: Mapping[str, str] | None = None) -> Compiled:
    """Compiles a step that was lowered for the devices of a slice (hardware.topology.slice_devices).

    Args:
      lowered: the step with donated state, from training's lower_step.
      flags: XLA options by name, from hardware.xla_flags.options.

    Returns:
      The report, also for a step that does not fit; any other compiler error is raised.
    """
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = lowered.compile(compiler_options={**(flags or {}), **assignment.options(folder)})
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(str(error)):
                raise
            used, limit = hbm_need(str(error))
            return Compiled(fits=False, peak_bytes=used, limit_bytes=limit, compile_s=time.perf_counter() - begin_s)
        return read(compiled, time.perf_counter() - begin_s, assignment.hbm_bytes(folder))


def read(compiled: jax.stages.Compiled, compile_s: float, hbm_bytes: int | None = None) -> Compiled:
    """The report of a compiled program.

    Args:
      compiled: the program.
      compile_s: its compile time in seconds.
      hbm_bytes: assignment.hbm_bytes of its compile; None: the compiler's peak, which is too high if the buffers in the
        host's memory are more than the temporaries in HBM.
    """
    memory, text, chip = compiled.memory_analysis(), compiled.as_text(), _chip(compiled)
    assert memory is not None and text is not None, "the TPU compiler provides both"
    host = {
        "host_argument_bytes": memory.host_argument_size_in_bytes,
        "host_output_bytes": memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes,
        "host_temporary_bytes": memory.host_temp_size_in_bytes,
    }
    module = hlo.parse(text)
    moment = hbm_peak.at_peak(module)
    argument_bytes = memory.argument_size_in_bytes
    output_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        fits=True,
        peak_bytes=memory.peak_memory_in_bytes if hbm_bytes is None else hbm_bytes,
        compile_s=compile_s,
        limit_bytes=int(chip.device_usable_hbm_bytes) if chip else None,
        argument_bytes=argument_bytes,
        output_bytes=output_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        **host,
        chip=chip.name if chip else None,
        costs=hlo.costs(
            module, host_bytes_per_cycle=chip.device_pcie_bytes_per_s / chip.clock_hz if chip else math.inf
        ),
        alive_bytes=moment.bytes,
        alive=moment.buffers[:_ALIVE],
        text=text,
    )


def fingerprint(lowered: jax.stages.Lowered, slice_name: str, mesh: jax.sharding.Mesh, flags: Mapping[str, str]) -> str:
    """SHA-256 of the compiler's inputs: the program, the devices in the mesh's order and the XLA options.

    Names of the program's parts count, since a report names buffers by them. The hash is the same in every checkout if
    the step was lowered within proof.without_locations.
    """
    facts = {"slice": slice_name, "devices": [device.id for device in mesh.devices.flat], "flags": dict(flags)}
    text = json.dumps(facts, sort_keys=True) + lowered.as_text(debug_info=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _chip(compiled: jax.stages.Compiled) -> chips.Chip | None:
    """The chip that a program is compiled for; None if it is unknown or the program has no arguments."""
    for sharding in jax.tree.leaves(compiled.input_shardings):
        return chips.find(next(iter(sharding.device_set)).device_kind)
    return None


def out_of_memory(message: str) -> bool:
    """Whether a compiler's error says that the program does not fit the HBM."""
    exhausted = "RESOURCE_EXHAUSTED" in message and any(words in message for words in _OUT_OF_HBM)
    return exhausted or "CompileTimeHbmOom" in message


def hbm_need(message: str) -> tuple[int | None, int | None]:
    """(bytes needed, bytes available) from an out-of-memory error; None where it does not say.

    The bytes needed may be those of temporaries alone, which is at most the whole need.
    """
    match = _USED.search(message)
    if not match:
        return None, None
    sizes = [text for text in match.groups() if text is not None]
    used, limit = (int(float(sizes[i]) * _UNITS[sizes[i + 1].upper()]) for i in (0, 2))
    return used, limit
