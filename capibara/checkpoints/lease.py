"""One writer at a time: the lease on a checkpoints folder.

Of several that reach for it at once exactly one gets it: on a disk by the folder's lock, in a bucket by the version that
each has seen of the file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from capibara.core import processes
from capibara.core.multihost import hosts
from capibara.core.types import UserError
from capibara.storage import stores
from capibara.storage.store import Changed, Locked

NAME = "lease.json"
_STALE_AFTER_S = 60.0  # without a sign of life from another host
_RENEWALS = 6  # in that time
_LOOK_S = 1.0
_LOCK_S = 10.0  # for the lock of the folder, which nobody holds for longer than it takes to write the file
_JOIN_S = 5.0  # more than that for the thread that renews it
_SEEN_S = 20.0  # in which what process 0 writes must be seen everywhere: network disks remember for some seconds
_MOST_BYTES = 1 << 16  # of a record, which has some hundred


class Lease:
    """The right to change a folder, held from here to `release`.

    The file names its holder: process, host and a random nonce. Where process ids mean the same to it and to us (one
    host, one boot, one pid namespace), that of a process that has died is taken over at once. Any other, such as that of
    another host or container, is taken over when it is not renewed within `stale_after_s`, for which this waits: the
    clocks of hosts differ.

    Args:
      folder: exists.
      stale_after_s: seconds without a renewal after which another host's lease counts for nothing.

    Raises:
      UserError: another process holds it, or the folder's lock for longer than anybody needs it (a process that is
        stopped just then), or a folder has its name.
    """

    def __init__(self, folder: epath.Path, stale_after_s: float = _STALE_AFTER_S):
        self._folder, self._path, self._stale_after_s = folder, folder / NAME, stale_after_s
        self._store = stores.of(folder)
        self.nonce = secrets.token_hex(8)
        self._ended, self._said = threading.Event(), False
        self._take()
        self._renewing = threading.Thread(target=self._renew, name="capibara-lease", daemon=True)
        self._renewing.start()

    def check(self) -> None:
        """Raises UserError where another process has taken the lease over: what we would write now is its to write."""
        holder = _read(self._path)[0] or {}
        if holder.get("nonce") != self.nonce:
            by = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "nobody"
            raise UserError(f"{self._folder} was taken over by {by} meanwhile: only one run may write to a MODEL_DIR")

    def release(self) -> None:
        """Gives it back; another holder's is left alone."""
        self._ended.set()
        self._renewing.join(_LOCK_S + _JOIN_S)
        # The folder may be gone by now, its lock held, or the bucket closed to us: then the lease runs out.
        with contextlib.suppress(Exception), self._store.lock(self._folder, _LOCK_S):
            holder, version = _read(self._path)
            if (holder or {}).get("nonce") != self.nonce:
                return
            self._store.remove_version(self._path, version)

    def _take(self) -> None:
        begin_s, first = time.monotonic(), _read(self._path)[0]
        while True:
            with _lock_explained(self._folder), self._store.lock(self._folder, _LOCK_S):
                holder, version = _read(self._path)
                unchanged = holder == first and time.monotonic() - begin_s >= self._stale_after_s
                if holder is None or unchanged or self._is_dead(holder):
                    if self._write(version):
                        return
                    continue  # another was quicker: who?
            if holder != first or self._is_here(holder):
                stopped = self._is_here(holder) and processes.is_stopped(holder.get("pid"))
                raise UserError(
                    f"{self._folder} is being written by process {holder.get('pid')} on {holder.get('host')}"
                    f"{', which is stopped (SIGSTOP)' if stopped else ''}: {'end' if stopped else 'stop'} it first, "
                    f"or set another MODEL_DIR (or remove {NAME} there, if you are sure that it has ended)"
                )
            if not self._ended.wait(min(_LOOK_S, self._stale_after_s / _RENEWALS)):
                self._say_once(holder)

    def _write(self, seen: str) -> bool:
        """Whether the file has our record now: in a bucket it stays as it is where it is not at the version `seen`."""
        record = json.dumps(self._record()).encode()
        try:
            self._store.write_version(self._path, record, seen)
        except Changed:
            return False
        except IsADirectoryError:
            raise UserError(f"{self._path} is a folder, must be a file or not there: remove it") from None
        return True

    def _say_once(self, holder: dict[str, Any]) -> None:
        if not self._said:
            self._said = True
            logging.getLogger(__name__).warning(
                "%s was being written by process %s on %s: waiting up to %.0f s for a sign of life",
                self._folder, holder.get("pid"), holder["host"], self._stale_after_s,
            )  # fmt: skip

    def _record(self) -> dict[str, Any]:
        pid = os.getpid()
        return {
            "pid": pid,
            "process_start": processes.start_of(pid),
            **_here(),
            "nonce": self.nonce,
            "renewed": time.time(),
        }

    def _renew(self) -> None:
        while not self._ended.wait(self._stale_after_s / _RENEWALS):
            # Whatever is wrong, and buckets have errors of their own, the next renewal may succeed.
            with contextlib.suppress(Exception), self._store.lock(self._folder, _LOCK_S):
                holder, version = _read(self._path)
                if (holder or {}).get("nonce") == self.nonce:
                    self._write(version)

    def _is_here(self, holder: dict[str, Any]) -> bool:
        """Whether its process id means the same to us: containers may share a host name, and have a process 1 each."""
        return all(value is not None and holder.get(name) == value for name, value in _here().items())

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        """Whether nobody can be behind it, as far as can be told at once."""
        if self._is_here(holder):
            # A process id is used again after a while; with the time of its start it is not.
            return processes.start_of(holder.get("pid")) != holder.get("process_start")
        return not {"host", "nonce", "renewed"} <= holder.keys()


