"""Writes a run's metrics to metrics.jsonl and TensorBoard event files in the run folder, and reads metrics.jsonl."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from capibara.checkpoints.run_manifest import METRICS as METRICS_FILE
from capibara.config import configurable
from capibara.core.types import UserError
from capibara.monitoring.metrics_file.redaction import encodable
from capibara.storage import stores
from capibara.training.base.callbacks import Callback, RunInfo, SystemValue

_SECONDS_BETWEEN_FLUSHES = 120.0
AGAIN = ("start", "roll_back")  # events after which the steps that follow are repeated
MOST_STEPS, MOST_TIME_S = 1 << 53, 1e12  # of a record: what databases and floats hold exactly
_LONG_INTEGER = 19  # characters


def mfu(run: RunInfo, step_s: float) -> float | None:
    """Model FLOPs utilisation: the share of all devices' peak FLOP/s that a step of `step_s` seconds reaches.

    Source: PaLM, Chowdhery et al. 2022, appendix B. None: the device's peak is unknown.
    """
    if not run.peak_flops or not step_s > 0:
        return None
    return run.flops_per_step / step_s / (run.device_count * run.peak_flops)


@configurable
class MetricsFile(Callback):
    """Appends metrics, samples and events to metrics.jsonl in the run folder, one JSON object per line.

    Each line has `kind` ("train", "eval", "system", "sample" or "event"), `step` and `time` (seconds since 1970). Train, eval
    and system lines also have the metrics, samples `prompt` and `text`, events `event` ("start", "facts", "spent",
    "checkpoint", "roll_back" or "end") and its values. Numbers that are not finite, or unavailable, are null. Lines are never rewritten: a run that resumes from its
    last checkpoint repeats the steps after it, and `read_metrics` keeps the newer lines.
    """

    def __init__(self) -> None:
        self._lines: _LocalLines | _RemoteLines  # set by on_train_begin, as is the run
        self._run: RunInfo
        self._lock, self._is_open = threading.RLock(), False  # samples of the system come from a thread

    def on_train_begin(self, run: RunInfo) -> None:
        self._run, self._is_open = run, True
        self._lines = (_LocalLines if stores.of(run.model_dir).appends else _RemoteLines)(metrics_path(run.model_dir))
        names = "total_steps param_count tokens_per_step flops_per_step device_count device_kind peak_flops".split()
        self._write("event", run.start_step, event="start", **{name: getattr(run, name) for name in names})

    def on_spent(self, step: int, seconds: Mapping[str, float]) -> None:
        self._write("event", step, event="spent", **seconds)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        utilisation = mfu(self._run, metrics.get("step_s", 0.0))
        self._write("train", step, **metrics, **({} if utilisation is None else {"mfu": utilisation}))

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("eval", step, **metrics)

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        self._write("sample", step, prompt=prompt, text=text)

    def on_checkpoint(self, step: int) -> None:
        with self._lock:
            self._write("event", step, event="checkpoint")
            self._lines.flush()

    def on_roll_back(self, step: int) -> None:
        self._write("event", step, event="roll_back")

    def on_train_end(self, step: int, reason: str) -> None:
        with self._lock:
            self._write("event", step, event="end", reason=reason)
            self._is_open = False
            self._lines.close()

    def on_system(self, step: int, metrics: Mapping[str, SystemValue]) -> None:
        with self._lock:
            if self._is_open:
                self._write("system", step, **metrics)

    def on_facts(self, step: int, facts: Mapping[str, object]) -> None:
        with self._lock:
            if self._is_open:
                self._write("event", step, event="facts", facts=facts)

    def _write(self, kind: str, step: int, **fields: object) -> None:
        with self._lock:
            record: dict[str, Any] = {"kind": kind, "step": int(step), "time": round(time.time(), 3)}
            record.update((name, _json_value(value)) for name, value in fields.items())
            self._lines.write(json.dumps(record, ensure_ascii=False, allow_nan=False))


def metrics_path(model_dir: str) -> str:
    """The path of a run folder's metrics.jsonl."""
    return os.path.join(model_dir, METRICS_FILE)


