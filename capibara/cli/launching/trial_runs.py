"""Checks the trials of a sweep before the first is started: what `launch sweep` and `capibara.sweep` share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from capibara.cli.composition import pretrained, training_run
from capibara.core import user_modules
from capibara.core.fields import did_you_mean, nearest
from capibara.core.types import UserError
from capibara.jobs.sweeps import search
from capibara.jobs.sweeps.space import Parameter
from capibara.jobs.sweeps.study import Study
from capibara.jobs.sweeps.trial import Trial

if TYPE_CHECKING:
    from capibara.training.trainer import Trainer

EVALUATED = ("loss", "perplexity", "token_accuracy", "bits_per_byte", "tokens")  # by training.metrics
_TRAINED = ("loss", "token_accuracy", "grad_norm", "learning_rate", "tokens_per_s", "step_s", "mfu")  # some of them
Source = tuple[Sequence[str], Sequence[str], Sequence[str]]  # Gin files, bindings, search paths
_CHECKED = 8  # trials whose configuration is built before anything starts
_QUANTILES = (0.0, 0.99, 0.5)  # of the values that are compared; no run may have one of them


def check_trials(
    study: Study, gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str]
) -> list[pathlib.Path]:
    """Builds the configuration of the first trials; returns the user's files that it consists of.

    A combination of values may be one that no run can have. So it is an error if all of them are.

    Raises:
      UserError: the Gin files and the first trials configure no run, or one that does not report the metric; or what varies
        has no effect.
    """
    from capibara import config

    search.stopper_of(study.sweep, [])  # what it needs may not be installed
    mistakes: list[UserError] = []
    valid: list[Trial] = []
    trials = study.first_trials(_CHECKED)
    shipped = config.search_folders()[-1].resolve()
    paths: list[pathlib.Path] = []
    for trial in trials:
        try:
            read = pretrained.parse(gin_files, [*bindings, *trial.statements], search_paths, pretrained.UNKNOWN_DTYPE)
            local_files = [path for path in read if not path.resolve().is_relative_to(shipped)]
            paths = [*local_files, *map(pathlib.Path, user_modules.files_of(config.imported_modules()))]
            trainer = _parts()["trainer"]
        except UserError as error:
            mistakes.append(error)
            continue
        _check_metric(study.sweep.metric, trainer)
        valid.append(trial)
    if not valid:
        raise mistakes[0]
    for parameter in study.sweep.space:
        _check_effect(parameter, valid[0], (gin_files, bindings, search_paths))
    return paths


def _parts() -> dict[str, Any]:
    """The run that is configured; raises UserError if a flag has no effect on it."""
    from capibara import config
    from capibara.training.trainer import Trainer

    parts = training_run.parts_of(config.build(Trainer))
    config.check_used(parts["trainer"].later)
    return parts


def _check_effect(parameter: Parameter, trial: Trial, source: Source) -> None:
    """Raises UserError if all values of a parameter make the same run, such as those of a scope that nothing is built in."""
    gin_files, bindings, search_paths = source
    runs = []
    for value in dict.fromkeys(map(parameter.sample, _QUANTILES)):
        values = {**trial.bindings, parameter.name: value}
        statements = [f"{name} = {text}" for name, text in values.items()]
        with contextlib.suppress(UserError):  # a combination that no run can have
            pretrained.parse(gin_files, [*bindings, *statements], search_paths, pretrained.UNKNOWN_DTYPE)
            runs.append(_parts())
        if len(runs) > 1 and runs[-1] != runs[0]:
            return
    if len(runs) > 1:
        raise UserError(
            f"{parameter.name} has no effect on the run: all its values train the same; vary another binding"
        )


def _check_metric(text: str, trainer: Trainer) -> None:
    """Raises UserError for a metric that the run will not report, as far as that is known before it runs."""
    kind, _, name = text.partition("/")
    if kind == "eval" and trainer.evaluation.every == 0:
        raise UserError(
            f"--metric={text} needs evaluations, and Evaluation.every is 0: add --gin.Evaluation.every=STEPS, or name a metric "
            "of training, such as train/loss"
        )
    if trainer.loss is not None or "/" in name:
        return
    known = [*EVALUATED, *(["unigram_bits_per_byte"] if trainer.evaluation.unigram_batches else [])]
    if kind == "eval" and name not in known:
        raise UserError(
            f"--metric={text} is not reported{did_you_mean(text, [f'eval/{item}' for item in known], 'metrics')}"
        )
    if kind == "train" and name not in _TRAINED and nearest(name, _TRAINED):
        raise UserError(
            f"--metric={text} is not reported{did_you_mean(text, [f'train/{item}' for item in _TRAINED], 'metrics')}"
        )


def digest(paths: Iterable[pathlib.Path], text: str = "") -> str:
    """The hash of files, whatever their names, and of a text."""
    result = (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in paths)
    return hashlib.sha256(" ".join((*result, text)).strip().encode()).hexdigest()[:16]


@contextlib.contextmanager
def without_accelerator() -> Iterator[None]:
    """Within it JAX is imported for this process, which needs no accelerator; its children may."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
