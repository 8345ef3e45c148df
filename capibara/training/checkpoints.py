"""Checkpoints of a run: Orbax for the arrays, JSON for the rest, one folder a step."""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from capibara import tree
from capibara.config import configurable
from capibara.training.state import TrainState
from capibara.tree import byte_count
from capibara.types import PyTree, UserError


_COMPRESSED = 0.9  # bytes on disk of a byte of trained float32, at best
_NOT_WRITABLE = (NotADirectoryError, FileExistsError, PermissionError, FileNotFoundError)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """When to save and what to keep.

    Attributes:
      every: steps between saves; 0: only at the end and when interrupted.
      keep: newest steps that are kept.
      keep_every: steps that are multiples of it are kept for ever; None: none.
    """

    every: int = 1000
    keep: int = 3
    keep_every: int | None = None

    def __post_init__(self):
        if self.every < 0 or self.keep < 1:
            raise UserError(f"Checkpointing.every ({self.every}) must be at least 0, keep ({self.keep}) at least 1")
        if self.keep_every is not None and self.keep_every < 1:
            raise UserError(f"Checkpointing.keep_every is {self.keep_every}, must be at least 1, or None")


@dataclasses.dataclass(frozen=True)
class Restored:
    """The JSON parts of a checkpoint, as they were given to `save`, and the shapes of its arrays."""

    step: int
    data: dict[str, Any]
    progress: dict[str, Any]
    shapes: dict[str, str]