def folder_error(path: str) -> UserError:
    """The error for a folder that has the name of one of the run's files."""
    return UserError(f"{path} is a folder, must be a file: move it away, or set another MODEL_DIR")


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl as if the run had never been interrupted.

    A start at step k, or a roll-back to it, drops all earlier records of later steps. Of several lines with the same kind
    and step (and prompt, for samples; and event, for events) the last is kept. An incomplete line of a run that was killed
    is skipped.

    Args:
      path: the file or its run folder.

    Returns:
      Records in the order of their steps.

    Raises:
      UserError: the file does not exist, or it is a folder.
    """
    return kept_of(all_records(path if path.endswith(".jsonl") else metrics_path(path)))


def kept_of(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that `read_metrics` returns, of all records in the order in which they were written."""
    retained: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        kind, step = record["kind"], record["step"]
        if kind == "event" and record.get("event") in AGAIN:
            retained = {key: old for key, old in retained.items() if old["step"] <= step}
        key = (kind, step, record.get("prompt") if kind == "sample" else record.get("event"))
        retained.pop(key, None)
        retained[key] = record
    return sorted(retained.values(), key=lambda record: record["step"])


def all_records(path: str) -> list[dict[str, Any]]:
    """All complete lines of a metrics.jsonl, in the order in which they were written; raises as `read_metrics`."""
    result = filter(None, map(parse, _read_text(path).split("\n")))
    return [record if "time" in record else {**record, "time": 0.0} for record in result]


