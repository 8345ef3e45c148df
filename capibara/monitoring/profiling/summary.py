"""What a trace says in words: where the devices' time went."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from capibara.monitoring.profiling.categories import COLLECTIVES
from capibara.monitoring.profiling.trace import Lane, Trace

_Key = TypeVar("_Key")
_LARGEST = 10  # operations that are named


@dataclasses.dataclass(frozen=True)
class Summary:
    """Where the devices' time went, as means over the devices.

    Attributes:
      devices: their number.
      steps: the traced steps.
      step_s: mean seconds of a step.
      busy: share of the time in which a device runs an operation.
      by_category: share of the time by category of operation, the largest first. An operation that runs others
        (a loop) counts only what they leave.
      collectives: share of the time in which a device runs nothing but collectives.
      largest: operations with their share of the time, and how often they ran on one device in a step.
    """

    devices: int
    steps: int
    step_s: float
    busy: float
    by_category: dict[str, float]
    collectives: float
    largest: tuple[tuple[str, str, float, float], ...]

    def as_json(self) -> dict[str, Any]:
        """The summary as JSON."""
        largest = [dict(zip(("name", "category", "share", "times_a_step"), item, strict=True)) for item in self.largest]
        return dataclasses.asdict(self) | {"idle": 1.0 - self.busy, "largest": largest}

    def text(self) -> str:
        """The summary in words."""
        devices = f"{self.devices} device{'s' * (self.devices != 1)}"
        lines = [
            f"{self.steps} step{'s' * (self.steps != 1)} of {self.step_s * 1e3:,.1f} ms on {devices}; a device is busy {self.busy:.0%} of the time, "
            f"and idle {1 - self.busy:.0%}",
            f"collectives that nothing overlaps take {self.collectives:.0%}",
            *(f"  {share:>6.1%}  {name}" for name, share in self.by_category.items()),
            "the operations that take longest:",
            *(
                f"  {share:>6.1%}  {name} ({category}), {times:,.1f} times a step"
                for name, category, share, times in self.largest
            ),
        ]
        return "\n".join([*lines, *self.advice()])

    def advice(self) -> list[str]:
        """What to look at first, where the figures support it."""
        result = []
        if self.busy < 0.8:
            result.append(
                "the devices wait for the host: compare data_wait_s with step_s, raise Plan.batch_size, or log less often "
                "(Trainer.log_every)"
            )
        if self.collectives > 0.2:
            result.append(
                "collectives bound the step: try less of Plan.tensor, larger batches, or `capibara plan` for another mesh"
            )
        copies = self.by_category.get("copies and layouts", 0.0)
        if copies > 0.2:
            result.append("copies and changes of layout take much: rematerialisation or odd dimensions may cause them")
        return result


def summarised(traces: Sequence[Trace], steps: int) -> Summary | None:
    """The summary of the traces of all hosts; None: they have no operation of a device.

    Args:
      traces: one for each host.
      steps: number of traced steps.
    """
    by_device: dict[tuple[int, str], list[Lane]] = {}
    for host, trace in enumerate(traces):
        for lane in trace.lanes:
            by_device.setdefault((host, lane.device), []).append(lane)
    if not by_device:
        return None
    busy = collectives = window_s = 0.0
    of_category: dict[str, float] = collections.defaultdict(float)
    of_op: dict[tuple[str, str], float] = collections.defaultdict(float)
    times: collections.Counter[tuple[str, str]] = collections.Counter()
    for lanes in by_device.values():
        ops = [op for lane in lanes for op in lane.ops]
        begin = min(op.begin_ns for op in ops)
        length = max(max(op.end_ns for op in ops) - begin, 1.0)
        window_s += length / 1e9
        all_ns = _union((op.begin_ns, op.end_ns) for op in ops)
        computing_ns = _union((op.begin_ns, op.end_ns) for op in ops if op.category != COLLECTIVES)
        busy += all_ns / length
        collectives += (all_ns - computing_ns) / length
        selves = [pair for lane in lanes for pair in zip(lane.ops, self_ns(lane))]
        # Threads of an emulated device run at once: their shares are scaled to the time in which any of them runs.
        scale = all_ns / max(sum(ns for _, ns in selves), 1.0)
        for op, ns in selves:
            share = scale * ns / length
            of_category[op.category] += share
            of_op[op.name, op.category] += share
            times[op.name, op.category] += 1
    count = len(by_device)
    largest = tuple(
        (name, category, share / count, times[name, category] / count / steps)
        for (name, category), share in _descending(of_op)[:_LARGEST]
    )
    return Summary(
        devices=count,
        steps=steps,
        step_s=window_s / count / steps,
        busy=busy / count,
        by_category={name: share / count for name, share in _descending(of_category)},
        collectives=collectives / count,
        largest=largest,
    )


def _descending(shares: Mapping[_Key, float]) -> list[tuple[_Key, float]]:
    return sorted(shares.items(), key=lambda item: item[1], reverse=True)


def self_ns(lane: Lane) -> list[float]:
    """The nanoseconds of each operation of a lane without those of the operations within it."""
    left = [op.end_ns - op.begin_ns for op in lane.ops]
    open_ops: list[int] = []
    for number, op in enumerate(lane.ops):
        while open_ops and lane.ops[open_ops[-1]].end_ns <= op.begin_ns:
            open_ops.pop()
        if open_ops:
            left[open_ops[-1]] -= min(op.end_ns, lane.ops[open_ops[-1]].end_ns) - op.begin_ns
        open_ops.append(number)
    return [max(ns, 0.0) for ns in left]


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
