"""Saves a step: copies the arrays, writes all files in a thread, and commits the step by its manifest.

All processes write together; unchanged data in an older step is not written again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from capibara.checkpoints import arrays as array_files
from capibara.checkpoints import manifest, retention, run_manifest, step_folders
from capibara.checkpoints.encryption import CIPHER, Key
from capibara.checkpoints.manifest import Corrupted, File, Manifest
from capibara.checkpoints.policy import Checkpointing, Compression
from capibara.core import bucket_faults, tree
from capibara.core.background import Task
from capibara.core.types import PyTree, TryAgain, UserError
from capibara.multihost import peers
from capibara.sharding.replicas import SilentCorruption
from capibara.storage import stores
from capibara.storage.full_disk import is_disk_full

_ATTEMPTS, _PAUSE_S = 3, 0.5  # for a save that fails for another reason than a full disk; the pause doubles
_MESSAGE = "word."  # prefix of the files by which processes exchange values


def snapshot(arrays: PyTree) -> tuple[PyTree, jax.Array]:
    """Starts copying arrays; returns the copies, and whether each array is finite.

    On TPU and GPU the copies are in the host's memory: the HBM has no room for a second state.
    """
    finite = all_finite(arrays)
    if next(iter(jax.tree.leaves(arrays)[0].sharding.device_set)).platform == "cpu":
        return _copied(arrays), finite
    on_hosts = jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), arrays)
    return jax.device_put(arrays, on_hosts, may_alias=False), finite


@jax.jit
def _copied(arrays: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, arrays)


@jax.jit
def all_finite(arrays: PyTree) -> jax.Array:
    """Whether all values of each array are finite, bool [arrays]."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(arrays)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    """A save in progress; every process runs it in a thread.

    Attributes:
      folder: of the step, named after it.
      config: of the run.
      writer: writes the files.
      base: returns the manifest of the older step that unchanged arrays refer to; None: everything is written.
      run: contents of run.json.
      about: values for the manifest.
      check_lease: raises if process 0 must not write there any more.
    """

    folder: epath.Path
    config: Checkpointing
    writer: Writer
    base: Callable[[], Manifest | None]
    run: bytes
    about: dict[str, Any]
    check_lease: Callable[[], None]

    def begin(self, arrays: PyTree, verified: Callable[[], None]) -> Task:
        """Copies the arrays, which may be changed or donated when this returns, and saves in a thread.

        Args:
          arrays: of all hosts.
          verified: waits for a verification, and raises its error, before the step is committed.
        """
        copies, finite = snapshot(arrays)
        return Task(functools.partial(self._save, copies, finite, verified), "capibara-save")

    def _save(self, arrays: PyTree, finite: jax.Array, verified: Callable[[], None]) -> None:
        good = np.asarray(finite.addressable_data(0))
        if bad := [name for name, ok in zip(tree.path_names(arrays), good, strict=True) if not ok]:
            raise UserError(
                f"{bad[0]} is not finite at step {self.folder.name}, not saved: earlier checkpoints are kept; lower "
                "Schedule.learning_rate or set Optimizer.clip_norm, and run the command again"
            )
        base = self.base()
        for attempt in range(_ATTEMPTS):
            try:
                self._commit(self.writer.write(self.folder, arrays, self.run, base, self.check_lease), verified)
                break
            except Exception as error:
                self._remove_failed()
                last = attempt == _ATTEMPTS - 1 or jax.process_count() > 1  # the other processes would wait forever
                if last or is_disk_full(error) or isinstance(error, (UserError, TryAgain)):
                    raise
                if (explained := bucket_faults.explained([error])) is not None:  # it was tried often enough
                    raise explained from error
                logging.getLogger(__name__).warning("saving step %s failed (%s): trying again", self.folder.name, error)
                time.sleep(_PAUSE_S * 2**attempt)
        peers.together("committed")
        if jax.process_index() == 0:
            self.check_lease()
            retention.retain(self.folder.parent, self.config, written=int(self.folder.name))

    def _commit(self, files: list[File], verified: Callable[[], None]) -> None:
        verified()
        if jax.process_index() > 0:
            return
        self.check_lease()
        step, run_folder = int(self.folder.name), self.folder.parent.parent
        about = self.about | {"run": run_manifest.hashes(run_folder)}
        manifest.write(self.folder, self.writer.signed(Manifest(step, tuple(files), about)))
        run_manifest.add_step(run_folder, step)

    def _remove_failed(self) -> None:
        if jax.process_index() == 0:  # the others do not know whether it was committed meanwhile
            with contextlib.suppress(Exception):
                self.check_lease()  # where it is another's now, so is what lies there
                step_folders.remove(self.folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """How a run's steps are written.

    Attributes:
      compress: whether to compress chunks.
      key: encrypts all files except the manifest and the arrays' layouts; None: no encryption.
    """

    compress: bool = False
    key: Key | None = None

    @classmethod
    def of(cls, config: Checkpointing) -> Writer:
        """The writer of a run; raises UserError if its key is missing."""
        encryption = config.encryption
        key = encryption.key() if encryption is not None and encryption.encrypt else None
        return cls(compress=config.compression is Compression.ZSTD, key=key)

    def write(
        self, folder: epath.Path, arrays: PyTree, run: bytes, base: Manifest | None, check: Callable[[], None]
    ) -> list[File]:
        """Writes and syncs everything except the manifest; every process must call it, in any thread.

        Args:
          folder: of the step; existing contents are removed.
          arrays: jax.Array leaves that do not change meanwhile.
          run: contents of run.json.
          base: manifest of an older step that unchanged arrays refer to; None: everything is written.
          check: called by process 0 before it changes anything.

        Returns:
          On process 0 all files of the step.
        """
        if jax.process_index() == 0:
            check()
            step_folders.make_room(folder)
            stores.of(folder).make_folder(folder)
            sealed = run if self.key is None else array_files.seal_run(int(folder.name), run, self.key)
            stores.of(folder).write_atomic(folder / manifest.RUN, sealed)
        peers.together("begun")
        carried = [] if base is None else self._carried(folder, base, arrays)
        if carried:
            retained = {file.array for file in carried}
            arrays = tree.map_with_names(lambda name, leaf: None if name in retained else leaf, arrays)
        files = array_files.write(folder, arrays, key=self.key, compress=self.compress)
        stores.of(folder).sync(folder)
        reported = _exchanged(folder, "files", [dataclasses.asdict(file) for file in files])
        if jax.process_index() > 0:
            return []
        return self._all(folder, [File(**values) for files in reported for values in files], carried)

    def signed(self, plain: Manifest) -> Manifest:
        """The manifest, signed if files are encrypted."""
        if self.key is None:
            return plain
        named = dataclasses.replace(plain, encryption=self._encryption)
        return dataclasses.replace(named, mac=self.key.mac(named.signed()))

    @property
    def _encryption(self) -> dict[str, str] | None:
        return None if self.key is None else {"cipher": CIPHER, "key": self.key.id}

    def _all(self, folder: epath.Path, files: list[File], carried: list[File]) -> list[File]:
        for path in folder.glob(f"{_MESSAGE}*"):
            path.unlink()
        known: dict[str, File] = {}
        for file in files:
            if known.setdefault(file.path, file) != file:
                raise SilentCorruption(
                    f"silent data corruption: two processes hold {file.describe()}, and they differ: this run's state is "
                    "not worth keeping; start it again from its last checkpoint"
                )
        there = stores.of(folder).list(folder)
        for file in known.values():
            if there.get(file.path) != file.size:
                raise Corrupted(f"{file.describe()} was not written whole")
        others = [path for path in there if path not in known]
        return [*known.values(), *manifest.of_disk(folder, others), *carried]

    def _carried(self, folder: epath.Path, base: Manifest, arrays: PyTree) -> list[File]:
        """The files of `base` with the same contents as these arrays; for each array all or none."""
        if base.encryption != self._encryption:
            return []
        mine = [
            file.path
            for name, leaf in zip(tree.path_names(arrays), jax.tree.leaves(arrays), strict=True)
            for file in self._same(folder.parent / str(base.step), base, name, leaf)
        ]
        same = {path for reported in _exchanged(folder, "same", mine) for path in reported}
        result = []
        for name in tree.path_names(arrays):
            files = base.by_folder.get(array_files.folder_of(name), ())
            if files and all(file.path in same for file in files if not file.path.endswith(array_files.LAYOUT)):
                result += [dataclasses.replace(file, array=name, step=file.step or base.step) for file in files]
        return result

    def _same(self, folder: epath.Path, base: Manifest, name: str, leaf: jax.Array) -> list[File]:
        """The chunks of an array in `base` that equal this process's data, and whose files are intact."""
        try:
            cut = array_files.layout(folder, base, name)
        except Corrupted:
            return []
        if (
            cut.shape != leaf.shape
            or cut.dtype != np.dtype(leaf.dtype)
            or (cut.compressor is not None) != self.compress
        ):
            return []
        result = []
        for file in base.by_folder[array_files.folder_of(name)]:
            content = None if file.chunk is None else array_files.region(leaf, cut.bounds(file.chunk))
            if content is not None and array_files.content_hash(content, self.key) == (file.content or file.xxh128):
                result.append(file)
        # What a step refers to must be as reliable as what it writes.
        if stores.of(folder).verifies:
            return [file for file in result if manifest.is_there(folder, file)]
        return [] if manifest.faults(folder, base, set(result).__contains__) else result


def _exchanged(folder: epath.Path, topic: str, value: object) -> list[Any]:
    """Exchanges a JSON value between all processes, by files in the step's folder."""
    if jax.process_count() == 1:
        return [value]
    paths = [folder / f"{_MESSAGE}{topic}.{index}" for index in range(jax.process_count())]
    stores.of(folder).write_atomic(paths[jax.process_index()], json.dumps(value).encode())
    peers.together(topic)
    result = [json.loads(stores.of(folder).read(path)) for path in paths]
    peers.together(f"{topic} read")
    return result
