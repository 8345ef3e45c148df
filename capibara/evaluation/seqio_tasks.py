"""Evaluates SeqIO tasks with SeqIO's Evaluator: their postprocess_fn, metric_fns and metric_objs work as in T5X."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from capibara.config import MODULE, configurable
from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.pipeline.cached import check_cached
from capibara.data.tasks import tasks
from capibara.evaluation.answers import Question, Show, ask, generate_each
from capibara.evaluation.metrics import Estimate
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.scoring import Pair
from capibara.evaluation.subject import Subject
from capibara.inference.engine.engine import check_generates
from capibara.inference.sampling.sampling import Sampling, changed
from capibara.models.api import Model
from capibara.training.trainer import Trainer

PREFIX = "seqio:"

T = TypeVar("T")


class MetricFails(UserError):
    """A task's own metric_fns or postprocess_fn raise, or return a value that is not a number."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioEvaluation:
    """Options of the evaluation of --task=seqio:NAME, and of a run's own task with Evaluation.task_metrics.

    Attributes:
      task_module: the module that registers the task; None: the run's Dataset.task_module.
      split: the split of the task.
      use_cached: read examples from the task's offline cache, as training does with Dataset.use_cached.
      num_examples: the largest number of examples of a task; None: all.
      sampling: sampling options of the answers.
    """

    task_module: str | None = dataclasses.field(default=None, metadata=MODULE)
    split: str = "validation"
    use_cached: bool = False
    num_examples: int | None = None
    sampling: Sampling = Sampling(temperature=0.0)

    def __post_init__(self) -> None:
        if self.num_examples is not None and self.num_examples < 1:
            raise UserError(f"SeqioEvaluation.num_examples is {self.num_examples}, must be at least 1, or None")


@dataclasses.dataclass(frozen=True)
class Opened:
    """A task or mixture whose examples were read.

    Attributes:
      name: its name.
      evaluator: the seqio.Evaluator.
      options: the options.
    """

    name: str
    evaluator: Any
    options: SeqioEvaluation

    def check(self, model: Model) -> None:
        """Raises UserError if a task has a metric that needs an unsupported output of the model."""
        kinds = tasks.load().metrics.ModelOutputType
        for eval_task in self.evaluator.eval_tasks:
            outputs = {metric.model_output_type for metric in eval_task.metric_objs}
            if other := outputs - {kinds.PREDICTION, kinds.SCORE}:
                raise UserError(
                    f"SeqIO task {eval_task.name!r} has a metric of {other.pop().name}: only PREDICTION and SCORE are supported"
                )
            if kinds.PREDICTION in outputs:
                check_generates(model)


def evaluated(
    subject: Subject, name: str, options: SeqioEvaluation, limit: int | None, recorded: Predictions, show: Show
) -> dict[str, tuple[dict[str, Estimate], int]]:
    """The metrics and the number of examples of a task, or of each task of a mixture.

    Raises:
      UserError: as `opened` and `judged`.
    """
    result = opened(subject.trainer, name, options, options.num_examples if limit is None else limit)
    return judged(subject, result, recorded, show)


def opened(trainer: Trainer, name: str, options: SeqioEvaluation, limit: int | None) -> Opened:
    """Reads the examples of a task, or of each task of a mixture, at most `limit` each.

    Raises:
      UserError: there is no such task, it has no metric, or its vocabulary is not the run's.
    """
    dataset, module = trainer.dataset, options.task_module or trainer.dataset.task_module
    task = tasks.get(name, module)
    if tasks.vocabulary_of(task).fingerprint() != dataset.get_vocabulary().fingerprint():
        raise UserError(f"SeqIO task {name!r} has another vocabulary than the model: set the model's in the task")
    if options.use_cached:
        tasks.add_cache_dirs(dataset.cache_dirs)
        check_cached(task, options.split, _lengths(dataset, task))
    evaluator = _evaluator(tasks.load(module), name, options, limit, _lengths(dataset, task))
    if not evaluator.eval_tasks:
        raise UserError(
            f"SeqIO task {name!r} has no metric_fns or no split {options.split!r}, which --task and "
            "Evaluation.task_metrics need: add them, or leave the option out"
        )
    return Opened(name, evaluator, options)


