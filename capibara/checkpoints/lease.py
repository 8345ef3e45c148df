"""The lease on a checkpoints folder, which ensures that only one process writes to it.

If several processes try to take it at once, exactly one succeeds: on a disk by the folder's lock, in a bucket by the
version of the file that each has seen.
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
from capibara.core.types import UserError
from capibara.multihost import hosts
from capibara.storage import stores
from capibara.storage.store import Changed, Locked

NAME = "lease.json"
_STALE_AFTER_S = 60.0  # since the last renewal from another host
_RENEWALS = 6  # per that time
_LOOK_S = 1.0
LOCK_S = 10.0  # for the lock of the folder, which nobody holds for longer than it takes to write the file
_JOIN_S = 5.0  # more than that for the thread that renews it
SEEN_S = 20.0  # in which what process 0 writes must be seen everywhere: network disks remember for some seconds
_MOST_BYTES = 1 << 16  # of a record, which has some hundred


class Lease:
    """The exclusive right to change a folder, until `release`.

    The file names its holder: process, host and a random nonce. If process ids are comparable (same host, boot and pid
    namespace), the lease of a dead process is taken over at once. Any other one, for example of another host or
    container, is taken over if it is not renewed within `stale_after_s`, for which this waits, since hosts' clocks
    differ.

    Args:
      folder: must exist.
      stale_after_s: seconds without a renewal after which another host's lease has expired.

    Raises:
      UserError: another process holds it, or holds the folder's lock for too long (because it is stopped), or a folder
        has the file's name.
    """

    def __init__(self, folder: epath.Path, stale_after_s: float = _STALE_AFTER_S):
        self._folder, self._path, self._stale_after_s = folder, folder / NAME, stale_after_s
        self._store = stores.of(folder)
        self.nonce = secrets.token_hex(8)
        self._ended, self._has_warned = threading.Event(), False
        self._take()
        self._renewing = threading.Thread(target=self._renew, name="capibara-lease", daemon=True)
        self._renewing.start()

    def check(self) -> None:
        """Raises UserError if another process has taken over the lease: this one must not write any more."""
        holder = _read(self._path)[0] or {}
        if holder.get("nonce") != self.nonce:
            by = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "nobody"
            raise UserError(f"{self._folder} was taken over by {by} meanwhile: only one run may write to a MODEL_DIR")

    def release(self) -> None:
        """Releases the lease; does nothing if another process holds it."""
        self._ended.set()
        self._renewing.join(LOCK_S + _JOIN_S)
        # The folder may be gone, its lock held, or the bucket inaccessible: then the lease expires.
        with contextlib.suppress(Exception), self._store.lock(self._folder, LOCK_S):
            holder, version = _read(self._path)
            if (holder or {}).get("nonce") != self.nonce:
                return
            self._store.remove_version(self._path, version)

    def _take(self) -> None:
        begin_s, first = time.monotonic(), _read(self._path)[0]
        while True:
            with _lock_explained(self._folder), self._store.lock(self._folder, LOCK_S):
                holder, version = _read(self._path)
                unchanged = holder == first and time.monotonic() - begin_s >= self._stale_after_s
                if holder is None or unchanged or self._is_dead(holder):
                    if self._write(version):
                        return
                    continue  # another process was faster: check its lease
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
        """Writes our record; returns False if the file in a bucket no longer has the version `seen`."""
        record = json.dumps(self._record()).encode()
        try:
            self._store.write_version(self._path, record, seen)
        except Changed:
            return False
        except IsADirectoryError:
            raise UserError(f"{self._path} is a folder, must be a file or not there: remove it") from None
        return True

    def _say_once(self, holder: dict[str, Any]) -> None:
        if not self._has_warned:
            self._has_warned = True
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
            # Whatever the error is, and buckets have errors of their own, the next renewal may succeed.
            with contextlib.suppress(Exception), self._store.lock(self._folder, LOCK_S):
                holder, version = _read(self._path)
                if (holder or {}).get("nonce") == self.nonce:
                    self._write(version)

    def _is_here(self, holder: dict[str, Any]) -> bool:
        """Whether the holder's process id is comparable to ours: containers may share host names and process ids."""
        return all(value is not None and holder.get(name) == value for name, value in _here().items())

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        """Whether the holder is known to be dead."""
        if self._is_here(holder):
            # Process ids are reused; together with the start time they are unique.
            return processes.start_of(holder.get("pid")) != holder.get("process_start")
        return not {"host", "nonce", "renewed"} <= holder.keys()


def _here() -> dict[str, str | None]:
    return {"host": socket.gethostname(), "boot": processes.boot_id(), "pid_namespace": processes.pid_namespace()}


@contextlib.contextmanager
def _lock_explained(folder: epath.Path) -> Iterator[None]:
    """Turns a lock that is not released into a UserError with its holder."""
    try:
        yield
    except Locked as locked:
        (pid,), record = locked.args, _read(folder / NAME)[0] or {}
        # Not a process of this host: of another container, or of another host that shares the disk.
        pid, host = (pid, socket.gethostname()) if pid is not None else (record.get("pid"), record.get("host"))
        who = "another process" if pid is None else f"process {pid} on {host}"
        stopped = host == socket.gethostname() and processes.is_stopped(pid)
        raise UserError(
            f"{folder} is locked by {who}{', which is stopped,' if stopped else ''} for more than {LOCK_S:g} s: "
            f"{f'continue it (kill -CONT {pid})' if stopped else 'wait for it'} or end it, or set another MODEL_DIR"
        ) from None


def check_shared(folder: epath.Path, lease: Lease | None) -> None:
    """Raises UserError if this process does not see what process 0 has written; every process must call it.

    Args:
      folder: of the lease.
      lease: of process 0; None in the others.
    """
    nonce = hosts.gathered(None if lease is None else lease.nonce)[0]
    if lease is None and not _is_seen(folder, nonce, SEEN_S):
        raise UserError(
            f"{folder} on {socket.gethostname()} is not the folder that process 0 writes to: name a MODEL_DIR that "
            "all hosts share, in a bucket (gs://...) or on a network disk"
        )


def _is_seen(folder: epath.Path, nonce: str, within_s: float) -> bool:
    """Whether this process sees the lease with this nonce within `within_s` seconds."""
    until_s = time.monotonic() + within_s
    while (_read(folder / NAME)[0] or {}).get("nonce") != nonce:
        if time.monotonic() >= until_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _read(path: epath.Path) -> tuple[dict[str, Any] | None, str]:
    """The record of a lease, None if it cannot be read; and the file's version in a bucket.

    Raises:
      OSError: the bucket cannot be read.
    """
    content, version = stores.of(path).read_version(path, _MOST_BYTES)
    try:
        record = json.loads(content)
    except ValueError:
        record = None
    return (record if isinstance(record, dict) else None), version
