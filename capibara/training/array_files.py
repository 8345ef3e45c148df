"""The arrays of a checkpoint as files, by Orbax: each chunk of an array a file of its bare bytes (zarr 2)."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from capibara import tree
from capibara.training import disk, storage
from capibara.training.manifest import File
from capibara.types import PyTree

FOLDER = "state"


def write(folder: epath.Path, arrays: PyTree) -> list[File]:
    """Writes all arrays to `folder`/state; every process calls it, from any thread.

    Args:
      folder: of the step.
      arrays: jax.Array leaves that nobody changes meanwhile.

    Returns:
      Those of the files that are chunks of which this process holds the contents, with the hashes of what it holds.
    """
    import orbax.checkpoint as ocp

    with _checkpointer(ocp) as writer:
        writer.save(folder / FOLDER, args=ocp.args.PyTreeSave(arrays))
    names, leaves = tree.path_names(arrays), jax.tree.leaves(arrays)
    named = {name.replace("/", "."): (name, leaf) for name, leaf in zip(names, leaves, strict=True)}
    jobs = []
    for path in (folder / FOLDER).iterdir():
        if path.name in named:
            layout = json.loads((path / ".zarray").read_bytes())
            jobs += [(layout, chunk, *named[path.name]) for chunk in path.iterdir() if not chunk.name.startswith(".")]
    return [file for file in storage.each(lambda job: _chunk(*job), jobs) if file is not None]


def read(folder: epath.Path, target: PyTree, *, partial: bool = False) -> PyTree:
    """Reads arrays that `write` wrote onto the devices.

    Args:
      folder: of the step.
      target: ShapeDtypeStructs with the shardings wanted, which may differ from those that were saved.
      partial: `target` has only some of the arrays.
    """
    import orbax.checkpoint as ocp

    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=partial)
    with _checkpointer(ocp) as reader:
        return reader.restore(folder / FOLDER, args=args)


def hush() -> None:
    """Orbax and asyncio log a failed write with its traceback, and TensorStore's threads complain of it once more."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_is_news)
    if getattr(sys.unraisablehook, "func", None) is not _without_orphans:
        sys.unraisablehook = functools.partial(_without_orphans, sys.unraisablehook)


def _checkpointer(ocp: Any) -> Any:
    # Not compressed: trained weights hardly shrink, and the files are the arrays' own bytes. The processes are named so
    # that they wait for each other by JAX's coordinator: by default they would by a collective, in the midst of those
    # of the train step.
    together = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, multiprocessing_options=together)
    return ocp.Checkpointer(handler, multiprocessing_options=together)


def _chunk(layout: dict[str, Any], chunk: epath.Path, name: str, array: jax.Array) -> File | None:
    """One chunk, hashed in memory; None where this process has not all of it, or it is not stored as it is."""
    index = tuple(map(int, chunk.name.split("."))) if array.ndim else ()
    starts = [i * size for i, size in zip(index, layout["chunks"], strict=True)]
    stops = [start + size for start, size in zip(starts, layout["chunks"], strict=True)]
    if layout["compressor"] or any(stop > size for stop, size in zip(stops, array.shape, strict=True)):
        return None
    content = _region(array, starts, stops)
    if content is None:
        return None
    path = f"{FOLDER}/{chunk.parent.name}/{chunk.name}"
    digest = hashlib.sha256(np.ascontiguousarray(content).reshape(-1).view(np.uint8)).hexdigest()
    return File(path, content.nbytes, digest, array=name, chunk=index)


def _region(array: jax.Array, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray | None:
    """A part of an array that lies within one of this process's shards."""
    for shard in array.addressable_shards:
        offsets = [part.start or 0 for part in shard.index]
        ends = [offset + size for offset, size in zip(offsets, shard.data.shape, strict=True)]
        inside = all(a <= b for a, b in zip(offsets, starts)) and all(a <= b for a, b in zip(stops, ends))
        if inside and (math.prod(shard.data.shape) or not shard.data.ndim):
            own = tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, offsets))
            return np.asarray(shard.data)[own]
    return None


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax and asyncio log a failed write with its traceback; it is raised where we wait as well: once is enough.
    # That files which we did not ask for are not there is no news either.
    full = record.exc_info and disk.is_disk_full(record.exc_info[1])
    return not full and "Skipping merge of OCDBT" not in str(record.msg)


def _without_orphans(report: Callable[[Any], None], unraisable: Any) -> None:
    """A sys.unraisablehook: where a write of a save fails, TensorStore's threads report that nobody awaits the rest."""
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        report(unraisable)
