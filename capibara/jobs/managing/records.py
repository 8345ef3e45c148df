"""The jobs that were launched from here, in a SQLite database: each action is recorded before it is done.

A manager that is killed at any moment finds on its next start what it was about to do. The database's file is
CAPIBARA_STATE, or jobs.sqlite in XDG_STATE_HOME/capibara (~/.local/state/capibara).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import glob
import math
import os
import pathlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from capibara.core import limits, processes
from capibara.core.types import TryAgain, UserError
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing import spec_file
from capibara.jobs.spec import Attempt, JobSpec

_BUSY_S = 30.0  # for another process that writes
_NOTICE_S = 1.0  # of waiting, after which a line says so
_OPENING_S = 1.5  # for another process that has the whole file, while it is opened
_LATEST_S = 1e11  # of a time in a row
# Rows that SQLite's own check finds: each costs itself. Source: sqlite.org/pragma.html#pragma_integrity_check
_OF_A_ROW = re.compile(r"(?:NULL|TEXT|NUMERIC|non-\S+) value in \w+\.\w+")
_QUARANTINED, _RECOVERED = "corrupted", "recovered"
_VERSION = 1
_ID = 0x6361_7069  # of our databases, in the header of the file
_LOCK = b"of capibara's jobs\n"  # content of the locks
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)  # it is a file's name, too: of the job's lock
_MAGIC, _ID_AT = b"SQLite format 3\0", 68  # source: sqlite.org/fileformat2.html


class State(enum.StrEnum):
    """Where a job is.

    Attributes:
      SUBMITTING: a resource is to be created, or perhaps was.
      WAITING: its resource waits for chips.
      RUNNING: its resource has chips.
      REPLACING: its resource is being deleted; another one follows.
      ENDING: its resource is being deleted, and the job ends with `outcome`.
      SUCCEEDED: it has ended.
      FAILED: it has ended otherwise; `reason` says why.
      CANCELLED: the user has ended it.
    """

    SUBMITTING = "submitting"
    WAITING = "waiting"
    RUNNING = "running"
    REPLACING = "replacing"
    ENDING = "ending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing of the job is left to do."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a job. Times are in seconds since 1970; 0.0: it has not happened.

    Attributes:
      name: of the job.
      text: content of the job's own file (`spec_file`).
      attempt: which of its resources is the present one.
      state: where it is.
      reason: of the state, in one line; may be empty.
      outcome: how a job that is ENDING ends.
      launched_s: when the user has launched it.
      submit_s: when a call began to make the present resource whose answer has not come: perhaps there is one.
      due_s: when the next resource may be created.
      running_s: when the present resource was first seen with chips.
      gone_s: when the present resource was first missed.
      pauses: resources in a row that have not run for long: the longer is the pause before the next one.
    """

    name: str
    text: str
    attempt: Attempt
    state: State = State.SUBMITTING
    reason: str = ""
    outcome: State | None = None
    launched_s: float = 0.0
    submit_s: float = 0.0
    due_s: float = 0.0
    running_s: float = 0.0
    gone_s: float = 0.0
    pauses: int = 0

    def spec(self) -> tuple[Backend, JobSpec]:
        """The back end, and the spec of the present attempt."""
        backend, spec = spec_file.read_text(self.text)
        return backend, dataclasses.replace(spec, attempt=self.attempt)

    def spent_s(self, now_s: float) -> float:
        """The seconds that all its resources have had chips."""
        return self.attempt.spent_s + (max(0.0, now_s - self.running_s) if self.running_s else 0.0)


_TABLES = f"""
PRAGMA application_id = {_ID};
PRAGMA user_version = {_VERSION};
CREATE TABLE IF NOT EXISTS jobs (
  name TEXT PRIMARY KEY, text TEXT NOT NULL, launch TEXT NOT NULL, number INTEGER NOT NULL, failures INTEGER NOT NULL,
  spent_s INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, outcome TEXT, launched_s REAL NOT NULL,
  submit_s REAL NOT NULL, due_s REAL NOT NULL, running_s REAL NOT NULL, gone_s REAL NOT NULL, pauses INTEGER NOT NULL,
  is_cancelled INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS events (job TEXT NOT NULL, time_s REAL NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_of_job ON events (job);
"""
_COLUMNS = (
    "name text launch number failures spent_s state reason outcome launched_s submit_s due_s running_s gone_s pauses"
).split()


