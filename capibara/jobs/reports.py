"""What the hosts of a job report to whoever manages it, as files in the job's storage: that they run, and how it ended.

  STORAGE/jobs/NAME/reports/LAUNCH-ATTEMPT/HOST.json

Each host writes its own file every half a minute, so a file that stays the same is the sign of a host that hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

from capibara.core import limits
from capibara.core.types import TryAgain
from capibara.multihost import exits
from capibara.storage import stores

EVERY_S = 30.0
_LARGEST = 1 << 16  # bytes
_LONGEST = 500  # characters of a message
# The index of this host, as the systems for jobs set it. Source: capibara.multihost.
INDICES = ("TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "SLURM_PROCID", "JAX_PROCESS_ID")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What one host says.

    Attributes:
      host: its name.
      beats: how often it has reported in this start of its launcher.
      started_s: when its launcher started, in seconds since 1970, by its own clock.
      code: the exit code of the verb; None: it runs.
      message: why it ended, in one line; may be empty.
    """

    host: str
    beats: int
    started_s: float
    code: int | None = None
    message: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the launcher will not start the verb again by itself."""
        return self.code is not None


class Reporter:
    """Reports from this host until the end of a `with` block; `end` says how it ended.

    A storage that does not answer must not end a run: what fails is tried again with the next report.

    Args:
      folder: for the reports of this attempt; empty: nothing is reported.
      every_s: seconds between two reports.
      say: called with a line when reports fail, and when they succeed again.
    """

    def __init__(self, folder: str, *, every_s: float = EVERY_S, say: Callable[[str], None] = print):
        self._folder, self._every_s, self._say = folder, every_s, say
        self._report = Report(host=host_name(), beats=0, started_s=time.time())
        self._ended, self._fails = threading.Event(), False
        self._thread = threading.Thread(target=self._repeat, name="capibara-reports", daemon=True)

    def __enter__(self) -> Self:
        if self._folder:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._folder:
            self._thread.join(self._every_s)

    def end(self, code: int, message: str = "") -> None:
        """Reports the exit code; tries a few times, since a run that has ended costs money until this is known."""
        self._ended.set()
        if not self._folder:
            return
        self._thread.join(self._every_s)
        self._report = dataclasses.replace(self._report, code=code, message=" ".join(message.split())[:_LONGEST])
        for pause_s in (1.0, 5.0, 15.0, 0.0):
            if self._write():
                return
            time.sleep(pause_s)

    def _repeat(self) -> None:
        while True:
            self._write()
            if self._ended.wait(self._every_s):
                return

    def _write(self) -> bool:
        self._report = dataclasses.replace(self._report, beats=self._report.beats + 1)
        try:
            path = stores.folder_of(f"{self._folder}/{self._report.host}.json")
            store = stores.of(path)
            store.make_folder(path.parent)
            store.write_atomic(path, json.dumps(dataclasses.asdict(self._report)).encode())
        except Exception as error:  # of any bucket library
            if not self._fails:
                self._say(f"the report of this host cannot be written: {type(error).__name__}: {error}")
            self._fails = True
            return False
        if self._fails:
            self._say("the reports of this host are written again")
        self._fails = False
        return True


def host_name() -> str:
    """A name of this host that no other host of the job has."""
    index = next((os.environ[name] for name in INDICES if os.environ.get(name)), None)
    slice_ = os.environ.get("MEGASCALE_SLICE_ID")
    parts = [part for part in (socket.gethostname(), slice_, index) if part]
    return re.sub(r"[^A-Za-z0-9.-]", "-", "-".join(parts))


def read(folder: str) -> dict[str, Report]:
    """The reports of an attempt's hosts, by name; a file that is none counts as missing.

    Raises:
      TryAgain: the storage cannot be read.
    """
    result: dict[str, Report] = {}
    try:
        path = stores.folder_of(folder)
        store = stores.of(path)
        for file in sorted(path.glob("*.json")) if path.exists() else ():
            with contextlib.suppress(FileNotFoundError, ValueError, RecursionError, limits.Refused):
                result[file.stem] = _report(json.loads(store.read(file, most=_LARGEST)))
    except Exception as error:  # of any bucket library
        raise TryAgain(f"{folder} cannot be read: {type(error).__name__}: {error}") from None
    return result


def _report(values: object) -> Report:
    if not isinstance(values, dict):
        raise ValueError
    host, beats, started_s, code = (values.get(name) for name in ("host", "beats", "started_s", "code"))
    if not (isinstance(host, str) and isinstance(beats, int) and isinstance(started_s, (int, float))):
        raise ValueError
    if not (code is None or (isinstance(code, int) and 0 <= code <= 255)):
        raise ValueError
    message = str(values.get("message", ""))[:_LONGEST]
    return Report(host=host, beats=beats, started_s=float(started_s), code=code, message=message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the reports of all hosts amount to.

    Attributes:
      code: 0: all hosts have succeeded; another: the exit code of one that has ended otherwise; None: it runs.
      message: of that host.
    """

    code: int | None = None
    message: str = ""


def outcome(host_reports: Mapping[str, Report], hosts: int) -> Outcome:
    """What the reports of a job's hosts amount to.

    Args:
      host_reports: the reports.
      hosts: how many hosts the job has.
    """
    ended = [report for report in host_reports.values() if report.is_final]
    bad = [report for report in ended if report.code != 0]
    if bad:  # the user's mistake says most
        worst = next((report for report in bad if report.code == exits.EXIT_USER_ERROR), bad[0])
        return Outcome(code=worst.code, message=f"{worst.host}: {worst.message}" if worst.message else worst.host)
    return Outcome(code=0) if len(ended) >= hosts > 0 else Outcome()
