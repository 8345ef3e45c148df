"""Loss, perplexity, bits per byte and token accuracy over a run's validation split."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

import jax

from capibara import sharding
from capibara.core.types import HostBatch, UserError
from capibara.evaluation.answers import Show
from capibara.evaluation.metrics import Estimate
from capibara.evaluation.subject import Subject
from capibara.objectives.batches import make_totals
from capibara.objectives.loss import Loss
from capibara.training import evaluation, feed
from capibara.training.trainer import Trainer

NAME = "validation"


def validated(subject: Subject, limit: int | None, show: Show) -> tuple[dict[str, Estimate], int]:
    """The metrics over at most `limit` batches, and the number of batches.

    Standard errors are those of a ratio of sums over batches, which have similar numbers of tokens; packed documents cannot
    be separated.

    Raises:
      UserError: the run was not trained with the cross entropy of texts.
    """
    trainer, mesh = subject.trainer, subject.mesh
    if trainer.loss is not None and type(trainer.loss).batch_provider is not Loss.batch_provider:
        raise UserError(
            f"{subject.about['model']} was trained with {type(trainer.loss).__name__}, whose validation needs its reference "
            "model or rewards: only `train` logs it; name tasks instead, e.g. --gin_file=evaluation/questions.gin"
        )
    if trainer.evaluation.max_batches is not None:  # the limit of evaluations during training
        trainer = dataclasses.replace(trainer, evaluation=dataclasses.replace(trainer.evaluation, max_batches=None))
    if trainer.loss is not None:
        return _of_loss(subject, trainer, limit, show)
    step = evaluation.make_eval_step(subject.model, trainer.plan, mesh, subject.vocabulary.token_bytes())
    placed = sharding.batch_sharding(mesh, trainer.plan.rules)
    with contextlib.closing(feed.validation_loader(trainer, mesh)) as loader:
        sums = evaluation.sums_of(step, subject.params, _shown(itertools.islice(loader, limit), show), placed)
    metrics = evaluation.metrics_of(sums, subject.model.layer_metrics)
    weights = [float(s.weight) for s, _, _ in sums]
    loss = _error([float(s.nll) for s, _, _ in sums], weights)
    errors = {"loss": loss, "perplexity": loss and metrics["perplexity"] * loss}
    errors["token_accuracy"] = _error([float(s.correct) for s, _, _ in sums], weights)
    errors["bits_per_byte"] = _error([float(s.nll) / math.log(2) for s, _, _ in sums], [float(n) for _, n, _ in sums])
    return {name: Estimate(value, errors.get(name)) for name, value in metrics.items()}, len(sums)


def _of_loss(subject: Subject, trainer: Trainer, limit: int | None, show: Show) -> tuple[dict[str, Estimate], int]:
    """The metrics of the run's own loss, which needs nothing but the batches."""
    assert trainer.loss is not None
    objective = trainer.loss.checked_objective(subject.model, trainer.dataset)
    step = make_totals(objective, trainer.plan, subject.mesh)
    placed = sharding.batch_sharding(subject.mesh, trainer.plan.rules)
    with contextlib.closing(feed.validation_loader(trainer, subject.mesh)) as loader:
        batches = (sharding.global_batch(placed, batch) for batch in _shown(itertools.islice(loader, limit), show))
        sums = [jax.device_get(step(subject.params, batch)) for batch in batches]
    total = jax.tree.map(lambda *parts: float(sum(parts)), *sums)
    metrics = objective.checked_metrics(total, max(total.weight, 1.0))
    return {name: Estimate(float(value), None) for name, value in metrics.items()}, len(sums)


def _shown(batches: Iterable[HostBatch], show: Show) -> Iterator[HostBatch]:
    for number, batch in enumerate(batches, 1):
        show(NAME, f"batch {number}")
        yield batch


def _error(numerators: list[float], denominators: list[float]) -> float | None:
    """The standard error of a ratio of sums."""
    count, total = len(numerators), sum(denominators)
    if count < 2 or not total:
        return None
    ratio = sum(numerators) / total
    squares = sum((x - ratio * y) ** 2 for x, y in zip(numerators, denominators))
    return math.sqrt(count / (count - 1) * squares) / total