def default_path() -> pathlib.Path:
    """Where the database lies unless a flag says so."""
    if named := os.environ.get("CAPIBARA_STATE"):
        return pathlib.Path(named).expanduser()
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return pathlib.Path(root).expanduser() / "capibara" / "jobs.sqlite"


class Unreadable(UserError):
    """The row of a job is no record; the job's resources are as they were."""


class Records:
    """The database; several processes and threads may use it at once.

    A file that SQLite cannot read, as a disk that was full may leave it, is quarantined beside it, and an empty one takes its
    place: `capibara launch recover` fills it from the labels of the jobs' resources. Whoever opens the database learns of
    that file until then. A row that is no record costs that job alone.

    Every method raises TryAgain if the disk is full, or another process writes for half a minute.

    Args:
      path: of its file; folders are created.
      say: called with a line if a file was quarantined, a row is no record, or another process is waited for.

    Raises:
      UserError: the file cannot be opened, or is not of this program.
      TryAgain: another process has the whole file.
    """

    def __init__(self, path: pathlib.Path, say: Callable[[str], None] = print):
        self._say, self._reported, faults = say, set[str](), dict[str, str]()
        with _named(path):
            path = path.resolve()  # else a link would have a lock of its own
            self.path, self._lock = path, threading.RLock()
            if path.is_dir():
                raise UserError(f"{path} is a folder: name a file by --state")
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.exists() and path.stat().st_size and not _is_ours(path):
                raise UserError(f"{path} is no database of jobs: name another --state")
            with _locked(path.with_name(f"{path.name}.lock"), wait=True):
                try:
                    self._database = _opened(self.path)
                except sqlite3.DatabaseError as error:
                    if isinstance(error, sqlite3.OperationalError):
                        raise
                    faults[_set_aside(path).name] = limits.cause(error)
                    self._database = _opened(self.path)
        for aside in self.quarantined():
            cause = f" ({faults[aside.name]})" if aside.name in faults else ""
            self._say_once(
                f"{path} has not all jobs: {aside.name} was no readable database{cause}, and is quarantined; its jobs still "
                "run: find them with capibara launch recover",
                aside.name,
            )

    def _say_once(self, text: str, about: str) -> None:
        if about not in self._reported:
            self._reported.add(about)
            self._say(text)

    def quarantined(self) -> list[pathlib.Path]:
        """The files that were no readable databases, whose jobs nobody has found again yet."""
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.{_QUARANTINED}-*"))

    def recovered(self) -> list[pathlib.Path]:
        """Renames the quarantined files: their jobs were found again. Returns the new paths."""
        rename = lambda path: path.with_name(path.name.replace(f".{_QUARANTINED}-", f".{_RECOVERED}-"))  # noqa: E731
        return [aside.rename(rename(aside)) for aside in self.quarantined()]

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """For one thread alone; raises TryAgain where the disk is full or another process writes for too long."""
        text = f"{self.path} is in use by another process: waiting, at most {_BUSY_S:.0f} s"
        notice = threading.Timer(_NOTICE_S, self._say, [text])
        notice.daemon = True
        notice.start()
        try:
            with self._lock:
                yield
        except sqlite3.OperationalError as error:
            raise TryAgain(f"{self.path} cannot be read or written: {error}") from None
        finally:
            notice.cancel()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """All that is written within the block, or nothing of it."""
        with self._using(), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            yield

    def all(self) -> list[Record]:
        """All jobs, in the order in which they were launched; a line tells of each whose row is no record."""
        with self._using():
            rows = self._database.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM jobs ORDER BY launched_s, name"
            ).fetchall()
        records = []
        for row in rows:
            try:
                records.append(self._record_of(row))
            except Unreadable as error:
                self._say_once(str(error), str(error))  # the manager looks again and again
        return records

    def _record_of(self, row: tuple[object, ...]) -> Record:
        try:
            return _record(row)
        except (ValueError, TypeError, OverflowError) as error:
            raise Unreadable(
                f"job {limits.shortened(row[0], 60)} is left out: its row in {self.path} is no record "
                f"({limits.cause(error)}); its resources are as they were: find it with capibara launch recover"
            ) from None

    def find(self, name: str) -> Record | None:
        """The job of a name, or None; raises Unreadable if its row is no record."""
        if not name.isascii():  # no job has such a name, and it may be no text
            return None
        with self._using():
            row = self._database.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE name = ?", (name,)).fetchone()
        return self._record_of(row) if row else None

    def add(self, record: Record) -> Record:
        """Adds a job, or returns the one that runs already with the same name and the same files and flags.

        A job that has ended is replaced. Raises as `check`.
        """
        with self._writing():
            if (known := self.check(record)) is not None:
                return known
            self._write(record)
            self._database.execute("UPDATE jobs SET is_cancelled = 0 WHERE name = ?", (record.name,))
        return record

    def check(self, record: Record) -> Record | None:
        """The job that runs already with the same name, files and flags; None: there is none.

        Raises:
          UserError: another job of this name runs, or this one is being ended.
        """
        known = self.find(record.name)
        if known is None or known.state.is_final:
            return None
        if known.state is State.ENDING or record.name in self.cancelled():
            raise UserError(f"job {record.name} is being ended: launch it again when it has ended, or as --name=...")
        if known.text != record.text:
            raise UserError(
                f"job {record.name} is {known.state} with other files or flags: choose another --name, or end it with "
                f"capibara launch cancel {record.name}"
            )
        return known

    def put(self, record: Record) -> None:
        """Writes a job down; only the process that has its lock may."""
        with self._writing():
            self._write(record)

    def _write(self, record: Record) -> None:
        values = _row(record)
        changes = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[1:])
        self._database.execute(
            f"INSERT INTO jobs ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(values))}) "
            f"ON CONFLICT (name) DO UPDATE SET {changes}",
            values,
        )

    def resume(self, record: Record) -> Record:
        """Writes a job down that is to run again, and returns it; as `put`."""
        with self._writing():
            self._write(record)
            self._database.execute("UPDATE jobs SET is_cancelled = 0 WHERE name = ?", (record.name,))
        return record

    def cancel(self, name: str) -> None:
        """Notes that a job is to end; any process may."""
        with self._using():
            self._database.execute("UPDATE jobs SET is_cancelled = 1 WHERE name = ?", (name,))

    def cancelled(self) -> set[str]:
        """The names of the jobs that are to end."""
        with self._using():
            return {name for (name,) in self._database.execute("SELECT name FROM jobs WHERE is_cancelled")}

    def note(self, name: str, text: str) -> None:
        """Adds a line to a job's history."""
        with self._using():
            self._database.execute("INSERT INTO events VALUES (?, ?, ?)", (name, time.time(), text))

    def history(self, name: str) -> list[tuple[float, str]]:
        """Time and text of what has happened to a job, the oldest first."""
        with self._using():
            rows = self._database.execute("SELECT time_s, text FROM events WHERE job = ? ORDER BY rowid", (name,))
            return [(float(time_s), str(text)) for time_s, text in rows if isinstance(time_s, (int, float))]

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """The exclusive right to manage a job within the block; False: another process has it.

        The system releases it when the process ends, however that happens.
        """
        folder = self.path.with_name(f"{self.path.name}.locks")
        with contextlib.ExitStack() as stack:
            with _named(self.path):
                folder.mkdir(mode=0o700, exist_ok=True)
                has_it = stack.enter_context(_locked(folder / name, wait=False))
            yield has_it


