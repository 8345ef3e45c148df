"""Starts a dashboard beside a run, in a process of its own that ends with the run."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading

from capibara.config import written
from capibara.monitoring.dashboard.settings import DashboardConfig
from capibara.training.base.callbacks import Callback, RunInfo

_WEBHOOKS = "CAPIBARA_DASHBOARD_WEBHOOKS"
_ADDRESS = re.compile(r"dashboard: http://\S+")
_END_S = 1.0


class DashboardProcess(Callback):
    """Serves the run folder's metrics to browsers on this machine, and prints the address once.

    Training never waits for it: it is started in a thread, and what goes wrong with it is one line.

    Args:
      config: the options.
      report: gets the address, from a thread.
    """

    def __init__(self, config: DashboardConfig, report: Callback):
        self._config, self._report = config, report
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._is_ended = threading.Lock(), False

    def on_train_begin(self, run: RunInfo) -> None:
        thread = threading.Thread(target=self._start, args=(run.model_dir,), name="dashboard", daemon=True)
        thread.start()

    def on_train_end(self, step: int, reason: str) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._is_ended = True
            process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)

    def _start(self, folder: str) -> None:
        # Webhooks may hold secrets, which others would see among the arguments.
        urls = " ".join([os.environ.get(_WEBHOOKS, ""), *self._config.webhooks]).split()
        bindings = [line for line in written.bindings(self._config) if _field(line) not in ("", "webhooks", "port")]
        command = [
            sys.executable,
            "-P",
            "-m",
            "capibara.dashboard",
            folder,
            f"--port={self._config.port}",
            "--next_ports",
        ]
        command += [f"--parent={os.getpid()}", *(f"--gin_bindings={line}" for line in bindings)]
        paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _package_folder()]))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, _WEBHOOKS: " ".join(urls)}
        try:
            with self._lock:
                if self._is_ended:
                    return
                self._process = process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # ctrl-C is meant for the run, which then ends this process
                )
        except OSError as error:
            self._report.on_status(f"the dashboard cannot be started: {error}")
            return
        assert process.stdout is not None
        with process.stdout as lines:
            fault, has_begun = "it ended", False
            for line in map(str.strip, lines):  # also after its address: a full pipe would hold it up
                if not has_begun and _ADDRESS.match(line):
                    has_begun = True
                    self._report.on_status(line)
                elif line:  # a warning of Python's, or why it ends
                    fault = line.removeprefix("error: ")[:300]
            if not has_begun and not self._is_ended:
                self._report.on_status(f"the dashboard cannot be started: {fault}")
        process.wait()


def _field(binding: str) -> str:
    """The name of the field that a line of Gin binds; empty: it binds none."""
    return binding.partition("=")[0].strip().rpartition(".")[2]


def _package_folder() -> str:
    """The folder that holds the package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