class Checkpoints:
    """The `checkpoints` folder of a run. Saves are asynchronous; `close` (or leaving a `with`) waits for the last.

    Args:
      model_dir: the run folder.
      config: what to keep.
      read_only: changes nothing in the folder, where another process may be saving.
    """

    def __init__(self, model_dir: str, config: Checkpointing, *, read_only: bool = False):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._folder = os.path.join(os.path.abspath(model_dir) if "://" not in model_dir else model_dir, "checkpoints")
        if read_only:
            options = ocp.CheckpointManagerOptions(save_interval_steps=0, create=False, read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=config.keep,
                keep_period=config.keep_every,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,  # a save that failed may be what fills the disk
            )
        for logger in ("absl", "asyncio"):
            logging.getLogger(logger).addFilter(_is_news)
        if getattr(sys.unraisablehook, "func", None) is not _without_orphans:
            sys.unraisablehook = functools.partial(_without_orphans, sys.unraisablehook)
        with self._disk_errors():
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """The newest saved step, None in a new run folder."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data: dict[str, Any], progress: dict[str, Any]) -> None:
        """Starts saving; returns when the arrays are copied off the devices.

        Args:
          step: names the checkpoint.
          state: arrays of all hosts.
          data: the data iterator's state, as JSON values.
          progress: what else resuming needs, as JSON values.

        Raises:
          UserError: the disk is full (also when an earlier asynchronous save met that).
        """
        args = self._ocp.args
        with self._disk_errors():
            self._manager.wait_until_finished()  # as save would, but the room is to be seen after it
            self._check_room(byte_count(_as_dict(state)))
            self._manager.save(
                step,
                args=args.Composite(
                    state=args.StandardSave(_as_dict(state)),
                    data=args.JsonSave(data),
                    progress=args.JsonSave({**progress, "shapes": _shapes(_as_dict(state))}),
                ),
            )

    def restore_progress(self, step: int) -> Restored:
        """Reads the JSON parts of a step that `latest_step` gave; the arrays come with `restore_state`."""
        args = self._ocp.args
        wanted = args.Composite(data=args.JsonRestore(), progress=args.JsonRestore())
        with self._damage_explained(step):
            parts = self._manager.restore(step, args=wanted)
            progress = dict(parts["progress"])
            return Restored(step=step, data=parts["data"], shapes=progress.pop("shapes"), progress=progress)

    def restore_state(self, restored: Restored, target: TrainState) -> TrainState:
        """Reads the arrays of a step onto the devices.

        Args:
          restored: from `restore_progress`.
          target: ShapeDtypeStructs with the shardings wanted now (they may differ from those of the save).

        Raises:
          UserError: the checkpoint holds another model: names the first array that differs.
        """
        args = self._ocp.args
        self._check_shapes(restored.step, restored.shapes, _shapes(_as_dict(target)))
        with self._damage_explained(restored.step):
            parts = self._manager.restore(
                restored.step, args=args.Composite(state=args.StandardRestore(_as_dict(target)))
            )
        return TrainState(**parts["state"])

    def restore_params(self, step: int, target: PyTree) -> PyTree:
        """Reads only the parameters of a step, their moving average where one was kept: for inference and export.

        Args:
          step: from `latest_step`.
          target: ShapeDtypeStructs with the shardings wanted.

        Raises:
          UserError: the checkpoint holds another model: names the first array that differs.
        """
        ocp, saved = self._ocp, self.restore_progress(step).shapes
        name = "ema" if any(path.startswith("ema/") for path in saved) else "params"
        self._check_shapes(step, {p: s for p, s in saved.items() if p.startswith(f"{name}/")}, _shapes({name: target}))
        restore_args = ocp.checkpoint_utils.construct_restore_args({name: target})
        # A reader of its own: the manager's reads whole states once it has saved one.
        with self._damage_explained(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            restored = reader.restore(
                os.path.join(self._folder, str(step), "state"),
                args=ocp.args.PyTreeRestore(item={name: target}, restore_args=restore_args, partial_restore=True),
            )
        return restored[name]

    def wait(self) -> None:
        """Waits until every save is on disk; raises UserError where the disk was full."""
        with self._disk_errors():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases the manager's threads."""
        with self._disk_errors():
            try:
                self._manager.wait_until_finished()
            finally:
                self._manager.close()

    @contextmanager
    def _damage_explained(self, step: int) -> Iterator[None]:
        """Within it, whatever fails in reading a step becomes one line that says how to go on without it."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if "Out of memory" in str(error):
                raise
            older = [other for other in self._manager.all_steps() if other < step]
            go_on = f"to carry on from step {max(older)}" if older else "to start anew: there is no older one"
            what = (str(error).strip() or type(error).__name__).split("\n")[0][:160]
            raise UserError(
                f"checkpoint {self._folder}/{step} is damaged ({what}): move that folder away {go_on}"
            ) from error

    def _check_room(self, state_bytes: int) -> None:
        """Refuses a save that cannot end well: one that fails half-way takes the rest of the disk with it."""
        if "://" not in self._folder and _free_bytes(self._folder) < _COMPRESSED * state_bytes:
            raise OSError(errno.ENOSPC, f"a checkpoint takes about {state_bytes / 2**20:.0f} MiB")

    def _check_shapes(self, step: int, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        # Parameters first: the moments of the optimizer differ only because they do.
        for path in sorted(saved.keys() | wanted.keys(), key=lambda p: (not p.startswith("params/"), p)):
            old, new = saved.get(path, "nothing"), wanted.get(path, "nothing")
            if old != new:
                part, absent = path.partition("/")[0], "nothing" in (old, new)
                other = {"opt_state": "another optimizer's state"}
                other |= {"ema": "another ema_decay's state"} if absent else {}
                other |= {"loss_scale": "another dtype's state"}
                raise UserError(
                    f"checkpoint {self._folder}/{step} holds {other.get(part, 'another model')}: {path} is {old} "
                    f"there, {new} in this configuration: restore the configuration of the run, or set another "
                    "MODEL_DIR"
                )

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            with disk_full_explained(self._folder):
                yield
        except _NOT_WRITABLE as error:
            raise UserError(
                f"{self._folder} cannot be written ({error.strerror}: {error.filename}): set another MODEL_DIR"
            ) from error


@contextmanager
def disk_full_explained(folder: str) -> Iterator[None]:
    """Within it, whatever fails because the disk is full raises a UserError that names `folder`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not _is_disk_full(error):
            raise
        raise UserError(
            f"disk full while saving to {folder} ({_free_bytes(folder) / 2**20:.0f} MiB free): make room, lower "
            "Checkpointing.keep, or set another MODEL_DIR; run the command again to carry on"
        ) from error


def _as_dict(state: TrainState) -> dict[str, Any]:
    parts = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    if state.loss_scale is None:
        del parts["loss_scale"]  # as in the checkpoints that were written before there was one
    return parts


def _shapes(arrays: PyTree) -> dict[str, str]:
    """Name -> "float32[2,3]" for every array, so that two models can be told apart before anything is read."""
    described = (f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(arrays))
    return dict(zip(tree.path_names(arrays), described, strict=True))


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax and asyncio log a failed write with its traceback; it is raised where we wait as well: once is enough.
    # That a folder which we asked to read only is read only is no news either.
    return not (record.exc_info and _is_disk_full(record.exc_info[1])) and "is read only" not in str(record.msg)


def _without_orphans(report: Callable[[Any], None], unraisable: Any) -> None:
    """A sys.unraisablehook: where a write of a save fails, TensorStore's threads report that nobody awaits the rest."""
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        report(unraisable)


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_bytes(folder: str) -> int:
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free
