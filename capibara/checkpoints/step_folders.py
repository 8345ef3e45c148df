"""Lists, removes and quarantines the folders of a run's steps."""

from __future__ import annotations

import logging

from etils import epath

from capibara.checkpoints import manifest, run_manifest
from capibara.checkpoints.manifest import Corrupted
from capibara.core.types import UserError
from capibara.storage import stores
from capibara.storage.store import PARTIAL

_ARRAYS = "state"  # begins the name of their folder, as of the one that Orbax renamed to it in earlier versions
# Suffixes of quarantined steps' names. FORMERLY is the old one for CORRUPTED.
CORRUPTED, UNFINISHED, ROLLED_BACK, FORMERLY = ".corrupted", ".unfinished", ".rolled_back", ".damaged"


def folder_of(model_dir: str) -> epath.Path:
    """The folder of a run's steps."""
    return stores.folder_of(model_dir) / "checkpoints"


def is_step(name: str) -> bool:
    """Whether a folder's name is that of a step."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def steps(folder: epath.Path) -> list[int]:
    """The committed steps of a folder, oldest first; their files are not checked."""
    return sorted(int(path.name) for path in folder.iterdir() if is_step(path.name) and manifest.exists(path))


def is_whole(folder: epath.Path) -> bool:
    """Whether a step's files are intact; if not, logs why."""
    try:
        manifest.verify(folder)
    except Corrupted as fault:
        logging.getLogger(__name__).warning("%s is corrupted: %s", folder, fault)
        return False
    return True


def is_unfinished(folder: epath.Path) -> bool:
    """Whether a step's folder was left by an incomplete save of ours."""
    if not folder.is_dir() or manifest.exists(folder):
        return False
    names = {path.name for path in folder.iterdir()}
    # Arrays alone: a write that was still under way when the save failed has made its folder anew.
    ours = all(name.startswith(_ARRAYS) for name in names)
    return ours or any(name.startswith(manifest.RUN) for name in names)


def remove(folder: epath.Path) -> None:
    """Removes a step's folder if it exists; a partly removed one never counts as a step."""
    if not folder.exists():
        return
    _forget(folder)
    store = stores.of(folder)
    store.remove(folder / manifest.NAME)
    # A partly removed folder must not look like another program's: its name says unfinished, or it keeps its run.json.
    store.remove_folder(folder, aside=folder.with_name(f"{folder.name}{UNFINISHED}"), last=manifest.RUN)


def quarantine(folder: epath.Path, ending: str) -> epath.Path:
    """Renames a step's folder and returns the new path; removes what had that name before."""
    _forget(folder)
    aside = folder.with_name(f"{folder.name}{ending}")
    if aside.exists():
        aside.rmtree()
    stores.of(folder).rename_folder(folder, aside)
    return aside


def _forget(folder: epath.Path) -> None:
    """Records that a step's folder is about to be removed, so that it does not count as lost."""
    if is_step(folder.name):
        run_manifest.forget_step(folder.parent.parent, int(folder.name))


def make_room(folder: epath.Path) -> None:
    """Removes what is in the place of a step that is about to be written; one that has lost its manifest is quarantined."""
    lost_there = (
        folder.exists()
        and not manifest.exists(folder)
        and int(folder.name) in run_manifest.recorded_steps(folder.parent.parent)
    )
    if lost_there:
        quarantine(folder, CORRUPTED)
    else:
        remove(folder)


def lost(folder: epath.Path) -> list[int]:
    """The steps that the run has committed and that are not there any more, oldest first.

    Raises:
      UserError: there are some, and no other step to resume from: to start from step 0 would lose them silently.
    """
    run = folder.parent
    missing = run_manifest.lost_steps(run) if run.exists() else []
    if missing and not (folder.is_dir() and steps(folder)):
        raise UserError(
            f"{folder} holds none of the checkpoints that the run records (step {', '.join(map(str, missing[-3:]))}): restore "
            f"it from a copy; or begin a new run with --start_over, which renames {run}, or with another MODEL_DIR"
        )
    return missing


def why_lost(folder: epath.Path, step: int) -> str:
    """What is missing of a step that was committed."""
    path = folder / str(step)
    return f"{manifest.NAME} is gone" if path.exists() else "its folder is gone"


def remove_leftovers(folder: epath.Path) -> None:
    """Removes what saves left that did not come to their end: it may be what fills the disk.

    Where it is all there is, it stays until a step is committed: somebody may want to look at it. A step that was
    committed and has lost its manifest is no leftover.
    """
    committed, recorded = bool(steps(folder)), run_manifest.recorded_steps(folder.parent)
    for path in folder.iterdir():
        if is_step(path.name) and int(path.name) in recorded:
            continue
        if is_step(path.name) and is_unfinished(path):
            if committed:
                path.rmtree()
            else:
                quarantine(path, UNFINISHED)
        elif committed and path.name.endswith(UNFINISHED):
            path.rmtree()
        elif path.name.endswith(PARTIAL):
            path.unlink(missing_ok=True)  # the thread that renews the lease has just renamed its own


def check_foreign(folder: epath.Path) -> None:
    """Raises UserError if a folder has steps, but none to resume from: a new run would overwrite them."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is no folder: move it away, or set another MODEL_DIR")
    if folder.exists() and not steps(folder):
        for path in folder.iterdir():
            if path.name.endswith((CORRUPTED, FORMERLY)):
                raise UserError(
                    f"{folder} holds no step but {path.name}, which was found corrupted: restore the folder from a copy, or "
                    f"set another MODEL_DIR to start anew"
                )
            if is_step(path.name) and path.is_dir() and any(path.iterdir()) and not is_unfinished(path):
                raise UserError(
                    f"{path} has no {manifest.NAME}: another program wrote it, or capibara before it had them; move it "
                    "away, or set another MODEL_DIR"
                )
