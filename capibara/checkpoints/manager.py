"""Checkpoints of a run, verified: Orbax writes the arrays, a manifest says what they must be.

    checkpoints/1000/state/...       the arrays (array_files, chunks)
    checkpoints/1000/run.json        the data iterator, the progress, the operative configuration
    checkpoints/1000/manifest.json   every file with its size and hash; without it there is no step 1000
    checkpoints/1200.corrupted/        a step that was not what had been saved, quarantined
    checkpoints/lease.json           who may write here

A save is asynchronous: the arrays are copied, and a thread writes them, has them put on the disk, writes the manifest,
and removes the steps that no rule keeps. It fails loudly or it is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from capibara.checkpoints import array_files, chunks, lease, manifest, run_manifest, shapes, step_folders
from capibara.checkpoints.encryption import Key
from capibara.checkpoints.lease import Lease
from capibara.checkpoints.manifest import Corrupted, File, Manifest
from capibara.checkpoints.policy import Checkpointing, Compression, Verify
from capibara.checkpoints.snapshot import snapshot
from capibara.checkpoints.step_files import Writer, together
from capibara.core import bucket_faults, limits, tree
from capibara.core.background import Task, before_exit
from capibara.core.multihost import hosts
from capibara.core.tree import byte_count
from capibara.core.types import PyTree, TryAgain, UserError
from capibara.storage import durable
from capibara.storage.full_disk import disk_full_explained, free_bytes, is_disk_full, not_writable_explained

_ATTEMPTS, _PAUSE_S = 3, 0.5  # of a save that fails for another reason than a full disk; the pause doubles
_SEEN_S = 20.0  # in which what process 0 writes must be seen everywhere: network disks remember for some seconds
_SAVE_S = 3600.0  # that a save or a verification may take; hosts wait for each other's as long
_RUN_BYTES, _RUN_VALUES = 256 << 20, 8_000_000  # of a run.json
_TOLD = 20  # lost steps that the log names
_T = TypeVar("_T")


class State(Protocol):
    """What is saved: arrays by name, of which a constructor makes the same again."""

    def parts(self) -> dict[str, Any]:
        """A tree of arrays by each of its names."""
        ...


S = TypeVar("S", bound=State)


@dataclasses.dataclass(frozen=True)
class Restored:
    """The JSON parts of a checkpoint, as they were given to `save`, the shapes of its arrays, and its score."""

    step: int
    data: dict[str, Any]
    progress: dict[str, Any]
    shapes: dict[str, str]
    score: float | None = None


class RestoredFromCorruption(TryAgain):
    """What a run was restored from turned out not to be what was saved: it must be started again."""


class Checkpoints:
    """The `checkpoints` folder of a run. Saves are asynchronous; `close` (or leaving a `with`) waits for the last.

    A program that ends without `close` waits too, and with exit code 1 where the save fails.

    Args:
      model_dir: the run folder.
      config: what to keep.
      read_only: changes nothing in the folder, where another process may be saving.
      about: what manifests say of the run beside the date, the score and the step before, as JSON values.

    Raises:
      UserError: another process writes there, or the folder cannot be written.
    """

    def __init__(
        self,
        model_dir: str,
        config: Checkpointing,
        *,
        read_only: bool = False,
        about: Mapping[str, Any] | None = None,
    ):
        self._folder = step_folders.folder_of(model_dir)
        self._config, self._about = config, dict(about or {})
        self._read_only, self._lease = read_only, None
        self._keys = {} if config.encryption is None else config.encryption.keys()
        key = config.encryption.key() if config.encryption is not None and config.encryption.encrypt else None
        self._writer = Writer(compress=config.compression is Compression.ZSTD, key=key)
        self._saving: Task | None = None
        self._verifying: Task | None = None
        self._open = contextlib.ExitStack()
        self._parent: int | None = None  # the step that the next one comes after
        self.corrupted: dict[int, str] = {}  # step -> why it was passed over
        if read_only:
            return
        array_files.hush()
        with self._disk_errors(), contextlib.ExitStack() as undo:
            self._folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                self._lease = Lease(self._folder)
                undo.callback(self._lease.release)
                step_folders.remove_leftovers(self._folder)
            self._check_shared()
            undo.enter_context(before_exit(self._at_exit))
            self._open = undo.pop_all()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"the save in flight failed too: {failed}")

    def steps(self) -> list[int]:
        """All committed steps, oldest first; nothing is said of what has become of their files since."""
        return step_folders.steps(self._folder) if self._folder.is_dir() else []

    def latest_step(self) -> int | None:
        """The newest committed step, None in a new run folder."""
        return max(self.steps(), default=None)

    def restore(self, target: S) -> tuple[Restored, S] | None:
        """The newest step that is what was saved, read onto the devices; None in a new run folder.

        Newer ones that are not are named in `corrupted`, and quarantined unless this is read only. Every process calls it.

        Args:
          target: as of `restore_state`.

        Raises:
          UserError: there are steps and not one of them is whole, or they hold another model.
        """

        def attempt(step: int) -> tuple[Restored, S]:
            self._check_rest(step)
            restored = self.restore_progress(step)
            return restored, self.restore_state(restored, target)

        return self._newest(attempt)

    def restore_newest_params(self, target: PyTree) -> PyTree | None:
        """`restore` of the parameters alone, as `restore_params` gives them."""
        found = self.newest_params(target)
        return None if found is None else found[1]

    def newest_params(self, target: PyTree, *, average: bool = True) -> tuple[int, PyTree] | None:
        """The newest whole step with its parameters, as `restore_params` gives them; None: there is none."""
        return self._newest(lambda step: (step, self.restore_params(step, target, average=average)))

    def newest_part(self, keep: Callable[[str], bool]) -> PyTree | None:
        """Of the newest whole step those parameters whose names are kept, their averages where it has some.

        They lie on this process's first device, of whatever model they are; None: there is no step.
        """
        here = SingleDeviceSharding(jax.local_devices()[0])

        def attempt(step: int) -> PyTree:
            saved, wanted = self.restore_progress(step).shapes, {}
            for path, shape in saved.items():
                part, _, name = path.partition("/")
                ahead = part == "params" and f"ema/{name}" in saved
                if part in ("ema", "params") and not ahead and keep(name):
                    leaf = shapes.parsed(shape)
                    wanted |= {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)}
            found = self._read(step, tree.nested(wanted))
            return tree.joined(found.get("ema", {}), found.get("params", {}))

        return self._newest(attempt)

    def newest_optimizer(self, target: PyTree) -> tuple[int, PyTree] | None:
        """The newest whole step with its optimizer's state; None: it has none, or averages of its parameters.

        Args:
          target: of the state, ShapeDtypeStructs with the shardings wanted.

        Raises:
          UserError: it is the state of another optimizer.
        """

        def attempt(step: int) -> tuple[int, PyTree] | None:
            saved = self.restore_progress(step).shapes
            if any(path.startswith("ema/") for path in saved):
                return None
            saved = {path: shape for path, shape in saved.items() if path.startswith("opt_state/")}
            if not saved:
                return None
            wanted = {"opt_state": target}
            shapes.check(self._folder / str(step), saved, shapes.of(wanted), cast=self._config.cast)
            return step, self._read(step, wanted)["opt_state"]

        return self._newest(attempt)

    def verified_step(self) -> int | None:
        """The newest step whose files are those that were saved; as `restore`, without reading it."""

        def attempt(step: int) -> int:
            self._check_rest(step)
            if self._config.verify is Verify.BEFORE:
                manifest.verify(self._folder / str(step), _is_ours)
            return step

        return self._newest(attempt)

    def _newest(self, attempt: Callable[[int], _T]) -> _T | None:
        """What `attempt` gives of the newest step that it finds whole, on all processes; None: there is no step."""
        lost = step_folders.lost(self._folder)
        step_folders.check_foreign(self._folder)
        passed: list[int] = []  # quarantined only when there is one to resume from
        steps, lost = hosts.gathered([self.steps()[::-1], lost])[0]
        for step in lost[-_TOLD:]:
            self._pass_over(step, step_folders.why_lost(self._folder, step))
        passed += lost
        for step in steps:
            found, fault = None, None
            try:
                found = attempt(step)
            except Corrupted as error:
                fault = str(error)
            fault = next(filter(None, hosts.gathered(fault)), None)
            if fault is None:
                for other in passed if not self._read_only and jax.process_index() == 0 else ():
                    self._quarantine(other)
                if self._config.verify is Verify.BACKGROUND:
                    self._verifying = Task(functools.partial(self._verify_later, step), "capibara-verify")
                return found
            passed.append(step)
            self._pass_over(step, fault)
        if self.corrupted:
            last = max(self.corrupted)
            raise UserError(
                f"{self._folder} holds no step that is what was saved: {last}: {self.corrupted[last]}: restore the folder "
                "from a copy, or set another MODEL_DIR to start anew"
            )
        return None

    def _pass_over(self, step: int, fault: str) -> None:
        self.corrupted[step] = fault
        logging.getLogger(__name__).warning("%s/%d is corrupted: %s", self._folder, step, fault)

    def _quarantine(self, step: int) -> None:
        if (self._folder / str(step)).exists():
            step_folders.quarantine(self._folder / str(step), step_folders.CORRUPTED)
        else:
            run_manifest.forget_step(self._folder.parent, step)

    def _check_rest(self, step: int) -> None:
        """Raises Corrupted where a step has no manifest; where it is to be verified, also for files that are no chunks.

        Chunks are compared as they are read.
        """
        folder = self._folder / str(step)
        if self._config.verify is Verify.BEFORE:
            manifest.verify(folder, lambda file: file.array is None and _is_ours(file))
        else:
            manifest.read(folder)

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
        with self._disk_errors():
            self._check_room(byte_count(arrays))
        values = {"data": data, "progress": progress, "shapes": shapes.of(arrays)}
        about = self._about | {"date": _now(), "score": score, "parent": self._parent}
        about["data"] = durable.hash_of(json.dumps(data.get("settings"), sort_keys=True).encode())
        if self._writer.key is not None:  # the manifest is not encrypted
            values["config"] = about.pop("config", None)
        run = json.dumps(values).encode()  # now: what it is made of may change
        self._parent = step
        copies, finite = snapshot(arrays)
        write = functools.partial(self._write, step, copies, finite, run, about, self._verifying)
        self._saving = Task(write, "capibara-save")

    def score(self, step: int, score: float) -> None:
        """Gives a committed step the score of an evaluation that was made later; every process calls it."""
        self.wait()
        if jax.process_index() == 0:
            with self._disk_errors(), contextlib.suppress(Corrupted):  # of which another verification tells
                self._check_lease()
                found = self._manifest(step)
                told = dataclasses.replace(found, about=found.about | {"score": score})
                own = Writer(key=self._key_of(found))  # which may be the key before this run's
                manifest.write(self._folder / str(step), own.signed(told))
        together("scored")

    def restore_progress(self, step: int) -> Restored:
        """Reads the JSON parts of a committed step; the arrays come with `restore_state`.

        Raises:
          Corrupted: they are not what was saved.
        """
        self.wait()  # it may be the step that is being saved
        found = self._manifest(step)
        file = found.by_path.get(manifest.RUN)
        if file is None:
            raise Corrupted(f"{manifest.RUN} is gone")
        if file.size > _RUN_BYTES:
            raise Corrupted(f"{manifest.RUN} has {file.size:,} bytes, must have at most {_RUN_BYTES:,}")
        content = manifest.contents(self._folder / str(step), file)
        try:
            content = chunks.opened(content, found, file, self._key_of(found)).tobytes()
            values = limits.parse_json(content, values=_RUN_VALUES, finite=False)
            parts = {name: values[name] for name in ("data", "progress", "shapes")}
            if not all(isinstance(part, dict) for part in parts.values()):
                raise ValueError("its parts are no objects")
            if not all(isinstance(shape, str) for shape in parts["shapes"].values()):
                raise ValueError("its shapes are no texts")
            restored = Restored(step=step, **parts, score=found.about.get("score"))
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupted(f"{manifest.RUN} cannot be read ({manifest.one_line(error)})") from error
        self._parent = step
        return restored

    def restore_state(self, restored: Restored, target: S) -> S:
        """Reads the arrays of a step onto the devices.

        Args:
          restored: from `restore_progress`.
          target: ShapeDtypeStructs with the shardings wanted now (they may differ from those of the save).

        Returns:
          The state, without `losses` where the save had none, or others: this may be switched from start to start.

        Raises:
          UserError: the checkpoint holds another model: names the first array that differs.
          Corrupted: it is not what was saved.
        """
        saved, wanted = restored.shapes, target.parts()
        if shapes.window(saved) != shapes.window(shapes.of(wanted)):
            saved = {path: shape for path, shape in saved.items() if path not in shapes.window(saved)}
            wanted.pop("losses", None)
        shapes.check(self._folder / str(restored.step), saved, shapes.of(wanted), cast=self._config.cast)
        return type(target)(**self._read(restored.step, wanted))

    def step_before(self, spike: int, at_most: int) -> int | None:
        """The newest whole step up to `at_most`, else the oldest before `spike`; None: there is none."""
        older = [step for step in self.steps() if step < spike]
        wanted = [s for s in reversed(older) if s <= at_most] + [s for s in older if s > at_most]
        return next((step for step in wanted if step_folders.is_whole(self._folder / str(step))), None)

    def go_back(self, step: int) -> Restored:
        """Moves the steps after `step` aside: they are not resumed from, and can be saved again. All processes call it."""
        if self._verifying is not None:
            self._verifying.join(_SAVE_S)  # it may look at one of them
        together("going back")
        for newer in reversed(self.steps()) if jax.process_index() == 0 else ():
            if newer > step:
                step_folders.quarantine(self._folder / str(newer), step_folders.ROLLED_BACK)
        together("gone back")
        return self.restore_progress(step)

    def restore_params(self, step: int, target: PyTree, *, average: bool = True) -> PyTree:
        """Reads only the parameters of a step, of each its moving average where one was kept: for inference and export.

        Args:
          step: a committed one.
          target: ShapeDtypeStructs with the shardings wanted.
          average: False: not their averages, but they themselves.

        Raises:
          UserError: the checkpoint holds another model: names the first array that differs.
          Corrupted: it is not what was saved.
        """
        saved = self.restore_progress(step).shapes
        averaged = {path.partition("/")[2] for path in saved if average and path.startswith("ema/")}
        wanted = {
            "ema": tree.part(target, lambda name: name in averaged),
            "params": tree.part(target, lambda name: name not in averaged),
        }
        saved = {
            path: shape
            for path, shape in saved.items()
            if path.startswith("params/") != (path.partition("/")[2] in averaged)
            and path.startswith(("ema/", "params/"))
        }
        shapes.check(self._folder / str(step), saved, shapes.of(wanted), cast=self._config.cast)
        found = self._read(step, wanted)
        return tree.joined(found["ema"], found["params"]) if averaged else found["params"]

    def check(self) -> None:
        """Raises what a save has failed with, or a verification beside training, if one has; waits for nothing."""
        self._raise_ended(waits=False)

    def wait(self) -> None:
        """Waits until every save is on disk.

        Raises:
          UserError: the disk was full, or what this run was restored from is not what was saved.
        """
        self._raise_ended(waits=True)

    def _raise_ended(self, waits: bool) -> None:
        with self._disk_errors():
            for name in ("_saving", "_verifying"):
                task: Task | None = getattr(self, name)
                if task is not None and (task.done or (waits and name == "_saving")):
                    setattr(self, name, None)
                    task.wait(_SAVE_S)

    def close(self) -> None:
        """Waits, then gives the folder back."""
        with self._open:
            if self._verifying is not None:
                self._verifying.join(_SAVE_S)
            self.wait()

    def _at_exit(self) -> None:
        try:
            self.close()
        except BaseException as error:
            # The exit code is settled already: a save that is lost must not look like success.
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _write(
        self,
        step: int,
        arrays: PyTree,
        finite: jax.Array,
        run: bytes,
        about: dict[str, Any],
        verifying: Task | None,
    ) -> None:
        """Writes and commits a step, in the thread of a save; not where what the run was restored from is corrupted."""
        good = np.asarray(finite.addressable_data(0))
        if bad := [name for name, ok in zip(tree.path_names(arrays), good, strict=True) if not ok]:
            raise UserError(
                f"{bad[0]} is not finite at step {step}, not saved: earlier checkpoints are kept; lower "
                "Schedule.learning_rate or set Optimizer.clip_norm, and run the command again"
            )
        folder, base = self._folder / str(step), self._base(about["parent"])
        for attempt in range(_ATTEMPTS):
            try:
                files = self._writer.write(folder, arrays, run, base, self._check_lease)
                if verifying is not None:
                    verifying.wait(_SAVE_S)
                if jax.process_index() == 0:
                    self._check_lease()
                    about |= {"run": run_manifest.hashes(self._folder.parent)}
                    manifest.write(folder, self._writer.signed(Manifest(step, tuple(files), about)))
                    run_manifest.add_step(self._folder.parent, step)
                break
            except Exception as error:
                if jax.process_index() == 0:  # the others do not know whether it has been committed meanwhile
                    with contextlib.suppress(Exception):
                        self._check_lease()  # where it is another's now, so is what lies there
                        step_folders.remove_failed(folder)
                last = attempt == _ATTEMPTS - 1 or jax.process_count() > 1  # the others would wait for ever
                if last or is_disk_full(error) or isinstance(error, (UserError, TryAgain)):
                    raise
                if (told := bucket_faults.explained([error])) is not None:  # it was tried often enough
                    raise told from error
                logging.getLogger(__name__).warning("saving step %d failed (%s): trying again", step, error)
                time.sleep(_PAUSE_S * 2**attempt)
        together("committed")
        if jax.process_index() == 0:
            self._check_lease()
            step_folders.retain(self._folder, self._config, written=step)

    def _base(self, parent: int | None) -> Manifest | None:
        """What an incremental step refers to; None: nothing."""
        if not self._config.incremental or parent is None:
            return None
        with contextlib.suppress(Corrupted):
            return self._manifest(parent)

    def _manifest(self, step: int) -> Manifest:
        """Of a step that we have the key of."""
        found = manifest.read(self._folder / str(step))
        key, encryption = self._key_of(found), self._config.encryption
        if key is not None:
            key.check_mac(found.signed(), found.mac)
        elif found.encryption is not None:
            wanted = found.encryption.get("key")
            raise UserError(
                f"checkpoint {self._folder}/{step} is encrypted with the key {wanted}, "
                + (
                    f"{' and '.join(self._keys)} given: give that key, as Encryption.old_key_file where it was replaced"
                    if self._keys
                    else "no key is given: set Checkpointing.encryption = @Encryption(), and what holds that key"
                )
            )
        elif encryption is not None and encryption.encrypt and not encryption.plain_steps:
            raise UserError(
                f"checkpoint {self._folder}/{step} is not encrypted, and Checkpointing.encryption is set: where it is your "
                "own, set Encryption.plain_steps = True to resume from it"
            )
        return found

    def _key_of(self, found: Manifest) -> Key | None:
        """The key of an encrypted step, if we have it."""
        return None if found.encryption is None else self._keys.get(found.encryption.get("key", ""))

    def _read(self, step: int, target: PyTree) -> PyTree:
        found, check = self._manifest(step), self._config.verify is Verify.BEFORE
        return chunks.read(self._folder / str(step), found, target, check=check, key=self._key_of(found))

    def _verify_later(self, step: int) -> None:
        try:
            manifest.verify(self._folder / str(step), _is_ours)
        except Corrupted as fault:
            self.corrupted[step] = str(fault)
            if not self._read_only:  # whichever process has found it
                with contextlib.suppress(FileNotFoundError):
                    step_folders.quarantine(self._folder / str(step), step_folders.CORRUPTED)
            raise RestoredFromCorruption(
                f"{self._folder}/{step}, from which this run was restored, is corrupted: {fault}: run the command again to "
                "resume from the step before"
            ) from None

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _check_shared(self) -> None:
        """Raises UserError where this process does not see what process 0 has written; every process calls it."""
        nonce = hosts.gathered(None if self._lease is None else self._lease.nonce)[0]
        if self._lease is None and not lease.is_seen(self._folder, nonce, _SEEN_S):
            raise UserError(
                f"{self._folder} on {socket.gethostname()} is not the folder that process 0 writes to: name a MODEL_DIR that "
                "all hosts share, in a bucket (gs://...) or on a network disk"
            )

    def _check_room(self, state_bytes: int) -> None:
        """Refuses a save that cannot end well: one that fails half-way takes the rest of the disk with it."""
        if self._config.incremental:
            return  # what is written is known only when it has been compared
        if not durable.is_remote(self._folder) and free_bytes(os.fspath(self._folder)) < state_bytes:
            raise OSError(errno.ENOSPC, f"a checkpoint takes about {state_bytes / 2**20:.0f} MiB")

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        with not_writable_explained(self._folder), disk_full_explained(self._folder):
            yield


def _is_ours(file: File) -> bool:
    """Whether this process verifies a file: each has its share."""
    return int(file.xxh128, 16) % jax.process_count() == jax.process_index()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