def _here() -> dict[str, str | None]:
    return {"host": socket.gethostname(), "boot": processes.boot_id(), "pid_namespace": processes.pid_namespace()}


@contextlib.contextmanager
def _lock_explained(folder: epath.Path) -> Iterator[None]:
    """Makes the lock that is not given back a mistake of the user's, with the name of who holds it."""
    try:
        yield
    except Locked as locked:
        (pid,), record = locked.args, _read(folder / NAME)[0] or {}
        # No process of ours: of another container, or of a host that shares the disk.
        pid, host = (pid, socket.gethostname()) if pid is not None else (record.get("pid"), record.get("host"))
        who = "another process" if pid is None else f"process {pid} on {host}"
        stopped = host == socket.gethostname() and processes.is_stopped(pid)
        raise UserError(
            f"{folder} is locked by {who}{', which is stopped,' if stopped else ''} for more than {_LOCK_S:g} s: "
            f"{f'continue it (kill -CONT {pid})' if stopped else 'wait for it'} or end it, or set another MODEL_DIR"
        ) from None


def check_shared(folder: epath.Path, lease: Lease | None) -> None:
    """Raises UserError where this process does not see what process 0 has written; every process calls it.

    Args:
      folder: of the lease.
      lease: of process 0; None in the others.
    """
    nonce = hosts.gathered(None if lease is None else lease.nonce)[0]
    if lease is None and not _is_seen(folder, nonce, _SEEN_S):
        raise UserError(
            f"{folder} on {socket.gethostname()} is not the folder that process 0 writes to: name a MODEL_DIR that "
            "all hosts share, in a bucket (gs://...) or on a network disk"
        )


def _is_seen(folder: epath.Path, nonce: str, within_s: float) -> bool:
    """Whether this process sees, within so many seconds, that the lease with this nonce is held."""
    until_s = time.monotonic() + within_s
    while (_read(folder / NAME)[0] or {}).get("nonce") != nonce:
        if time.monotonic() >= until_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _read(path: epath.Path) -> tuple[dict[str, Any] | None, str]:
    """The record of a lease, None where there is none that can be read; and the file's version in a bucket.

    Raises:
      OSError: the bucket cannot be read.
    """
    content, version = stores.of(path).read_version(path, _MOST_BYTES)
    try:
        record = json.loads(content)
    except ValueError:
        record = None
    return (record if isinstance(record, dict) else None), version
