"""Checkpoints of a run, verified: what is saved, what is restored, and what a manifest says that it must be.

    checkpoints/1000/state/...       the arrays (arrays.py)
    checkpoints/1000/run.json        the data iterator, the progress, the operative configuration
    checkpoints/1000/manifest.json   every file with its size and hash; without it there is no step 1000
    checkpoints/1200.corrupted/      a step that was not what had been saved, quarantined
    checkpoints/lease.json           who may write here

A save is asynchronous: the arrays are copied, and a thread writes them, has them put on the disk, writes the manifest,
and removes the steps that no rule keeps. It fails loudly or it is there.
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
from capibara.core.multihost import peers
from capibara.core.tree import byte_count
from capibara.core.types import UserError
from capibara.storage import hashing, stores
from capibara.storage.full_disk import check_room, disk_full_explained, not_writable_explained


class Checkpoints(CheckpointReader):
    """The `checkpoints` folder of a run. Saves are asynchronous; `close` (or leaving a `with`) waits for the last.

    A program that ends without `close` waits too, and with exit code 1 where the save fails.

    Args:
      model_dir: the run folder.
      config: what to keep.
      about: what manifests say of the run beside the date, the score and the step before, as JSON values.

    Raises:
      UserError: another process writes there, or the folder cannot be written.
    """

    _is_read_only, _in_flight = False, "the save in flight"

    def __init__(self, model_dir: str, config: Checkpointing, *, about: Mapping[str, Any] | None = None):
        super().__init__(model_dir, config)
        self._about, self._writer = dict(about or {}), Writer.of(config)
        self._saving: Task | None = None
        self._lease: Lease | None = None
        self._parent: int | None = None  # the step that the next one comes after
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
          step: names the checkpoint; must come after all that are there.
          state: arrays of all hosts.
          data: the data iterator's state, as JSON values.
          progress: what else resuming needs, as JSON values.
          score: the lowest are kept longest (keep_best).

        Raises:
          UserError: the disk is full (also when an earlier asynchronous save met that), or the step is not new.
        """
        self.wait()
        newest = self.latest_step()
        if newest is not None and step <= newest:
            raise UserError(
                f"step {step} cannot be saved: {self._folder} holds step {newest} already; set another MODEL_DIR"
            )
        arrays = state.parts()
        if not self._config.incremental:  # of such a step is known only later what there is to write
            with self._disk_errors():
                check_room(self._folder, byte_count(arrays))
        values = {"data": data, "progress": progress, "shapes": restoring.shapes_of(arrays)}
        about = self._about | {"date": _now(), "score": score, "parent": self._parent}
        about["data"] = hashing.hash_of(json.dumps(data.get("settings"), sort_keys=True).encode())
        if self._writer.key is not None:  # the manifest is not encrypted
            values["config"] = about.pop("config", None)
        run = json.dumps(values).encode()  # now: what it is made of may change
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
        """What an incremental step refers to; None: nothing."""
        if not self._config.incremental or parent is None:
            return None
        with contextlib.suppress(Corrupted):
            return self._reader.manifest(parent)
        return None

    def score(self, step: int, score: float) -> None:
        """Gives a committed step the score of an evaluation that was made later; every process calls it."""
        self.wait()
        if jax.process_index() == 0:
            with self._disk_errors(), contextlib.suppress(Corrupted):  # of which another verification tells
                self._check_lease()
                found = self._reader.manifest(step)
                scored = dataclasses.replace(found, about={**found.about, "score": score})
                writer = Writer(key=self._reader.key_of(found))  # which may be the key before this run's
                manifest.write(self._folder / str(step), writer.signed(scored))
        peers.together("scored")

    def restore_progress(self, step: int) -> Restored:
        """As of the reader; what is saved next comes after this step."""
        self.wait()  # it may be the step that is being saved
        restored = super().restore_progress(step)
        self._parent = step
        return restored

    def step_before(self, spike: int, at_most: int) -> int | None:
        """The newest whole step up to `at_most`, else the oldest before `spike`; None: there is none."""
        older = [step for step in self.steps() if step < spike]
        wanted = [s for s in reversed(older) if s <= at_most] + [s for s in older if s > at_most]
        return next((step for step in wanted if step_folders.is_whole(self._folder / str(step))), None)

    def go_back(self, step: int) -> Restored:
        """Moves the steps after `step` aside: they are not resumed from, and can be saved again. All processes call it."""
        if self._verifying is not None:
            self._verifying.join(restoring.TASK_LIMIT_S)  # it may look at one of them
        peers.together("going back")
        for newer in reversed(self.steps()) if jax.process_index() == 0 else ():
            if newer > step:
                step_folders.quarantine(self._folder / str(newer), step_folders.ROLLED_BACK)
        peers.together("gone back")
        return self.restore_progress(step)

    def check(self) -> None:
        """Raises what a save has failed with, or a verification beside training, if one has; waits for nothing."""
        with self._disk_errors():
            if self._saving is not None and self._saving.done:
                self._end_save()
            super().check()

    def wait(self) -> None:
        """Waits until every save is on disk.

        Raises:
          UserError: the disk was full, or what this run was restored from is not what was saved.
        """
        with self._disk_errors():
            self._end_save()
            super().check()

    def _end_save(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait(restoring.TASK_LIMIT_S)

    def close(self) -> None:
        """Waits, then gives the folder back."""
        with self._open:
            if self._verifying is not None:
                self._verifying.join(restoring.TASK_LIMIT_S)
            self.wait()

    def _at_exit(self) -> None:
        try:
            self.close()
        except BaseException as error:
            # The exit code is settled already: a save that is lost must not look like success.
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
