"""The data of a run: this process's part of a split, and the batches of its steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.core import user_modules
from capibara.core.fields import as_json
from capibara.core.types import Params, UserError
from capibara.data.pipeline.loader import Loader, Position, make_loader, merge_states
from capibara.data.sources.sources import CombinedSource, Rows
from capibara.multihost import hosts
from capibara.objectives.batches import BatchProvider
from capibara.training.trainer import Trainer


class BatchFeed:
    """The batches of a run's steps, on its devices, and the state of its data; leaving its `with` closes it.

    Args:
      batches: the training split.
      batch_sharding: of every array of a batch.
      provider: makes the batches, if the loss needs more than the data.
      spec: shape and dtype of every array of a provider's batch.
      constants: arrays that every batch has besides.
    """

    def __init__(
        self,
        batches: Loader,
        batch_sharding: NamedSharding,
        provider: BatchProvider | None,
        spec: Mapping[str, tuple[tuple[int, ...], np.dtype]],
        constants: Mapping[str, jax.Array] | None = None,
    ):
        self._constants = dict(constants or {})
        self._batches, self._batch_sharding, self.provider, self._spec = batches, batch_sharding, provider, spec
        self._unused: dict[str, Any] | None = None  # the data's state before a batch that was abandoned
        self.position: Position = None  # the data's position before the current batch

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, params: Params, step: int, saved: Mapping[str, object] | None) -> None:
        """Called before the first step of this start, and after a roll-back.

        Args:
          params: the current parameters.
          step: completed steps.
          saved: the `provider_state` of the checkpoint from which the run resumes; None: a new run.

        Raises:
          Interrupted: the run must stop.
        """
        if self.provider is not None:
            self.provider.begin(params, step, saved)

    def takes_long(self, step: int) -> bool:
        """Whether the devices make the batch of a step."""
        return self.provider is not None and self.provider.takes_long(step)

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        """The batch of a step, on its devices; `params`: the parameters before the step.

        Raises:
          Interrupted: the run must stop; its next start makes this batch.
        """
        if self.provider is None:
            self.position = self._batches.position
            return sharding.global_batch(self._batch_sharding, next(self._batches)) | self._constants
        before, count = self._batches.position, self._batches.batches
        self._unused = self._batches.get_state() if self.takes_long(step) else None
        batch = self.provider.next_batch(step, params)
        self._check(batch)
        self._unused = None
        ahead = self.provider.read_ahead
        if ahead is not None:
            self.position = ahead.position
        elif self._batches.batches > count:
            self.position = before
        return batch

    def _check(self, batch: Mapping[str, jax.Array]) -> None:
        """Raises UserError if a batch of the provider's does not have the arrays that the step was compiled for."""
        name = f"the batch of {type(self.provider).__name__}"
        if self._spec.keys() != batch.keys():
            raise UserError(f"{name} has the arrays {sorted(batch)}, must have {sorted(self._spec)}")
        for key, (shape, dtype) in self._spec.items():
            if batch[key].shape != shape or batch[key].dtype != dtype:
                result = f"{batch[key].dtype}{list(batch[key].shape)}"
                raise UserError(f"{name} has {result} for {key!r}, must have {np.dtype(dtype)}{list(shape)}")

    def state(self) -> dict[str, Any]:
        """The state of the data on all hosts, for a checkpoint; every process calls it."""
        ahead = None if self.provider is None else self.provider.read_ahead
        return merge_states(hosts.gathered(ahead.state if ahead else self._unused or self._batches.get_state()))

    def epochs(self) -> float | None:
        """The passes over the data that the run has read in all its starts; None: not known."""
        try:
            return self._batches.epochs()
        except (UserError, OSError):  # of rows that the run does not need
            return None

    def close(self) -> None:
        """Stops what makes batches beside the steps, until the next `begin`."""
        if self.provider is not None:
            self.provider.close()

    def provider_state(self) -> dict[str, Any] | None:
        """The provider's state for a checkpoint; None: there is no provider."""
        state = None if self.provider is None else self.provider.state()
        if (user_class := user_modules.own_class(self.provider)) is not None:
            as_json(state, f"{user_class}.state")
        return state

    def metrics(self) -> dict[str, float]:
        """Metrics of the batches since the last call."""
        return {} if self.provider is None else self.provider.metrics()


def open_loader(trainer: Trainer, mesh: Mesh, split: str, rows: int, epochs: int | None = None) -> Loader:
    """This process's part of a split, in global batches of `rows` rows."""
    shards = sharding.host_shards(mesh, trainer.plan.rules)
    open_one = make_loader if trainer.loss is None else trainer.loss.open
    if trainer.loss is None and epochs is None:
        options, source = trainer.training_method.loader_options(), trainer.dataset.source
        if isinstance(source, CombinedSource) and source.rows is Rows.APART:
            options["places"] = sharding.row_places(mesh, trainer.plan.rules, rows)
        open_one = functools.partial(make_loader, **options)
    return open_one(
        trainer.dataset,
        split=split,
        batch_size=rows,
        shard_index=shards[jax.process_index()],
        shard_count=max(shards) + 1,
        epochs=epochs,
    )


def validation_loader(trainer: Trainer, mesh: Mesh) -> Loader:
    """One pass over the validation split."""
    rows = trainer.evaluation.batch_size or trainer.plan.batch_size // trainer.plan.micro_batches
    return open_loader(trainer, mesh, "validation", rows, epochs=1)


def each_task(trainer: Trainer) -> dict[str, Trainer]:
    """Task name -> the run with this task of its SeqIO mixture as data; for other data, the run itself."""
    dataset, name = trainer.dataset, trainer.dataset.mixture_or_task_name
    if name is None or trainer.loss is not None:
        return {"": trainer}
    from capibara.data.tasks import tasks  # TensorFlow

    names = tasks.parts(tasks.get(name, dataset.task_module), "validation")
    if len(names) < 2:
        return {"": trainer}
    datasets = (dataclasses.replace(dataset, mixture_or_task_name=name) for name in names)
    return {name: dataclasses.replace(trainer, dataset=item) for name, item in zip(names, datasets, strict=True)}


def validation_batches(trainer: Trainer) -> int | None:
    """The largest number of batches in one evaluation; accumulation does not change the number of rows."""
    evaluation = trainer.evaluation
    if evaluation.max_batches is None or evaluation.batch_size is not None:
        return evaluation.max_batches
    return evaluation.max_batches * trainer.plan.micro_batches
