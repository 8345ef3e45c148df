"""Utilisation, HBM and throttling of TPU chips, from libtpu's monitoring.

libtpu answers while it holds Python's lock, and where it cannot reach what it asks, it tries for minutes. So another process
asks; it reads the counters of the process that uses the chips.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

# Name of libtpu -> ours. The values are strings, one for each local chip.
METRICS = {
    "tensorcore_util": "tensorcore_util_percent",
    "duty_cycle_pct": "duty_cycle_percent",
    "hbm_capacity_usage": "hbm_used_bytes",
    "hbm_capacity_total": "hbm_total_bytes",
    "tpu_throttle_score": "throttle_score",
}
_CODE = """
import json, sys, time
from libtpu.sdk import tpumonitoring
while True:
    metrics = {}
    for name in sys.argv[2:]:
        try:
            metrics[name] = [str(value) for value in tpumonitoring.get_metric(name).data()]
        except Exception:
            pass
    print(json.dumps(metrics), flush=True)
    time.sleep(float(sys.argv[1]))
"""
_STALE = 3  # intervals after which an answer is too old


class TpuReader:
    """Asks libtpu's monitoring, in a process of its own that ends with `close`, or with this process.

    Args:
      every_s: seconds between two answers.
      command: what runs instead of Python with libtpu, for tests.
    """

    def __init__(self, every_s: float, command: tuple[str, ...] = (sys.executable, "-c", _CODE)):
        self._every_s, self._latest, self._latest_s = every_s, dict[str, list[float | None]](), -math.inf
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [*command, str(every_s), *METRICS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, name="libtpu", daemon=True).start()

    def read(self) -> Mapping[str, list[float | None]]:
        """The newest values of each local chip by our names; empty: libtpu does not answer."""
        return self._latest if time.monotonic() - self._latest_s < _STALE * self._every_s + 5.0 else {}

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                result = {
                    METRICS[name]: [_number(value) for value in values] for name, values in json.loads(line).items()
                }
                self._latest, self._latest_s = (
                    {name: values for name, values in result.items() if values},
                    time.monotonic(),
                )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
