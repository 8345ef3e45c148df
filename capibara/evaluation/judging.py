"""Computes the metric_fns of a run's SeqIO tasks during training, as T5X's InferenceEvaluator does."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.core.types import Params
from capibara.evaluation import seqio_tasks
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.seqio_tasks import SeqioEvaluation
from capibara.evaluation.subject import Subject
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.placement import own_chips
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.models.api import Model
from capibara.training.trainer import Trainer


class TaskJudge:
    """A `capibara.training.evaluation.Judge` with the metrics of a SeqIO task.

    The examples are read once. The engine and scorer are built for each evaluation, from the current parameters, so that
    they use no device memory during training. If a metric fails, the evaluation goes without the tasks' metrics, and a
    warning is logged; the run continues.

    Args:
      trainer: the run.
      model: its model.
      options: options of the task's evaluation.
      batching: options of generation.
    """

    def __init__(self, trainer: Trainer, model: Model, options: SeqioEvaluation, batching: EngineConfig):
        self._trainer, self._model, self._options, self._batching = trainer, model, options, batching

    def prepare(self) -> None:
        """Reads the examples; raises UserError if the tasks have no metrics or the model cannot generate answers."""
        self._opened.check(self._model)

    @functools.cached_property
    def _opened(self) -> seqio_tasks.Opened:
        name = self._trainer.dataset.mixture_or_task_name
        assert name is not None, "Trainer refuses Evaluation.task_metrics without a SeqIO task"
        return seqio_tasks.opened(self._trainer, name, self._options, self._options.num_examples)

    def __call__(self, params: Params, tell: Callable[[str], None]) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Yields each task with its metrics; calls `tell` after each answer and batch of scores, on every process."""
        placed, rules = jax.tree.leaves(params)[0].sharding, self._trainer.plan.rules
        mesh = placed.mesh if isinstance(placed, NamedSharding) else None
        if not isinstance(mesh, Mesh):
            mesh = sharding.make_mesh(self._trainer.plan)
        plain = own_chips.make_computed(self._model, mesh, rules)(params)
        about = {"model": self._trainer.model_dir, "step": None, "weights": "training"}
        subject = Subject(self._model.plain, plain, about, self._trainer, mesh, self._batching, ServingMesh())
        with Predictions(None, {}) as reported:
            show = lambda topic, detail: tell(f"{topic}: {detail}")  # noqa: E731
            try:
                result = seqio_tasks.judged(subject, self._opened, reported, show)
            except seqio_tasks.MetricFails as error:
                del self._opened  # otherwise SeqIO's Evaluator would wait for the metrics that failed
                _warn(f"an evaluation goes without its tasks' metrics: {error}")
                return
        for task, (metrics, _) in result.items():
            for name, item in metrics.items():
                if not math.isfinite(item.value):
                    _warn(f"metric {name!r} of SeqIO task {task!r} is {item.value}: not logged")
            yield task, {name: entry.value for name, entry in metrics.items() if math.isfinite(entry.value)}


def _warn(text: str) -> None:
    if jax.process_index() == 0:
        logging.getLogger(__name__).warning(text)