def judged(
    subject: Subject, opened: Opened, recorded: Predictions, show: Show
) -> dict[str, tuple[dict[str, Estimate], int]]:
    """The metrics and the number of examples of each opened task.

    Raises:
      UserError: a metric needs an unsupported output of the model.
      MetricFails: a task's own code fails, or a metric is not a number; call `opened` again before the next evaluation.
    """
    opened.check(subject.model)
    evaluator, kinds = opened.evaluator, tasks.load().metrics.ModelOutputType
    asking = _Asking(subject, opened.options, recorded, show, opened.name)
    known = {kinds.PREDICTION: asking.guarded(asking.predictions), kinds.SCORE: asking.guarded(asking.scores)}
    try:
        results = evaluator.evaluate(compute_metrics=True, model_fns=known)[0].result()
    except Exception as error:
        if error is asking.error:
            raise
        cause = error.__cause__ or error  # SeqIO's own says the same, and the task
        raise MetricFails(
            f"SeqIO task {opened.name!r} fails in its metric_fns or postprocess_fn ({_where(cause)}: "
            f"{type(cause).__name__}: {limits.cause(cause)}): correct them"
        ) from error
    counts = {eval_task.name: len(evaluator.cached_task_datasets[eval_task.name]) for eval_task in evaluator.eval_tasks}
    return {
        task: ({name: _estimate(task, name, value) for name, value in values.items()}, counts[task])
        for task, values in results.items()
    }


def _lengths(dataset: Dataset, task: object) -> dict[str, int]:
    """The lengths to which features are trimmed, as in training."""
    return tasks.lengths(task, dataset.length, dataset.encoder_length, dataset.inputs_length)


def _evaluator(seqio: Any, name: str, options: SeqioEvaluation, limit: int | None, lengths: dict[str, int]) -> Any:
    # Without a feature converter: `_Asking` makes the model's inputs from the task's examples.
    plain = type("Plain", (seqio.PassThroughFeatureConverter,), {"TASK_FEATURES": {}, "pack": False})
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)  # suppresses warnings on missing loggers and long rows
    try:
        return seqio.Evaluator(
            name, plain(), eval_split=options.split, use_cached=options.use_cached, num_examples=limit,
            sequence_length=lengths, async_compute_metrics=False,
        )  # fmt: skip
    finally:
        log.setLevel(before)


def _estimate(task: str, name: str, value: Any) -> Estimate:
    try:
        return Estimate(float(getattr(value, "value", value)))
    except (TypeError, ValueError, OverflowError):
        raise MetricFails(
            f"metric {name!r} of SeqIO task {task!r} is of type {type(value).__name__}, must be a finite number: correct "
            "its metric_fns"
        ) from None


def _where(error: BaseException) -> str:
    """The file and line that raised an error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


@dataclasses.dataclass
class _Asking:
    """The functions that the Evaluator calls: (enumerated examples) -> (number, tokens or score) of each."""

    subject: Subject
    options: SeqioEvaluation
    recorded: Predictions
    show: Show
    name: str
    error: Exception | None = None  # raised while answering, not by the task's own code

    def guarded(self, function: Callable[[Any], T]) -> Callable[[Any], T]:
        """Wraps a function to record its error as ours, not one of the task's own code."""

        def asked(dataset: object) -> T:
            try:
                return function(dataset)
            except Exception as error:
                self.error = error
                raise

        return asked

    def predictions(self, dataset: Any) -> list[tuple[int, np.ndarray]]:
        examples, sampling = list(dataset.as_numpy_iterator()), self.options.sampling
        vocabulary = self.subject.vocabulary
        questions = [
            Question(
                {"task": PREFIX + self.name, "example": int(number), "prompt": ids, "sampling": changed(sampling)},
                self._prompt(ids),
                sampling,
            )
            for number, example in examples
            for ids in [np.asarray(example.get("inputs", ()), np.int64).tolist()]
        ]
        tokens = [
            line["tokens"] for line in ask(self.subject, self.name, questions, generate_each, self.recorded, self.show)
        ]
        width = 1 + max(map(len, tokens))  # the Evaluator makes one array of them, and ignores tokens after the end
        rows = [[*ids, vocabulary.eos_id, *[vocabulary.pad_id] * (width - 1 - len(ids))] for ids in tokens]
        return [(int(number), np.array(row, np.int32)) for (number, _), row in zip(examples, rows)]

    def scores(self, dataset: Any) -> list[tuple[int, float]]:
        examples = list(dataset.as_numpy_iterator())
        pairs = [Pair(self._prompt(list(e.get("inputs", ()))), e["targets"].tolist()) for _, e in examples]
        try:
            result = self.subject.scorer(pairs, lambda count: self.show(self.name, f"{count} of {len(pairs)} scores"))
        except UserError as error:
            raise UserError(f"SeqIO task {self.name!r}: {error}") from None
        return [(int(number), score.log_probability) for (number, _), score in zip(examples, result)]

    def _prompt(self, inputs: Sequence[int]) -> list[int]:
        """Inputs as in training: a decoder reads the beginning token first."""
        vocabulary, reads = self.subject.vocabulary, self.subject.trainer.dataset.encoder_length is not None
        prompt = [*(() if reads else vocabulary.begin_ids), *map(int, inputs)]
        if not prompt and not reads:
            prompt = [vocabulary.bos_id]
        if not prompt:
            raise UserError(f"SeqIO task {self.name!r} has an example without inputs, which an encoder-decoder needs")
        return prompt
