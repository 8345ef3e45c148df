"""The files of one step, written by all processes together; those that a step before holds already are left to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from capibara.checkpoints import array_files, chunks, manifest, step_folders
from capibara.checkpoints.encryption import CIPHER, Key
from capibara.checkpoints.manifest import Corrupted, File, Manifest
from capibara.core import tree
from capibara.core.types import PyTree
from capibara.sharding.replicas import SilentCorruption
from capibara.storage import durable

_PATIENCE_S = 3600  # one host's disk may be slower than the others'; of a process that is dead the heartbeat tells
_WORD = "word."  # begins the name of what a process tells the others, until they have read it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """How a run's steps are written.

    Attributes:
      compress: chunks are compressed.
      key: encrypts all files but the manifest and the arrays' layouts; None: they are not encrypted.
    """

    compress: bool = False
    key: Key | None = None

    def write(
        self, folder: epath.Path, arrays: PyTree, run: bytes, base: Manifest | None, check: Callable[[], None]
    ) -> list[File]:
        """Everything but the manifest, on the disk when this returns; every process calls it, from any thread.

        Args:
          folder: of the step; what is there goes.
          arrays: jax.Array leaves that nobody changes meanwhile.
          run: the content of run.json.
          base: of an older step, to which what has not changed since is left; None: all is written.
          check: called by process 0 before it changes anything.

        Returns:
          On process 0 all files of the step.
        """
        if jax.process_index() == 0:
            check()
            step_folders.make_room(folder)
            folder.mkdir()
            sealed = run if self.key is None else chunks.seal_run(int(folder.name), run, self.key)
            durable.write(folder / manifest.RUN, sealed)
        together("begun")
        carried = [] if base is None else self._carried(folder, base, arrays)
        if carried:
            kept = {file.array for file in carried}
            arrays = tree.map_with_names(lambda name, leaf: None if name in kept else leaf, arrays)
        if self.key is None:
            files = array_files.write(folder, arrays, compress=self.compress)
        else:
            files = chunks.write(folder, arrays, self.key, chunks.COMPRESSOR if self.compress else None)
        durable.sync(folder)
        told = _told(folder, "files", [dataclasses.asdict(file) for file in files])
        if jax.process_index() > 0:
            return []
        return self._all(folder, [File(**values) for files in told for values in files], carried)

    def signed(self, plain: Manifest) -> Manifest:
        """The manifest as it is written: signed, where files are encrypted."""
        if self.key is None:
            return plain
        told = dataclasses.replace(plain, encryption=self._encryption)
        return dataclasses.replace(told, mac=self.key.mac(told.signed()))

    @property
    def _encryption(self) -> dict[str, str] | None:
        return None if self.key is None else {"cipher": CIPHER, "key": self.key.id}

    def _all(self, folder: epath.Path, files: list[File], carried: list[File]) -> list[File]:
        for path in folder.glob(f"{_WORD}*"):
            path.unlink()
        known: dict[str, File] = {}
        for file in files:
            if known.setdefault(file.path, file) != file:
                raise SilentCorruption(
                    f"silent data corruption: two processes hold {file.describe()}, and they differ: this run's state is "
                    "not worth keeping; start it again from its last checkpoint"
                )
        there = durable.files_below(folder)
        for file in known.values():
            if there.get(file.path) != file.size:
                raise Corrupted(f"{file.describe()} was not written whole")
        others = [path for path in there if path not in known]
        return [*known.values(), *manifest.of_disk(folder, others), *carried]

    def _carried(self, folder: epath.Path, base: Manifest, arrays: PyTree) -> list[File]:
        """The files of `base` that hold what these arrays do: of an array all, or none."""
        if base.encryption != self._encryption:
            return []
        mine = [
            file.path
            for name, leaf in zip(tree.path_names(arrays), jax.tree.leaves(arrays), strict=True)
            for file in self._same(folder.parent / str(base.step), base, name, leaf)
        ]
        same = {path for told in _told(folder, "same", mine) for path in told}
        found = []
        for name in tree.path_names(arrays):
            files = base.by_folder.get(chunks.folder_of(name), ())
            if files and all(file.path in same for file in files if not file.path.endswith(chunks.LAYOUT)):
                found += [dataclasses.replace(file, array=name, step=file.step or base.step) for file in files]
        return found

    def _same(self, folder: epath.Path, base: Manifest, name: str, leaf: jax.Array) -> list[File]:
        """Those of the chunks of an array in `base` that hold what this process does, and whose files still do."""
        try:
            cut = chunks.layout(folder, base, name)
        except Corrupted:
            return []
        if (
            cut.shape != leaf.shape
            or cut.dtype != np.dtype(leaf.dtype)
            or (cut.compressor is not None) != self.compress
        ):
            return []
        found = []
        for file in base.by_folder[chunks.folder_of(name)]:
            content = None if file.chunk is None else chunks.region(leaf, cut.bounds(file.chunk))
            if content is not None and chunks.content_hash(content, self.key) == (file.content or file.xxh128):
                found.append(file)
        # What a step refers to is as good as what it writes. A bucket keeps what it has taken.
        if durable.is_remote(folder):
            return [file for file in found if manifest.is_there(folder, file)]
        return [] if manifest.faults(folder, base, set(found).__contains__) else found


def together(point: str) -> None:
    """Waits for all processes to come here; by the coordinator, not by the devices, which are training."""
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp

        name = ocp.multihost.unique_barrier_key(f"capibara:{point}")
        ocp.multihost.sync_global_processes(name, timeout=_PATIENCE_S, processes=set(range(jax.process_count())))


def _told(folder: epath.Path, topic: str, value: Any) -> list[Any]:
    """Every process's JSON value, by files in the step's folder."""
    if jax.process_count() == 1:
        return [value]
    durable.write(folder / f"{_WORD}{topic}.{jax.process_index()}", json.dumps(value).encode())
    together(topic)
    words = [folder / f"{_WORD}{topic}.{index}" for index in range(jax.process_count())]
    told = [json.loads(path.read_bytes()) for path in words]
    together(f"{topic} read")
    return told
