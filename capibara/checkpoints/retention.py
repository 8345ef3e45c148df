"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


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
      keep: how many of the newest are kept.
      keep_every: multiples of it are kept; None: none.
      milestones: steps that are kept.
      keep_best: how many of those with the lowest scores are kept; of equal ones the later.
      scores: step -> its score; a step without one is none of the best.
    """
    steps = sorted(set(steps))
    kept = set(steps[-keep:]) | set(milestones)
    if keep_every is not None:
        kept |= {step for step in steps if step % keep_every == 0}
    scored = [step for step in steps if scores and step in scores]
    kept |= set(sorted(scored, key=lambda step: (scores[step], -step))[:keep_best])
    return [step for step in steps if step not in kept]
