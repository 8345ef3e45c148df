"""A run's data: this process's share of a split, as its objective wants it."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh

from capibara import sharding
from capibara.data.pipeline.loader import Loader, make_loader
from capibara.training.trainer import Trainer


def open_loader(trainer: Trainer, mesh: Mesh, split: str, rows: int, epochs: int | None = None) -> Loader:
    """This process's share of a split, in global batches of so many rows."""
    shards = sharding.host_shards(mesh, trainer.plan.rules)
    open_one = make_loader if trainer.loss is None else trainer.loss.open
    return open_one(
        trainer.dataset,
        split=split,
        batch_size=rows,
        shard_index=shards[jax.process_index()],
        shard_count=max(shards) + 1,
        epochs=epochs,
    )


def validation_loader(trainer: Trainer, mesh: Mesh) -> Loader:
    """Once over the validation split."""
    rows = trainer.evaluation.batch_size or trainer.plan.batch_size // trainer.plan.accumulation
    return open_loader(trainer, mesh, "validation", rows, epochs=1)


def each_task(trainer: Trainer) -> dict[str, Trainer]:
    """The run as one of each task of its SeqIO mixture that has a validation split, by the task's name; else of its own data."""
    dataset = trainer.dataset
    if not dataset.is_seqio or trainer.loss is not None:
        return {"": trainer}
    from capibara.data.tasks import tasks  # TensorFlow

    names = tasks.parts(tasks.get(dataset.mixture_or_task_name, dataset.task_module), "validation")
    if len(names) < 2:
        return {"": trainer}
    apart = (dataclasses.replace(dataset, mixture_or_task_name=name) for name in names)
    return {name: dataclasses.replace(trainer, dataset=one) for name, one in zip(names, apart, strict=True)}


def validation_batches(trainer: Trainer) -> int | None:
    """Batches of `validation_loader` in one evaluation: as many rows with accumulation as without."""
    evaluation = trainer.evaluation
    if evaluation.max_batches is None or evaluation.batch_size is not None:
        return evaluation.max_batches
    return evaluation.max_batches * trainer.plan.accumulation
