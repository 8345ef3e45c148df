"""Verifies the step that a run resumes from: before it is restored, or during training.

`manifest` compares the files with their hashes; `arrays` does so with the chunks that it reads.
"""

from __future__ import annotations

import contextlib
import functools

import jax
from etils import epath

from capibara.checkpoints import manifest, step_folders
from capibara.checkpoints.manifest import Corrupted, File
from capibara.checkpoints.policy import Verify
from capibara.core.background import Task
from capibara.core.types import TryAgain


class RestoredFromCorruption(TryAgain):
    """A run was restored from a corrupted step: it must be started again."""


def check_rest(folder: epath.Path, when: Verify) -> None:
    """Verifies the files that are not verified on reading, as chunks are by their hashes.

    Args:
      folder: of the step.
      when: unless it is BEFORE, only the manifest is checked.

    Raises:
      Corrupted: the manifest is missing, or a file of this process's share is corrupted.
    """
    if when is Verify.BEFORE:
        manifest.verify(folder, lambda file: file.array is None and _is_ours(file))
    else:
        manifest.read(folder)


def check_all(folder: epath.Path) -> None:
    """Raises Corrupted if a file of this process's share is corrupted."""
    manifest.verify(folder, _is_ours)


def beside_training(folder: epath.Path, corrupted: dict[int, str], *, read_only: bool) -> Task:
    """Verifies a step in a thread; quarantines a corrupted one, and raises RestoredFromCorruption.

    Args:
      folder: of the step.
      corrupted: receives the step and why.
      read_only: do not quarantine it.
    """
    return Task(functools.partial(_verify, folder, corrupted, read_only), "capibara-verify")


def _verify(folder: epath.Path, corrupted: dict[int, str], read_only: bool) -> None:
    try:
        check_all(folder)
    except Corrupted as fault:
        corrupted[int(folder.name)] = str(fault)
        if not read_only:  # on whichever process found it
            with contextlib.suppress(FileNotFoundError):
                step_folders.quarantine(folder, step_folders.CORRUPTED)
        raise RestoredFromCorruption(
            f"{folder}, from which this run was restored, is corrupted: {fault}: run the command again to "
            "resume from the previous step"
        ) from None


def _is_ours(file: File) -> bool:
    """Whether this process verifies a file; the processes divide the files."""
    return int(file.xxh128, 16) % jax.process_count() == jax.process_index()
