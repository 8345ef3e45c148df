"""What makes the batches of a run's steps, where that takes more than to read the data."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import Loader
from capibara.models.api import Model
from capibara.objectives.base import Objective
from capibara.sharding import Plan, RematPolicy


class Check(Protocol):
    """Whether a run is to stop in the middle of what takes long."""

    def __call__(self, done: int, every: int = 1) -> None:
        """As StopRequest.check: after `done` parts, asked of all hosts every so many; raises Interrupted."""
        ...


@dataclasses.dataclass(frozen=True)
class Reporter:
    """Where work that takes longer than a step says how far it is, and asks whether the run is to stop.

    Attributes:
      check: called before each part of the work, alike on every process.
      progress: shows how far it is; "": it is over.
      status: says what is worth a line of its own.
      took: notes seconds that no step has, by what took them.
    """

    check: Check
    progress: Callable[[str], None]
    status: Callable[[str], None]
    took: Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class RunParts:
    """What a loss may use of a run to make its batches.

    Attributes:
      model_dir, seed, init_from: of the run.
      model, dataset, plan, mesh: of the run.
      batch_sharding: of every array of a batch.
      batches: the training split, as the run reads it.
      step_temp_bytes: of a device, what the train step takes beside its arguments.
      evaluates: whether the run has evaluations.
      open_once: (data, split, rows) -> this process's share of a split, read once in global batches of so many rows.
      validation: opens the batches of one evaluation; each of them is reported.
      initial_params: makes the parameters that the run began from again, of adapters those without effect.
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
    validation: Callable[[], contextlib.AbstractContextManager[Iterator[Batch]]]
    initial_params: Callable[[], Params]
    reporter: Reporter


class BatchProvider(abc.ABC):
    """What stands between the loader of a run and its steps, where batches take more than the data."""

    @abc.abstractmethod
    def begin(self, params: Params, step: int, saved: Mapping[str, Any] | None) -> None:
        """Before the first step of this start, and after the run went back.

        Args:
          params: of the state at hand.
          step: steps done.
          saved: what `state` gave for the checkpoint that the run resumes from; None: a new run.
        """

    @abc.abstractmethod
    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        """The batch of a step, on its devices.

        Args:
          step: its number; that of the first is 1.
          params: that it is made with.
        """

    @abc.abstractmethod
    def evaluate(self, params: Params) -> dict[str, float]:
        """Metrics of the validation split, `loss` among them."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, JSON-able; alike on all processes."""

    def takes_long(self, step: int) -> bool:
        """Whether the batch of a step is made by the devices, which is time of its own."""
        del step
        return False

    def metrics(self) -> dict[str, float]:
        """What there is to tell of the batches since this was last asked."""
        return {}


class LoaderBatches(BatchProvider):
    """The loader's own batches, and the loss of the validation split by the objective of training.

    Derive from it to change batches on their way (`on_host`); examples/extend/my_batches.py does.

    Args:
      run: of the loss.
      objective: what its steps minimise.
    """

    def __init__(self, run: RunParts, objective: Objective):
        self.run, self._objective = run, objective
        self._sums = jax.jit(self._batch_sums)

    def on_host(self, step: int, batch: Batch) -> Batch:
        """This process's rows of a step's batch, numpy arrays, as they are to be trained on."""
        del step
        return batch

    def begin(self, params: Params, step: int, saved: Mapping[str, Any] | None) -> None:
        del params, step, saved

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        del params
        return sharding.global_batch(self.run.batch_sharding, self.on_host(step, next(self.run.batches)))

    def evaluate(self, params: Params) -> dict[str, float]:
        total = None
        with self.run.validation() as batches:
            for batch in batches:
                sums = jax.device_get(self._sums(params, sharding.global_batch(self.run.batch_sharding, batch)))
                total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
        if total is None:
            raise UserError("the validation split has no document: give it more, or set Evaluation.every = 0")
        return {name: float(value) for name, value in self._objective.metrics(total, max(total.weight, 1.0)).items()}

    def state(self) -> dict[str, Any]:
        return {}

    def _batch_sums(self, params: Params, batch: Batch) -> PyTree:
        plan, mesh = self.run.plan, self.run.mesh
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return self._objective.sums(params, batch, RematPolicy(), None)[1]
