"""What a start of a run does with its folder: checks, comparison with the last start, --start_over."""

from __future__ import annotations

import contextlib
import itertools
import os

import jax

from capibara import config
from capibara.checkpoints import run_manifest, step_folders
from capibara.checkpoints.lease import Lease
from capibara.core.types import UserError
from capibara.multihost import peers
from capibara.storage import outputs, stores
from capibara.storage.full_disk import not_writable_explained
from capibara.training.run_folder.reading import CONFIG

_PERMIT = "CAPIBARA_START_OVER"  # names a launcher's file, which permits --start_over to rename the folder once


def check_resumable(model_dir: str) -> None:
    """Raises UserError if a run folder has lost its checkpoints, or was changed after its run wrote it."""
    folder = stores.folder_of(model_dir)
    if folder.exists():
        run_manifest.check(folder)
        step_folders.lost(step_folders.folder_of(model_dir))


def changes(model_dir: str, configuration: str) -> list[str]:
    """Lines on how the configuration of a start differs from the recorded one; only on process 0."""
    path = os.path.join(model_dir, CONFIG)
    before = outputs.read(path) if jax.process_index() == 0 else None
    try:
        result = [] if before is None else config.diff(before, configuration)
        return [f"changed since the last start: {line}" for line in result]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): move it, or set another MODEL_DIR") from error


def recorded_steps(model_dir: str) -> int | None:
    """Trainer.steps of the last start of a run; None: it is not recorded."""
    text = outputs.read(os.path.join(model_dir, CONFIG))
    with contextlib.suppress(SyntaxError, ValueError):
        _, value = config.changes("", text or "").get("Trainer.steps", (None, None))
        return None if value is None else int(value)
    return None


def start_over(model_dir: str) -> None:
    """Renames a run folder, so that a new run takes its place; every process calls it, process 0 does it.

    After a restart by a launcher the command still has --start_over, but resumes: the launcher's permit is used up.

    Raises:
      UserError: another process writes to the folder, or it is in a bucket.
    """
    folder, permit = stores.folder_of(model_dir), os.environ.get(_PERMIT)
    is_permitted = permit is None or os.path.exists(permit)
    if jax.process_index() == 0 and is_permitted and folder.exists() and any(folder.iterdir()):
        if not stores.of(model_dir).renames:
            raise UserError(
                f"--start_over renames a local folder, and {model_dir} is in a bucket: set another MODEL_DIR"
            )
        steps = step_folders.folder_of(model_dir)
        with not_writable_explained(folder):
            steps.mkdir(exist_ok=True)
            Lease(steps).release()  # refused where a run is writing
            old = next(p for n in itertools.count(1) if not (p := folder.with_name(f"{folder.name}.old{n}")).exists())
            folder.rename(old)
        print(f"{folder} was renamed to {old.name}: a new run begins")
    if jax.process_index() == 0 and permit is not None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(permit)
    peers.together("started over")
