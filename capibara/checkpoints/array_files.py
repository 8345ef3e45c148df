"""The arrays of a checkpoint written by Orbax: each chunk of an array a file of its bytes (zarr 2; read by `chunks`)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from capibara.checkpoints import chunks
from capibara.checkpoints.manifest import Corrupted, File
from capibara.core import tree
from capibara.core.types import PyTree
from capibara.storage import durable, full_disk


def write(folder: epath.Path, arrays: PyTree, *, compress: bool = False) -> list[File]:
    """Writes all arrays to `folder`/state; every process calls it, from any thread.

    Args:
      folder: of the step.
      arrays: jax.Array leaves that nobody changes meanwhile.
      compress: the chunks, by zstd.

    Returns:
      Those of the files that are chunks of which this process holds the contents, with the hashes of what it holds; of
      compressed ones, which are decoded and compared with that, of what the disk does.
    """
    import orbax.checkpoint as ocp

    with _checkpointer(ocp, compress) as writer:
        writer.save(folder / chunks.FOLDER, args=ocp.args.PyTreeSave(arrays))

    names: dict[str, list[str]] = {}  # of each array's chunks
    for path in durable.files_below(folder / chunks.FOLDER):
        inner, _, name = path.rpartition("/")
        if not name.startswith("."):
            names.setdefault(inner, []).append(name)
    jobs = []
    for array, leaf in zip(tree.path_names(arrays), jax.tree.leaves(arrays), strict=True):
        inner = folder / chunks.folder_of(array)
        cut = chunks.Layout.parse((inner / chunks.LAYOUT).read_bytes())
        jobs += [(cut, inner / name, array, leaf) for name in names.get(inner.name, ())]
    files = durable.each(lambda job: _chunk(*job), jobs)
    return [file for file in files if file is not None]


def hush() -> None:
    """Orbax and asyncio log a failed write with its traceback, and TensorStore's threads complain of it once more."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_is_news)
    if getattr(sys.unraisablehook, "func", None) is not _without_orphans:
        sys.unraisablehook = functools.partial(_without_orphans, sys.unraisablehook)


def _checkpointer(ocp: Any, compress: bool) -> Any:
    # The processes are named so that they wait for each other by JAX's coordinator: by default they would by a
    # collective, in the midst of those of the train step.
    together = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=compress, multiprocessing_options=together)
    return ocp.Checkpointer(handler, multiprocessing_options=together)


def _chunk(cut: chunks.Layout, path: epath.Path, name: str, array: jax.Array) -> File | None:
    """One chunk, hashed in memory; None where this process has not all of it."""
    index = tuple(map(int, path.name.split("."))) if array.ndim else ()
    if any((i + 1) * size > full for i, size, full in zip(index, cut.chunks, cut.shape, strict=True)):
        return None  # reaches beyond the array
    content = chunks.region(array, cut.bounds(index))
    if content is None:
        return None
    digest = chunks.content_hash(content, None)
    inner = f"{chunks.folder_of(name)}/{path.name}"
    if cut.compressor is None:
        return File(inner, content.nbytes, digest, array=name, chunk=index)
    data, on_disk = durable.read_hashed(path, durable.size_of(path))
    file = File(inner, len(data), on_disk, array=name, chunk=index, content=digest)
    if chunks.content_hash(chunks.decode(data, cut, file), None) != digest:
        raise Corrupted(f"{file.describe()} does not hold what was to be saved")
    return file


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax and asyncio log a failed write with its traceback; it is raised where we wait as well: once is enough. So is
    # what a thread of Orbax's failed of, but for what only followed: that the folder of a save that failed is gone.
    # That files which we did not ask for are not there is no news either.
    full = record.exc_info and full_disk.is_disk_full(record.exc_info[1])
    return not full and not any(
        known in str(record.msg) for known in ("_SignalingThread.run()", "Skipping merge of OCDBT")
    )


def _without_orphans(report: Callable[[Any], None], unraisable: Any) -> None:
    """A sys.unraisablehook: where a write of a save fails, TensorStore's threads report that nobody awaits the rest."""
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        report(unraisable)
