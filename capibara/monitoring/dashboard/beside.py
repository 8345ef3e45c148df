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
from capibara.training.callbacks import Callback, RunInfo

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
        bindings = [
            f"--gin_bindings={line}" for line in written.text_of(self._config).split("\n") if "DashboardConfig." in line
        ]
        command = [
            sys.executable,
            "-P",
            "-m",
            "capibara.dashboard",
            folder,
            f"--port={self._config.port}",
            "--next_ports",
        ]
        command += [
            f"--parent={os.getpid()}",
            *(one for one in bindings if ".webhooks" not in one and ".port" not in one),
        ]
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
        with process.stdout or contextlib.nullcontext() as lines:
            first = (lines.readline() if lines is not None else "").strip()
            if _ADDRESS.match(first):
                self._report.on_status(first)
            elif not self._is_ended:
                self._report.on_status(
                    f"the dashboard cannot be started: {first.removeprefix('error: ')[:300] or 'it ended'}"
                )
            for _ in lines or ():  # a full pipe would hold it up
                pass
        process.wait()


def _package_folder() -> str:
    """The folder that holds the package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
