"""SeqIO tasks by SeqIO's own Evaluator: their postprocess_fn, metric_fns and metric_objs work as they do with T5X."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.config import configurable
from capibara.data import tasks
from capibara.evaluation.answers import Question, Show, ask
from capibara.evaluation.metrics import Estimate
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.scoring import Pair
from capibara.evaluation.subject import Subject
from capibara.inference.sampling import Sampling, changed
from capibara.types import UserError

PREFIX = "seqio:"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioEvaluation:
    """How --task=seqio:NAME is evaluated.

    Attributes:
      task_module: the module that registers the task; None: the run's Dataset.task_module.
      split: of the task.
      use_cached: take examples from the task's offline cache.
      sampling: how answers are made.
    """

    task_module: str | None = None
    split: str = "validation"
    use_cached: bool = False
    sampling: Sampling = Sampling(temperature=0.0)


def evaluated(
    subject: Subject, name: str, options: SeqioEvaluation, limit: int | None, told: Predictions, show: Show
) -> dict[str, tuple[dict[str, Estimate], int]]:
    """The metrics of a task, or of those of a mixture, by task, with the number of examples.

    Raises:
      UserError: there is no such task, or no metric in it, or its vocabulary is not the model's.
    """
    module = options.task_module or subject.trainer.dataset.task_module
    task = tasks.get(name, module)
    seqio = tasks.load(module)
    if tasks.vocabulary_of(task).fingerprint() != subject.vocabulary.fingerprint():
        raise UserError(f"SeqIO task {name!r} has another vocabulary than the model: give the task the model's")
    evaluator = _evaluator(seqio, name, options, limit, _lengths(subject, task))
    if not evaluator.eval_tasks:
        raise UserError(
            f"SeqIO task {name!r} has no metric_fns or no split {options.split!r}: there is nothing to evaluate"
        )
    kinds = seqio.metrics.ModelOutputType
    asking = _Asking(subject, options, told, show, name)
    known = {kinds.PREDICTION: asking.predictions, kinds.SCORE: asking.scores}
    for one in evaluator.eval_tasks:
        other = {metric.model_output_type for metric in one.metric_objs} - known.keys()
        if other:
            raise UserError(
                f"SeqIO task {one.name!r} has a metric of {other.pop().name}: only PREDICTION and SCORE are made"
            )
    found, _ = evaluator.evaluate(compute_metrics=True, model_fns=known)
    counts = {one.name: len(evaluator.cached_task_datasets[one.name]) for one in evaluator.eval_tasks}
    return {key: ({m: _estimate(v) for m, v in values.items()}, counts[key]) for key, values in found.result().items()}


def _lengths(subject: Subject, task: Any) -> dict[str, int]:
    """What is cut off the features, as in training."""
    dataset = subject.trainer.dataset
    long = {"inputs": dataset.encoder_length or dataset.length}
    return {feature: long.get(feature, dataset.length) for feature in task.output_features}


def _evaluator(seqio: Any, name: str, options: SeqioEvaluation, limit: int | None, lengths: dict[str, int]) -> Any:
    # Examples as the task has them: what a converter makes of them for a model is made here when they are asked.
    plain = type("Plain", (seqio.PassThroughFeatureConverter,), {"TASK_FEATURES": {}, "pack": False})
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)  # that there is no logger, and that rows are long
    try:
        return seqio.Evaluator(
            name, plain(), eval_split=options.split, use_cached=options.use_cached, num_examples=limit,
            sequence_length=lengths, async_compute_metrics=False,
        )  # fmt: skip
    finally:
        log.setLevel(before)


def _estimate(value: Any) -> Estimate:
    return Estimate(float(getattr(value, "value", value)))


@dataclasses.dataclass
class _Asking:
    """What the Evaluator asks: (enumerated examples) -> (number, tokens or score) of each."""

    subject: Subject
    options: SeqioEvaluation
    told: Predictions
    show: Show
    name: str

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
        tokens = [line["tokens"] for line in ask(self.subject, self.name, questions, self.told, self.show)]
        width = 1 + max(map(len, tokens))  # Evaluator makes one array of them; what comes after the end is not decoded
        rows = [[*ids, vocabulary.eos_id, *[vocabulary.pad_id] * (width - 1 - len(ids))] for ids in tokens]
        return [(int(number), np.array(row, np.int32)) for (number, _), row in zip(examples, rows)]

    def scores(self, dataset: Any) -> list[tuple[int, float]]:
        examples = list(dataset.as_numpy_iterator())
        pairs = [Pair(self._prompt(list(e.get("inputs", ()))), e["targets"].tolist()) for _, e in examples]
        try:
            found = self.subject.scorer(pairs, lambda count: self.show(self.name, f"{count} of {len(pairs)} scores"))
        except UserError as error:
            raise UserError(f"SeqIO task {self.name!r}: {error}") from None
        return [(int(number), score.log_probability) for (number, _), score in zip(examples, found)]

    def _prompt(self, inputs: Sequence[int]) -> list[int]:
        """Inputs as the model was trained on them: a decoder reads the beginning token first."""
        begins = [] if self.subject.trainer.dataset.encoder_length is not None else [self.subject.vocabulary.bos_id]
        prompt = [*begins, *map(int, inputs)]
        if not prompt:
            raise UserError(f"SeqIO task {self.name!r} has an example without inputs, which an encoder-decoder needs")
        return prompt
