"""Trains a run that Python code describes: `capibara.train`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.api.results import TrainingResult
from capibara.cli.composition import pretrained, training_run
from capibara.core.types import Dataclass
from capibara.multihost import joining

if TYPE_CHECKING:
    from capibara.training.trainer import Trainer


def read_run(*files: str, bindings: Sequence[str] = (), search_paths: Sequence[str] = ()) -> Trainer:
    """The run that files describe, as `capibara train --gin_file=...` reads them, to be changed or trained.

    What Gin has parsed before in this process does not count, and is forgotten.

    Args:
      files: Gin, YAML, JSON or TOML files, the later ones win.
      bindings: Gin statements after them, such as "TRAIN_STEPS = 100".
      search_paths: more folders in which files are looked for.

    Raises:
      UserError: as `capibara train` of these files.
    """
    return pretrained.built(files, bindings, search_paths)


def train(
    trainer: Trainer,
    *others: Dataclass,
    emulate: int | None = None,
    start_over: bool = False,
    joined: joining.Joining = joining.Joining(),
) -> TrainingResult:
    """Trains a run that Python code describes, as `capibara train` trains one of a Gin file: `capibara.train(trainer)`.

    The run folder has the configuration as Gin text, so that the other verbs read it and the command line resumes it. What Gin
    has parsed before in this process does not count, and is forgotten. Ctrl-C saves a checkpoint and returns.

    Args:
      trainer: the run; if its folder exists, it resumes.
      others: what else Gin would configure, at most one of each class, such as capibara.Monitoring() or
        capibara.SampleText().
      emulate: number of emulated CPU devices, before JAX is first used; None: the devices of this machine.
      start_over: rename the run folder if it exists, and start a new run.
      joined: how this process finds the others of a run on several hosts; by default JAX does.

    Raises:
      UserError: the run cannot be trained as described, or Gin text cannot hold a value.
    """
    outcome = training_run.train(trainer, *others, emulate=emulate, start_over=start_over, joined=joined)
    return TrainingResult(trainer.model_dir, outcome.step, outcome.reason, outcome.signal_number)