@configurable
class TensorBoard(Callback):
    """Writes TensorBoard event files to `tensorboard` in the run folder; see them with `tensorboard --logdir`."""

    def __init__(self) -> None:
        self._events: _EventFile  # set by on_train_begin, as is the run
        self._run: RunInfo

    def on_train_begin(self, run: RunInfo) -> None:
        self._run = run
        folder = os.path.join(run.model_dir, "tensorboard")
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise UserError(f"{folder} is a file, must be a folder: move it away, or set another MODEL_DIR")
        # An interrupted run has written steps after its checkpoint: TensorBoard is to drop them.
        self._events = _EventFile(folder, purge_step=run.start_step + 1)
        self._events.text("config", _preformatted(run.config), run.start_step)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        utilisation = mfu(self._run, metrics.get("step_s", 0.0))
        self._scalars("train", step, metrics if utilisation is None else {**metrics, "mfu": utilisation})

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self._scalars("eval", step, metrics)
        self._events.flush()

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        tag = f"sample/{encodable(prompt) or '(empty prompt)'}"
        self._events.text(tag, _preformatted(prompt + text), step)

    def on_system(self, step: int, metrics: Mapping[str, SystemValue]) -> None:
        self._scalars("system", step, {name: item for name, item in metrics.items() if isinstance(item, (int, float))})

    def on_checkpoint(self, step: int) -> None:
        self._events.flush()

    def on_train_end(self, step: int, reason: str) -> None:
        self._events.close()

    def _scalars(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.scalar(f"{group}/{name}", value, step)
        self._events.flush(_SECONDS_BETWEEN_FLUSHES)


class _EventFile:
    """The TensorBoard event file of one start of a run, written in the caller's thread.

    tensorboardX's own writer uses a thread and a queue: the thread ends at the first error, or when the clock goes back by
    weeks, and then a write, close or exit blocks for ever. Here an error only ends the event file, with a warning;
    metrics.jsonl has the same numbers.
    """

    def __init__(self, folder: str, purge_step: int):
        from tensorboardX import event_file_writer, record_writer
        from tensorboardX.proto.event_pb2 import SessionLog

        self._folder, self._flushed_s = folder, time.monotonic()
        self._lock = threading.RLock()  # samples of the system come from a thread
        record_writer.directory_check(folder)
        # The name begins with the time: if the clock has gone back, it must still differ from an older file's.
        suffix = f".{os.getpid()}.{secrets.token_hex(4)}"
        self._writer = None
        try:
            self._writer = event_file_writer.EventsWriter(os.path.join(folder, "events"), suffix)
        except ImportError as error:  # boto3, which s3fs does without
            logging.getLogger(__name__).warning(
                "%s is not written (%s); metrics.jsonl has the same numbers", folder, error
            )
        atexit.register(self._close_after_fault)
        self._write(purge_step, file_version="brain.Event:2")
        self._write(purge_step, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, tag: str, value: float, step: int) -> None:
        from tensorboardX import summary

        self._write(step, summary=summary.scalar(tag, value))

    def text(self, tag: str, text: str, step: int) -> None:
        from tensorboardX import summary

        self._write(step, summary=summary.text(tag, text))

    def flush(self, at_most_every_s: float = 0.0) -> None:
        if time.monotonic() - self._flushed_s >= at_most_every_s:
            self._flushed_s = time.monotonic()
            self._do(lambda writer: writer.flush())

    def close(self) -> None:
        atexit.unregister(self._close_after_fault)
        with self._lock:
            self._do(lambda writer: writer.close())
            self._writer = None

    def _close_after_fault(self) -> None:
        """Closes the file when the process exits early; the cause of the exit, already reported, may fail this, too."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
            self._forget()

    def _write(self, step: int, **fields: object) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._do(lambda writer: writer.write_event(Event(wall_time=time.time(), step=int(step), **fields)))

    def _do(self, action: Callable[[Any], Any]) -> None:
        with self._lock:
            if self._writer is None:
                return
            try:
                action(self._writer)
            except Exception as error:  # bucket libraries raise errors of their own
                self._forget()
                logging.getLogger(__name__).warning(
                    "%s is not written any more (%s: %s); metrics.jsonl has the same numbers",
                    self._folder, type(error).__name__, error,
                )  # fmt: skip

    def _forget(self) -> None:
        """Drops a failed writer so that it is not closed again when it is collected: a bucket's would upload, and fail."""
        writer, self._writer = self._writer, None
        if writer is not None and not stores.of(self._folder).appends:
            writer._py_recordio_writer._writer.close = lambda: None


class _LocalLines:
    """Appends lines to a file; a line is passed to the operating system before `write` returns."""

    def __init__(self, path: str):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self._path = path
        # A sample's undecodable bytes (surrogates) become JSON escapes: they must not stop a run.
        try:
            self._file = open(path, "a+", encoding="utf-8", errors="backslashreplace", newline="")
        except IsADirectoryError:
            raise folder_error(path) from None
        if not _ends_with_newline(path):
            self.write("")  # ends the incomplete line of a run that was killed

    def write(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"{self._path} cannot be written: disk full; free some space and run again") from None

    def flush(self) -> None:
        """Does nothing: every line is already written."""

    def close(self) -> None:
        self._file.close()


class _RemoteLines:
    """Lines of an object in a bucket, which cannot be appended to: it is rewritten from time to time, and at the end."""

    _SECONDS_BETWEEN_WRITES = 30.0

    def __init__(self, path: str):
        from etils import epath

        self._path = epath.Path(path)
        text = self._path.read_text() if self._path.exists() else ""
        self._lines = text.removesuffix("\n").split("\n") if text else []
        self._written = -math.inf

    def write(self, line: str) -> None:
        self._lines.append(line)
        if time.monotonic() - self._written >= self._SECONDS_BETWEEN_WRITES:
            self.flush()

    def flush(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in self._lines)
        self._path.write_bytes(text.encode("utf-8", errors="backslashreplace"))
        self._written = time.monotonic()

    def close(self) -> None:
        self.flush()


def _ends_with_newline(path: str) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _read_text(path: str) -> str:
    try:
        return stores.of(path).read(path).decode("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist: name a run folder, or its {METRICS_FILE}") from None
    except IsADirectoryError:
        raise folder_error(path) from None
    except OSError as error:
        cause = error.strerror or error
        raise UserError(f"{path} cannot be read ({cause}): it must be a file that you may read") from None


def _integer(text: str) -> int | float:
    return int(text) if len(text) < _LONG_INTEGER else float(text)  # larger ones are no counts, and do not fit a float


_DECODER = json.JSONDecoder(parse_int=_integer)


def parse(line: str) -> dict[str, Any] | None:
    """The record of a line of metrics.jsonl, which may be anyone's; None: it is none, or torn."""
    try:
        record = _DECODER.decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        return None
    step, time_s = record.get("step"), record.get("time", 0.0)
    if type(step) is not int or abs(step) >= MOST_STEPS:
        return None
    if type(time_s) not in (int, float) or not abs(time_s) < MOST_TIME_S:
        return None
    texts = {"event": ("event",), "sample": ("prompt", "text")}.get(kind, ())
    if not all(isinstance(record.get(name, ""), str) for name in texts):
        return None
    return record


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return float(value) if math.isfinite(value) else None


def _preformatted(text: str) -> str:
    """Markdown that shows the text verbatim."""
    return "\n".join(f"    {line}" for line in encodable(text).splitlines())
