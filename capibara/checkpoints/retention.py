"""Decides which steps are kept, and removes the others, but only if a kept step is intact."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from capibara.checkpoints import manifest, step_folders
from capibara.checkpoints.manifest import Corrupted
from capibara.checkpoints.policy import Checkpointing
from capibara.storage import stores, threads


def expendable(
    steps: Iterable[int],
    *,
    keep: int,
    keep_every: int | None = None,
    milestones: Iterable[int] = (),
    keep_best: int = 0,
    scores: Mapping[int, float] | None = None,
) -> list[int]:
    """The steps that no rule keeps, oldest first.

    Args:
      steps: all committed steps.
      keep: number of newest steps to keep.
      keep_every: multiples of it are kept; None: none.
      milestones: steps to keep.
      keep_best: number of steps with the lowest scores to keep; later ones win ties.
      scores: step -> its score; steps without one are never among the best.
    """
    steps = sorted(set(steps))
    retained = set(steps[-keep:]) | set(milestones)
    if keep_every is not None:
        retained |= {step for step in steps if step % keep_every == 0}
    scored = sorted((score, -step) for step, score in (scores or {}).items() if step in steps)
    retained |= {-step for _, step in scored[:keep_best]}
    return [step for step in steps if step not in retained]


def bases(folder: epath.Path, steps: Iterable[int]) -> set[int]:
    """The older steps of a folder that hold files of these."""
    result: set[int] = set()
    for step in steps:
        with contextlib.suppress(Corrupted):
            result |= {file.step for file in manifest.read(folder / str(step)).files if file.step is not None}
    return result


def prunable(
    folder: epath.Path, retained: Sequence[int], dropped: Sequence[int], written: int | None = None
) -> list[int] | None:
    """The dropped steps that may be removed, in that order; None: none may, since no retained step is intact.

    Args:
      folder: of the steps.
      retained, dropped: steps.
      written: the step that this process has just written: what a bucket has accepted is not downloaded again.
    """
    sent = written if stores.of(folder).verifies else None
    if not any(
        _is_sent(folder / str(s)) if s == sent else step_folders.is_whole(folder / str(s))
        for s in sorted(retained, reverse=True)
    ):
        return None
    return sorted(set(dropped) - bases(folder, retained), reverse=True)


def _is_sent(folder: epath.Path) -> bool:
    there = stores.of(folder).list(folder)
    others = [file for file in manifest.read(folder).files if there.get(file.path) != file.size]  # of older steps
    return all(threads.each(functools.partial(manifest.is_there, folder), others))


def prune(folder: epath.Path, retained: Sequence[int], dropped: Sequence[int], written: int | None = None) -> bool:
    """Removes steps if at least one kept step is intact; returns whether it did.

    Steps that hold files of kept ones stay. The newest are removed first, so that none ever lacks its base.
    """
    steps = prunable(folder, retained, dropped, written)
    for step in steps or ():
        step_folders.remove(folder / str(step))
    return steps is not None


def retain(folder: epath.Path, config: Checkpointing, written: int | None = None) -> None:
    """Removes leftovers, and the steps that no rule keeps if at least one kept step is intact.

    Args:
      folder: of the steps.
      config: the rules.
      written: as in `prunable`.
    """
    there, scores = step_folders.steps(folder), {}
    for step in there if config.keep_best else ():
        with contextlib.suppress(Corrupted):
            scores[step] = manifest.read(folder / str(step)).about.get("score")
    drop = expendable(
        there,
        keep=config.keep,
        keep_every=config.keep_every,
        milestones=config.milestones,
        keep_best=config.keep_best,
        scores={step: score for step, score in scores.items() if score is not None},
    )
    try:
        if drop and not prune(folder, [step for step in there if step not in drop], drop, written):
            logging.getLogger(__name__).warning("%s: older steps are kept", folder)
        step_folders.remove_leftovers(folder)
    except (OSError, manifest.Unreadable) as error:  # the saved step is complete nevertheless
        logging.getLogger(__name__).warning("%s: old steps cannot be removed: %s", folder, error)
