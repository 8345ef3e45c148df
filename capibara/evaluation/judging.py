"""The metric_fns of a run's SeqIO task during training, of each task of a mixture, as T5X's InferenceEvaluator makes them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.sharding import Mesh, NamedSharding

from capibara import config, sharding
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
    """A `capibara.training.evaluation.Judge` by the metrics that a SeqIO task brings.

    Its examples are read once. What answers and scores is made anew for each evaluation, from the parameters of the moment,
    so that nothing of it takes the devices' memory while the run trains. Where a metric fails, the evaluation is without
    its tasks' metrics, and a warning says so: the run goes on.

    Args:
      trainer: the run.
      model: that it trains.
      options: how its task is evaluated.
      batching: how answers are made.
    """

    def __init__(self, trainer: Trainer, model: Model, options: SeqioEvaluation, batching: EngineConfig):
        self._trainer, self._model, self._options, self._batching = trainer, model, options, batching

    def prepare(self) -> None:
        """Reads the examples; raises UserError where there is nothing to judge by, or the model cannot answer."""
        self._opened.check(self._model)

    @functools.cached_property
    def _opened(self) -> seqio_tasks.Opened:
        name = self._trainer.dataset.mixture_or_task_name
        assert name is not None, "Trainer refuses Evaluation.task_metrics without a SeqIO task"
        return seqio_tasks.opened(self._trainer, name, self._options, self._options.num_examples)

    def __call__(self, params: Params, tell: Callable[[str], None]) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Each task with its metrics; `tell` is told of each answer and each batch of scores, alike on every process."""
        placed, rules = jax.tree.leaves(params)[0].sharding, self._trainer.plan.rules
        mesh = placed.mesh if isinstance(placed, NamedSharding) else None
        if not isinstance(mesh, Mesh):
            mesh = sharding.make_mesh(self._trainer.plan)
        plain = own_chips.make_computed(self._model, mesh, rules)(params)
        about = {"model": self._trainer.model_dir, "step": None, "weights": "training"}
        subject = Subject(self._model.plain, plain, about, self._trainer, mesh, self._batching, ServingMesh())
        with Predictions(None, {}) as told:
            show = lambda topic, detail: tell(f"{topic}: {detail}")  # noqa: E731
            try:
                found = seqio_tasks.judged(subject, self._opened, told, show)
            except seqio_tasks.MetricFails as error:
                del self._opened  # SeqIO's Evaluator would wait for the metrics that failed
                _warn(f"an evaluation is without its tasks' metrics: {error}")
                return
        for task, (metrics, _) in found.items():
            for name, one in metrics.items():
                if not math.isfinite(one.value):
                    _warn(f"metric {name!r} of SeqIO task {task!r} is {one.value}, and is left out")
            yield task, {name: one.value for name, one in metrics.items() if math.isfinite(one.value)}


def _warn(text: str) -> None:
    if jax.process_index() == 0:
        logging.getLogger(__name__).warning(text)


def of_run(trainer: Trainer, model: Model) -> TaskJudge | None:
    """The judge of a run that the parsed Gin files configure; None: it asks for none."""
    if not trainer.evaluation.task_metrics:
        return None
    options = config.build(SeqioEvaluation)
    if trainer.dataset.use_cached:
        options = dataclasses.replace(options, use_cached=True)
    return TaskJudge(trainer, model, options, config.build(EngineConfig))
