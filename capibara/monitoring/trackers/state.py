"""What a run folder remembers of its trackers: trackers/NAME.json, and the run's own name in trackers/run.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tokenize
import uuid
from collections.abc import Iterator

from etils import epath

from capibara import config
from capibara.checkpoints import run_manifest
from capibara.core.types import UserError
from capibara.monitoring.trackers.lines import Position
from capibara.storage import outputs, stores
from capibara.storage.store import Locked

FOLDER = run_manifest.TRACKERS
RUN = "run"  # the label of the run's own file: no tracker has it
_ID = re.compile(r"[\w.-]{1,128}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackerState:
    """How far a tracker is with a run.

    Attributes:
      run_id: what the tracker calls the run; None: it was never started, or has no name for it.
      url: where the run is seen.
      position: in metrics.jsonl; what is before it is safe with the tracker.
      reason: why the run ended, as far as the tracker knows.
      is_finished: the tracker knows that the run has ended.
    """

    run_id: str | None = None
    url: str | None = None
    position: Position = Position()
    reason: str = "crashed"
    is_finished: bool = False


def path_of(model_dir: str, label: str) -> str:
    """The file of a tracker."""
    return os.path.join(model_dir, FOLDER, f"{label}.json")


def read(model_dir: str, label: str) -> TrackerState:
    """The state of a tracker; that of a new one if there is none, or an unreadable one."""
    values = _object(path_of(model_dir, label))
    byte, line, run_id, url = (values.get(name) for name in ("position", "line", "run_id", "url"))
    if type(byte) is not int or type(line) is not int or not 0 <= line <= byte:
        byte, line = 0, 0
    return TrackerState(
        run_id=run_id if isinstance(run_id, str) and _ID.fullmatch(run_id) else None,
        url=url if isinstance(url, str) else None,
        position=Position(byte, line),
        reason=str(values.get("reason", "crashed")),
        is_finished=values.get("finished") is True,
    )


def checked_id(label: str, run_id: object) -> str | None:
    """What `Tracker.start` returned, if the state can hold it.

    Raises:
      UserError: it cannot be the id of a run.
    """
    if run_id is None or isinstance(run_id, str) and _ID.fullmatch(run_id):
        return run_id
    raise UserError(
        f"{label}: start returned {str(run_id)[:100]!r}, must be None or at most 128 letters, digits, '.', '_' and '-': "
        "return the last part of the service's id"
    )


def write(model_dir: str, label: str, state: TrackerState) -> None:
    """Replaces the state of a tracker, atomically."""
    at = state.position
    values = {"run_id": state.run_id, "url": state.url, "position": at.byte, "line": at.line}
    values |= {"reason": state.reason, "finished": state.is_finished}
    outputs.replace(path_of(model_dir, label), json.dumps(values, indent=1) + "\n")


def uid(model_dir: str) -> str:
    """The run's own name, 32 hexadecimal digits: made at the first call, the same in all later ones."""
    path = path_of(model_dir, RUN)
    result = _object(path).get("uid")
    if isinstance(result, str) and re.fullmatch(r"[0-9a-f]{32}", result):
        return result
    created = uuid.uuid4().hex
    outputs.replace(path, json.dumps({"uid": created}) + "\n")
    return created


def configuration(model_dir: str) -> tuple[str, dict[str, str]]:
    """The recorded configuration of a run: its text, and the text of each parameter's value.

    Raises:
      UserError: it cannot be read.
    """
    path = os.path.join(model_dir, run_manifest.CONFIG)
    text = outputs.read_own(model_dir, run_manifest.CONFIG) or ""
    try:
        bound = config.changes("", text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): restore it from a copy") from None
    return text, {name: value for name, (_, value) in bound.items() if value is not None}


@contextlib.contextmanager
def locked(model_dir: str, within_s: float) -> Iterator[None]:
    """A context in which no other process of this machine feeds the run's trackers.

    Raises:
      UserError: another one does, for longer than `within_s`.
    """
    folder = epath.Path(outputs.path_in(stores.of(model_dir).absolute(model_dir), FOLDER))
    try:
        stores.of(folder).make_folder(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made ({error.strerror or error}): trackers need a run folder that you may write: copy it"
        ) from None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(stores.of(folder).lock(folder, within_s))
        except Locked as error:
            holder = f"process {error.args[0]}" if error.args and error.args[0] else "another process"
            raise UserError(f"{holder} feeds the trackers of {model_dir}: wait until it has ended") from None
        yield


def _object(path: str) -> dict[str, object]:
    try:
        result = json.loads(outputs.read(path) or "{}")
    except (UserError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}
