"""Batch providers: make the batches of a run's steps if they need more than the data."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.core.fields import returned
from capibara.core.types import Batch, HostBatch, Params, PyTree, UserError
from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import Loader, Position
from capibara.models.api import Model, TransformerConfig
from capibara.objectives.base import Objective
from capibara.sharding import Plan, RematPolicy


class Check(Protocol):
    """Checks whether a run must stop during long work."""

    def __call__(self, done: int, every: int = 1) -> None:
        """As StopRequest.check: call it after `done` parts; exchanged between hosts every `every` parts."""
        ...


@dataclasses.dataclass(frozen=True)
class Reporter:
    """Functions for work that takes longer than a step: report progress, and check whether the run must stop.

    Attributes:
      check: call it before each part of the work, on every process.
      progress: shows the progress; "": the work is over.
      status: prints a line.
      timed: records seconds outside of steps, by cause.
    """

    check: Check
    progress: Callable[[str], None]
    status: Callable[[str], None]
    timed: Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class RunParts:
    """The parts of a run that a loss may use to make its batches.

    Attributes:
      model_dir, seed, init_from: of the run.
      model, dataset, plan, mesh: of the run.
      batch_sharding: of every array of a batch.
      batches: the training split.
      step_temp_bytes: temporary memory of the train step on a device, beside its arguments.
      evaluates: whether the run has evaluations.
      open_once: (data, split, rows) -> one pass over this process's part of a split, in global batches of `rows` rows.
      validation: opens the batches of one evaluation, and reports each.
      initial_params: makes the initial weights of the run again; its own adapters have no effect yet.
      load_model: (path, configuration) -> another model and its parameters, adapters merged, on the mesh of the run.
      reporter: of the loop.
    """

    model_dir: str
    seed: int
    init_from: str | None
    model: Model
    dataset: Dataset
    plan: Plan
    mesh: Mesh
    batch_sharding: NamedSharding
    batches: Loader
    step_temp_bytes: int
    evaluates: bool
    open_once: Callable[[Dataset, str, int], Loader]
    validation: Callable[[], contextlib.AbstractContextManager[Iterator[HostBatch]]]
    initial_params: Callable[[], Params]
    load_model: Callable[[str, TransformerConfig], tuple[Model, Params]]
    reporter: Reporter


class ReadAhead(NamedTuple):
    """The data of a run whose provider reads more of it than the steps have had.

    Attributes:
      state: the loader's state before what no step has had, for a checkpoint.
      position: the loader's position before the current batch.
    """

    state: Mapping[str, Any]
    position: Position


class BatchProvider(abc.ABC):
    """Makes the batches of a run's steps, if the loss needs more than the loader's batches."""

    @abc.abstractmethod
    def begin(self, params: Params, step: int, saved: Mapping[str, object] | None) -> None:
        """Called before the first step of this start, and after a roll-back.

        Args:
          params: the current parameters.
          step: completed steps.
          saved: the `state` in the checkpoint from which the run resumes; None: a new run.
        """

    @abc.abstractmethod
    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        """The batch of a step, on its devices.

        Args:
          step: its number, from 1.
          params: the current parameters.
        """

    @abc.abstractmethod
    def evaluate(self, params: Params) -> dict[str, float]:
        """Metrics of the validation split, `loss` among them."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON; the same on all processes."""

    @property
    def read_ahead(self) -> ReadAhead | None:
        """The data that steps have had; None: the loader's state says it."""
        return None

    def close(self) -> None:
        """Stops what works beside the steps, until the next `begin`."""
        return None

    def takes_long(self, step: int) -> bool:
        """Whether the devices make the batch of a step, which is not counted as time of the step."""
        del step
        return False

    def metrics(self) -> dict[str, float]:
        """Metrics of the batches since the last call."""
        return {}


class LoaderBatches(BatchProvider):
    """The loader's batches, and an evaluation of the training objective on the validation split.

    Subclass it and override `on_host` to change batches; see examples/extend/my_batches.py.

    Args:
      run: parts of the run.
      objective: the objective of its steps.
    """

    def __init__(self, run: RunParts, objective: Objective):
        self.run, self._objective = run, objective
        self._totals = make_totals(objective, run.plan, run.mesh)

    def on_host(self, step: int, batch: HostBatch) -> HostBatch:
        """Transforms this process's rows of a step's batch (numpy arrays) before training."""
        del step
        return batch

    def begin(self, params: Params, step: int, saved: Mapping[str, object] | None) -> None:
        del params, step, saved

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        del params
        batch = returned(self.on_host(step, next(self.run.batches)), Mapping, f"{type(self).__name__}.on_host")
        return sharding.global_batch(self.run.batch_sharding, batch)

    def evaluate(self, params: Params) -> dict[str, float]:
        total = None
        with self.run.validation() as batches:
            for batch in batches:
                sums = jax.device_get(self._totals(params, sharding.global_batch(self.run.batch_sharding, batch)))
                total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
        if total is None:
            raise UserError("the validation split has no document: add data, or set Evaluation.every = 0")
        return {
            name: float(value) for name, value in self._objective.checked_metrics(total, max(total.weight, 1.0)).items()
        }

    def state(self) -> dict[str, Any]:
        return {}


def make_totals(objective: Objective, plan: Plan, mesh: Mesh) -> Callable[[Params, Batch], PyTree]:
    """Makes a jitted function (params, batch) -> the sums of an objective's metrics over the batch."""

    def totals(params: Params, batch: Batch) -> PyTree:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return objective.checked_sums(params, batch, RematPolicy(), None)[1]

    return jax.jit(totals)