def _opened(path: pathlib.Path) -> sqlite3.Connection:
    """The database of a file, which is created if it does not exist."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path, timeout=_OPENING_S, isolation_level=None, check_same_thread=False)
    database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")  # a row of bad text costs that row
    try:
        # A write-ahead log would not work in a home folder that several machines have by NFS.
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("PRAGMA synchronous = FULL")  # what is written is there after a power failure, too
        lines = [line for (text,) in database.execute("PRAGMA integrity_check") for line in text.splitlines()]
        if faults := [line for line in lines if line != "ok" and not _OF_A_ROW.fullmatch(line)]:
            raise sqlite3.DatabaseError(faults[0])
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise UserError(f"{path} is of a later version of capibara ({version}): update capibara")
        if version < _VERSION:
            database.executescript(_TABLES)
        database.execute(f"PRAGMA busy_timeout = {_BUSY_S * 1000:.0f}")
    except BaseException as error:
        database.close()
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            raise TryAgain(f"{path} is locked by another process: try again when it has ended") from None
        raise
    return database


def _set_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames a file that is no readable database, and removes what SQLite has written beside it."""
    aside = path.with_name(f"{path.name}.{_QUARANTINED}-{time.time():.0f}")
    path.rename(aside)
    for extra in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + extra).unlink(missing_ok=True)
    return aside


