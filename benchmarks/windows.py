"""What processes cost a training beside them: they are stopped and run in turns, and windows are compared with their neighbours.

Each window's time of a step is divided by the mean of the windows before and after it, in which the processes are stopped;
`slower` is the mean of these ratios without the lowest and the highest fifth of them, in which other machines of the same host
were busy or idle; `slower_all` is that of all. The control divides windows in which they are stopped by their neighbours of the
same kind. `_low` and `_high` hold the mean in 95% of samples of the windows.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

WINDOW_S, SETTLE_S = 2.0, 0.5


def compared(processes: Mapping[str, int], windows: int, times: Callable[[], Sequence[float]]) -> dict[str, float]:
    """Lets processes run in some windows of time, and compares.

    Args:
      processes: name -> the process, which is stopped and continued with all those that it has started.
      windows: in which they run.
      times: when each step of the training was logged, in seconds since 1970; called at the end.

    Returns:
      slower, control, each with _low, _high and _all; step_ms beside nothing; NAME_cpu_percent of one core.
    """
    spans: list[tuple[float, float]] = []
    used_s = dict.fromkeys(processes, 0.0)
    for number in range(2 * windows + 1):
        is_on = number % 2 == 1
        signal_all(processes.values(), signal.SIGCONT if is_on else signal.SIGSTOP)
        time.sleep(SETTLE_S)  # what had to wait is not measured
        begin_s, before_s = time.time(), {name: on_core_s(pid) for name, pid in processes.items()}
        time.sleep(WINDOW_S)
        spans.append((begin_s, time.time()))
        for name, pid in processes.items():
            used_s[name] += (on_core_s(pid) - before_s[name]) * is_on
    signal_all(processes.values(), signal.SIGCONT)
    logged = times()
    step_s = [seconds_per_step([one for one in logged if begin < one < end]) for begin, end in spans]
    found = {"step_ms": 1000 * statistics.median(step_s[::2])}
    for name, ratios in (("slower", beside_neighbours(step_s)), ("control", beside_neighbours(step_s[::2]))):
        found[name], found[f"{name}_all"] = middle_mean(ratios), statistics.fmean(ratios)
        found[f"{name}_low"], found[f"{name}_high"] = interval(ratios)
    return found | {f"{name}_cpu_percent": 100 * one / (windows * WINDOW_S) for name, one in used_s.items()}


def beside_neighbours(values: Sequence[float]) -> list[float]:
    """Every second value over the mean of the one before and the one after it."""
    triples = zip(values[::2], values[1::2], values[2::2])
    return [one / statistics.fmean((before, after)) for before, one, after in triples]


def middle_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest fifth."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def seconds_per_step(times: Sequence[float]) -> float:
    """The mean of the times between lines."""
    return (times[-1] - times[0]) / (len(times) - 1)


def interval(values: Sequence[float], samples: int = 10_000) -> tuple[float, float]:
    """The range that holds 95% of the middle means of samples of the values, drawn with replacement."""
    draws = random.Random(0)
    means = sorted(middle_mean(draws.choices(values, k=len(values))) for _ in range(samples))
    return means[int(0.025 * samples)], means[int(0.975 * samples)]


def signal_all(pids: Sequence[int], which: signal.Signals) -> None:
    """Sends a signal to processes and to those that they have started."""
    for pid in pids:
        for one in family(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, which)


def on_core_s(pid: int) -> float:
    """Seconds that a process and those that it has started were on a core, to the nanosecond: for short windows."""
    total = 0
    for one in family(pid):
        for path in pathlib.Path(f"/proc/{one}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(path.read_text().split()[0])
    return total / 1e9


def family(pid: int) -> list[int]:
    """A process and those that it has started."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):  # each thread has those that it has started
            for path in pathlib.Path(f"/proc/{one}/task").glob("*/children"):
                found += map(int, path.read_text().split())
    return found
