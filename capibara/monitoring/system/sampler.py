"""Samples what the run uses of its machine and devices, and warns before memory runs out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError
from capibara.monitoring.system import compiles, devices, facts, host
from capibara.monitoring.system.tpu import METRICS, TpuReader
from capibara.storage import stores
from capibara.training.base.callbacks import Callback, RunInfo, SystemValue

_STEPS = 1000  # newest step times of which percentiles are taken
_PERCENTILES = (50, 90, 99)
_END_S = 5.0  # for the last sample


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemMetrics:
    """How memory, CPU and devices are watched, on process 0.

    Attributes:
      every_s: seconds between two samples; 0: nothing is sampled.
      warn_share: the share of the memory of the host, or of a device, above which a run warns, once for each; 1: never.
    """

    every_s: float = 10.0
    warn_share: float = 0.9

    def __post_init__(self) -> None:
        if not (self.every_s == 0 or 0.1 <= self.every_s <= 3600):
            raise UserError(f"SystemMetrics.every_s is {self.every_s}, must be from 0.1 to 3600 seconds, or 0: try 10")
        if not 0 < self.warn_share <= 1:
            raise UserError(f"SystemMetrics.warn_share is {self.warn_share}, must be above 0 and at most 1: try 0.9")


class SystemSampler(Callback):
    """Reports samples to the other callbacks, by `on_system`, from a thread.

    Args:
      how: options.
      report: the callbacks.
    """

    def __init__(self, how: SystemMetrics, report: Callback):
        self._how, self._report = how, report
        self._run: RunInfo  # set by on_train_begin
        self._step = 0
        self._step_times_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._cpu = host.CpuMeter()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()
        self._has_failed = False
        self._tpu: TpuReader | None = None
        compiles.count()  # counts from now on

    def on_train_begin(self, run: RunInfo) -> None:
        self._run, self._step = run, run.start_step

    def on_spent(self, step: int, seconds: Mapping[str, float]) -> None:
        if self._thread is None:  # now every callback has begun
            self._thread = threading.Thread(target=self._sample_until_end, name="system metrics", daemon=True)
            self._thread.start()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        if (step_s := metrics.get("step_s")) is not None and math.isfinite(step_s):
            self._step_times_s.append(step_s)

    def on_roll_back(self, step: int) -> None:
        self._step = step

    def on_train_end(self, step: int, reason: str) -> None:
        self._step = step
        self.close()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _sample_until_end(self) -> None:
        about = f"{self._run.device_count} x {self._run.device_kind}"
        with self._reading():
            self._report.on_facts(self._run.start_step, facts.of_process(about, jax.process_count()))
        with contextlib.ExitStack() as stack:
            if jax.default_backend() == "tpu" and extras.version("libtpu") is not None:
                with self._reading():
                    self._tpu = TpuReader(self._how.every_s)
                    stack.callback(self._tpu.close)
            while not self._ended.wait(self._how.every_s):
                self._sample()
            self._sample()

    def _sample(self) -> None:
        with self._reading():
            values = self._host() | self._devices() | self._program()
            if warning := self._warning(values):
                values["warning"] = warning
                self._report.on_status(warning)
            self._report.on_system(self._step, values)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """A context whose errors are logged once: what cannot be read on an odd machine must not end a run."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logging.getLogger(__name__).warning("system metrics cannot be read", exc_info=True)

    def _host(self) -> dict[str, SystemValue]:
        memory, (machine_percent, own_percent) = host.memory(), self._cpu.read()
        return {
            "host_memory_bytes": memory.used_bytes,
            "host_memory_limit_bytes": memory.limit_bytes,
            "process_memory_bytes": memory.process_bytes,
            "host_cpu_percent": machine_percent,
            "process_cpu_percent": own_percent,
            "cpus": host.cpus(),
            "disk_free_bytes": stores.of(self._run.model_dir).free_bytes(self._run.model_dir),
        }

    def _devices(self) -> dict[str, SystemValue]:
        memory = devices.memory()
        tpu = {} if self._tpu is None else self._tpu.read()
        each: dict[str, Sequence[float | None]] = {
            "device_memory_bytes": memory.used_bytes,
            "device_memory_peak_bytes": memory.peak_bytes,
            "device_memory_limit_bytes": memory.limit_bytes,
            **{name: tpu.get(name, ()) for name in METRICS.values()},
        }
        result: dict[str, SystemValue] = {
            name: (_mean if name.endswith("_percent") else _highest)(values) for name, values in each.items()
        }
        known = {name: list(item) for name, item in each.items() if len(item) > 1 and any(v is not None for v in item)}
        return result | ({"devices": known} if known else {})

    def _program(self) -> dict[str, SystemValue]:
        compiled, compile_s = compiles.count()
        times_s = list(self._step_times_s)
        marks = np.percentile(times_s, _PERCENTILES).tolist() if times_s else [None] * len(_PERCENTILES)
        steps = {f"step_s_p{percent}": mark for percent, mark in zip(_PERCENTILES, marks)}
        return {"compile_s": compile_s, "compiles": compiled, **steps}

    def _warning(self, values: Mapping[str, SystemValue]) -> str | None:
        """A line on memory that is nearly full, once for the host and once for the devices."""
        for source in ("host", "device"):
            used, limit = values[f"{source}_memory_bytes"], values[f"{source}_memory_limit_bytes"]
            if not isinstance(used, (int, float)) or not isinstance(limit, (int, float)) or source in self._warned:
                continue
            if used >= self._how.warn_share * limit > 0 and self._how.warn_share < 1:
                self._warned.add(source)
                largest = devices.listed(devices.largest(arrays=self._run.arrays))
                return (
                    f"warning: {source} memory is nearly full: {used / 2**30:.2f} of {limit / 2**30:.2f} GiB "
                    f"({used / limit:.0%}); largest arrays on a device: {largest}"
                )
        return None


def _highest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
