"""Verifies the step that a run resumes from: before anything is restored, or beside training."""

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
    """What a run was restored from turned out not to be what was saved: it must be started again."""


def check_rest(folder: epath.Path, when: Verify) -> None:
    """Verifies what is not verified as it is read: chunks are compared with their hashes then.

    Args:
      folder: of the step.
      when: unless it is BEFORE, only the manifest is looked at.

    Raises:
      Corrupted: there is no manifest, or a file of this process's share is not what was saved.
    """
    if when is Verify.BEFORE:
        manifest.verify(folder, lambda file: file.array is None and _is_ours(file))
    else:
        manifest.read(folder)


def check_all(folder: epath.Path) -> None:
    """Raises Corrupted where a file of this process's share is not what was saved."""
    manifest.verify(folder, _is_ours)


def beside_training(folder: epath.Path, corrupted: dict[int, str], *, read_only: bool) -> Task:
    """Verifies a step in a thread. What it finds corrupted it quarantines, and ends with RestoredFromCorruption.

    Args:
      folder: of the step.
      corrupted: is told of the step and why.
      read_only: nothing is quarantined.
    """
    return Task(functools.partial(_verify, folder, corrupted, read_only), "capibara-verify")


def _verify(folder: epath.Path, corrupted: dict[int, str], read_only: bool) -> None:
    try:
        check_all(folder)
    except Corrupted as fault:
        corrupted[int(folder.name)] = str(fault)
        if not read_only:  # whichever process has found it
            with contextlib.suppress(FileNotFoundError):
                step_folders.quarantine(folder, step_folders.CORRUPTED)
        raise RestoredFromCorruption(
            f"{folder}, from which this run was restored, is corrupted: {fault}: run the command again to "
            "resume from the step before"
        ) from None


def _is_ours(file: File) -> bool:
    """Whether this process verifies a file: each has its share."""
    return int(file.xxh128, 16) % jax.process_count() == jax.process_index()