def _is_ours(path: pathlib.Path) -> bool:
    """Whether a file is of jobs: by its header, or by its lock where it has no header any more."""
    with path.open("rb") as file:
        head = file.read(_ID_AT + 4)
    if head.startswith(_MAGIC) and len(head) == _ID_AT + 4:
        return head[_ID_AT:] == _ID.to_bytes(4, "big")
    with contextlib.suppress(OSError):
        return path.with_name(f"{path.name}.lock").read_bytes() == _LOCK
    return False


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """Raises UserError with the database's name if it cannot be opened or written."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{path} cannot be opened or written ({cause}): mend that, or name another --state") from None


@contextlib.contextmanager
def _locked(path: pathlib.Path, *, wait: bool) -> Iterator[bool]:
    file: IO[bytes] = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    until_s = time.monotonic() + _OPENING_S
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait:
                    yield False
                    return
            if time.monotonic() > until_s:
                holder = processes.lock_holder(file.fileno())
                by = f"process {holder}" if holder else "another process"
                raise TryAgain(f"{path} is locked by {by}: try again when it has ended")
            time.sleep(0.02)
        if not os.fstat(file.fileno()).st_size:
            file.write(_LOCK)
            file.flush()
        yield True


def _row(record: Record) -> list[str | int | float | None]:
    attempt = record.attempt
    return [
        record.name,
        record.text,
        attempt.launch,
        attempt.number,
        attempt.failures,
        attempt.spent_s,
        str(record.state),
        record.reason,
        str(record.outcome) if record.outcome else None,
        record.launched_s,
        record.submit_s,
        record.due_s,
        record.running_s,
        record.gone_s,
        record.pauses,
    ]


def _record(row: tuple[object, ...]) -> Record:
    """The record of a row; raises ValueError if it is none: SQLite puts any type into any column."""
    values = dict(zip(_COLUMNS, row, strict=True))
    texts = {name: _text(name, values[name]) for name in ("name", "text", "launch", "state", "reason")}
    if not _NAME.fullmatch(texts["name"]):
        raise ValueError("its name is no job's")
    attempt = Attempt(
        launch=texts["launch"],
        number=_count("number", values["number"]),
        failures=_count("failures", values["failures"]),
        spent_s=_count("spent_s", values["spent_s"]),
    )
    return Record(
        name=texts["name"],
        text=texts["text"],
        attempt=attempt,
        state=State(texts["state"]),
        reason=texts["reason"],
        outcome=State(_text("outcome", values["outcome"])) if values["outcome"] is not None else None,
        **{name: _time(name, values[name]) for name in ("launched_s", "submit_s", "due_s", "running_s", "gone_s")},
        pauses=_count("pauses", values["pauses"]),
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{name} is no text")
    return value


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {limits.shortened(value, 20)}, must be a whole number of at least 0")
    return value


def _time(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value <= _LATEST_S:
        raise ValueError(f"{name} is {limits.shortened(value, 20)}, must be a time in seconds")
    return float(value)
