"""Checkpoints of a run: saves, restores and verifies steps.

  checkpoints/1000/state/...       the arrays (arrays.py)
  checkpoints/1000/run.json        data iterator, progress, operative configuration
  checkpoints/1000/manifest.json   every file with its size and hash; without it step 1000 does not exist
  checkpoints/1200.corrupted/      a quarantined corrupted step
  checkpoints/lease.json           the process that may write here

A save is asynchronous: the arrays are copied; then a thread writes and syncs them, writes the manifest, and removes the
steps that no rule keeps. A save either fails with an error or is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from capibara.checkpoints import lease, manifest, restoring, step_folders
from capibara.checkpoints.lease import Lease
from capibara.checkpoints.manifest import Corrupted
from capibara.checkpoints.policy import Checkpointing
from capibara.checkpoints.restoring import CheckpointReader, Restored, State
from capibara.checkpoints.saving import Save, Writer
from capibara.core.background import Task, before_exit
from capibara.core.tree import byte_count
from capibara.core.types import UserError
from capibara.multihost import peers
from capibara.storage import hashing, stores
from capibara.storage.full_disk import check_room, disk_full_explained, not_writable_explained


class Checkpoints(CheckpointReader):
    """The `checkpoints` folder of a run. Saves are asynchronous; `close` (or leaving a `with`) waits for the last one.

    A program that ends without `close` waits too, and exits with code 1 if the save fails.

    Args:
      model_dir: the run folder.
      config: what to keep.
      about: JSON values for manifests, in addition to date, score and previous step.

    Raises:
      UserError: another process writes there, or the folder cannot be written.
    """

    _is_read_only, _in_flight = False, "the save in flight"

    def __init__(self, model_dir: str, config: Checkpointing, *, about: Mapping[str, Any] | None = None):
        super().__init__(model_dir, config)
        self._about, self._writer = dict(about or {}), Writer.of(config)
        self._saving: Task | None = None
        self._lease: Lease | None = None
        self._parent: int | None = None  # the step before the next one
        with self._disk_errors(), contextlib.ExitStack() as undo:
            stores.of(self._folder).make_folder(self._folder)
            if jax.process_index() == 0:
                self._lease = Lease(self._folder)
                undo.callback(self._lease.release)
                step_folders.remove_leftovers(self._folder)
            lease.check_shared(self._folder, self._lease)
            undo.enter_context(before_exit(self._at_exit))
            self._open = undo.pop_all()

    def save(
        self,
        step: int,
        state: State,
        data: dict[str, Any],
        progress: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts saving; the state may be changed or donated when this returns.

        Args:
          step: number of the checkpoint; must be larger than all existing ones.
          state: arrays of all hosts.
          data: the data iterator's state, as JSON values.
          progress: other values for resuming, as JSON values.
          score: for keep_best; lower is better.

        Raises:
          UserError: the disk is full (also if an earlier asynchronous save failed so), or the step is not new.
        """
        self.wait()
        newest = self.latest_step()
        if newest is not None and step <= newest:
            raise UserError(
                f"step {step} cannot be saved: {self._folder} holds step {newest} already; set another MODEL_DIR"
            )
        arrays = state.parts()
        if not self._config.incremental:  # an incremental step's size is only known later
            with self._disk_errors():
                check_room(self._folder, byte_count(arrays))
        values = {"data": data, "progress": progress, "shapes": restoring.shapes_of(arrays)}
        about = self._about | {"date": _now(), "score": score, "parent": self._parent}
        about["data"] = hashing.hash_of(json.dumps(data.get("settings"), sort_keys=True).encode())
        about["datasets"] = data.get("datasets", [])
        if self._writer.key is not None:  # the manifest is not encrypted
            values["config"] = about.pop("config", None)
            about["datasets"] = [
                {"fingerprint": item["fingerprint"]} for item in about["datasets"] if "fingerprint" in item
            ]
        run = json.dumps(values).encode()  # now, since the values may change
        parent, verifying = self._parent, self._verifying

        def verified() -> None:
            if verifying is not None:
                verifying.wait(restoring.TASK_LIMIT_S)

        save = Save(
            folder=self._folder / str(step),
            config=self._config,
            writer=self._writer,
            base=lambda: self._base(parent),
            run=run,
            about=about,
            check_lease=self._check_lease,
        )
        self._parent = step
        self._saving = save.begin(arrays, verified)

    def _base(self, parent: int | None) -> manifest.Manifest | None:
        """The manifest that an incremental step refers to, or None."""
        if not self._config.incremental or parent is None:
            return None
        with contextlib.suppress(Corrupted):
            return self._reader.manifest(parent)
        return None

    def score(self, step: int, score: float) -> None:
        """Sets a committed step's score from a later evaluation; every process must call it."""
        self.wait()
        if jax.process_index() == 0:
            with self._disk_errors(), contextlib.suppress(Corrupted):  # another verification reports it
                self._check_lease()
                result = self._reader.manifest(step)
                scored = dataclasses.replace(result, about={**result.about, "score": score})
                writer = Writer(key=self._reader.key_of(result))  # may be the previous key
                manifest.write(self._folder / str(step), writer.signed(scored))
        peers.together("scored")

    def restore_progress(self, step: int) -> Restored:
        """See the reader; the next saved step follows this one."""
        self.wait()  # this step may still be being saved
        restored = super().restore_progress(step)
        self._parent = step
        return restored

    def step_before(self, spike: int, at_most: int) -> int | None:
        """The newest intact step up to `at_most`, else the oldest one before `spike`; None: there is none."""
        older = [step for step in self.steps() if step < spike]
        candidates = [s for s in reversed(older) if s <= at_most] + [s for s in older if s > at_most]
        return next((step for step in candidates if step_folders.is_whole(self._folder / str(step))), None)

    def go_back(self, step: int) -> Restored:
        """Renames the steps after `step`: runs ignore them and may save them again; every process must call it."""
        if self._verifying is not None:
            self._verifying.join(restoring.TASK_LIMIT_S)  # it may be reading one of them
        peers.together("rolling back")
        for newer in reversed(self.steps()) if jax.process_index() == 0 else ():
            if newer > step:
                step_folders.quarantine(self._folder / str(newer), step_folders.ROLLED_BACK)
        peers.together("gone back")
        return self.restore_progress(step)

    def check(self) -> None:
        """Raises the error of a finished save or background verification; does not wait."""
        with self._disk_errors():
            if self._saving is not None and self._saving.done:
                self._end_save()
            super().check()

    def wait(self) -> None:
        """Waits until every save is on disk.

        Raises:
          UserError: the disk was full, or the step that this run was restored from is corrupted.
        """
        with self._disk_errors():
            self._end_save()
            super().check()

    def _end_save(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait(restoring.TASK_LIMIT_S)

    def close(self) -> None:
        """Waits, then releases the lease."""
        with self._open:
            if self._verifying is not None:
                self._verifying.join(restoring.TASK_LIMIT_S)
            self.wait()

    def _at_exit(self) -> None:
        try:
            self.close()
        except BaseException as error:
            # The exit code is decided already: a lost save must not look like success.
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        with not_writable_explained(self._folder), disk_full_explained(self._folder):
            yield


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
