"""Metrics of generated answers: functions of (targets, predictions) that Gin names, as yours may be.

    @capibara.config.configurable          # in my_metrics.py, which a Gin file imports: import my_metrics
    def shorter(targets, predictions):
        return {"shorter": [len(p) < len(t) for t, p in zip(targets, predictions)]}

and then EvalTask.metrics = (@shorter,). A target is what the task's `target` says of a line: a text, or several of
which each is right, or a dict. A prediction is a text; where the task has num_samples above 1, a list of texts. A value
of the result may be a list with one number an example, whose mean is shown with its standard error, or one number for
all, or an Estimate. A metric may have a method `about`, whose dict stands beside the results in their JSON.
"""

from __future__ import annotations

import collections
import re
import statistics
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.config import configurable
from capibara.core import extras
from capibara.core.types import UserError

Metric = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, Any]]
_RESAMPLES = 200
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Estimate(NamedTuple):
    """A score, and its standard error where that is known."""

    value: float
    standard_error: float | None = None


class Choice(NamedTuple):
    """One of the answers to choose from: ln p(answer | prompt), and how long it is."""

    log_probability: float
    tokens: int
    bytes: int


def mean(values: Sequence[float]) -> Estimate:
    """The mean with s / sqrt(n), s with n - 1; of a single number no error is known."""
    values = [float(value) for value in values]
    if not values:
        raise UserError("a metric gave an empty list, must have one number an example")
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)


def computed(metric: Metric, targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, Estimate]:
    """What a metric says, as estimates.

    Raises:
      UserError: it gives something else than numbers, or not one for each example.
    """
    name, found = name_of(metric), metric(targets, predictions)
    if not isinstance(found, Mapping):
        raise UserError(f"the metric {name} gives {type(found).__name__}, must give a dict of numbers")
    return {str(key): _estimate(name, str(key), value, len(targets)) for key, value in found.items()}


def _estimate(metric: str, key: str, value: Any, count: int) -> Estimate:
    if isinstance(value, Estimate):
        return value
    try:
        values = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        values = np.zeros((0, 0))
    if values.ndim == 0:
        return Estimate(float(values))
    if values.shape != (count,):
        shown = f"{len(value)} values" if values.ndim == 1 else type(value).__name__
        raise UserError(
            f"the metric {metric} gives {shown} for {key!r}, must give one number, or one an example ({count})"
        )
    return mean(values.tolist())


def name_of(metric: Metric) -> str:
    """As Gin knows it."""
    return getattr(metric, "__name__", None) or type(metric).__name__


def check_targets(metric: Metric, targets: Sequence[Any], where: str) -> None:
    """Raises UserError where a metric of ours can do nothing with a target; to be asked before anything is answered."""
    for number, target in enumerate(targets):
        try:
            getattr(metric, "check_target", lambda target: None)(target)
        except UserError as error:
            raise UserError(f"{where}, example {number}: {error}") from None


def _several(target: Any) -> list[str]:
    """A target as the list of right answers."""
    several = target if isinstance(target, (list, tuple)) else [target]
    if not several or isinstance(target, Mapping):
        raise UserError(f"the target {target!r} is no text: EvalTask.target must name one key, with a text or texts")
    return [one if isinstance(one, str) else str(one) for one in several]


def _of_texts(metric: Metric) -> Metric:
    vars(metric).update(judges="texts", check_target=_several)
    return metric


def _checked(check: Callable[[int], None]) -> Callable[[Metric], Metric]:
    """A decorator: `check` is told EvalTask.num_samples before anything is answered, and raises where that is for nothing."""

    def marked(metric: Metric) -> Metric:
        vars(metric).update(check=check)
        return metric

    return marked


def _of_choices(metric: Metric) -> Metric:
    vars(metric).update(judges="choices")
    return metric


# Text.


def normalised(text: str) -> str:
    """As SQuAD compares answers: lower case, without punctuation and articles, single spaces (arXiv:1606.05250)."""
    text = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(text.split())


@configurable
@_of_texts
def exact_match(targets: Sequence[Any], predictions: Sequence[Any], normalise: bool = True) -> dict[str, Any]:
    """Whether the answer is one of the right ones; `normalise`: as `normalised`, else but for white space around it."""
    same = normalised if normalise else str.strip
    return {"exact_match": _each(targets, predictions, lambda target, text: float(same(target) == same(text)))}


@configurable
@_of_texts
def token_f1(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, Any]:
    """F1 of the words in common with the right answer, of several with the nearest, as SQuAD's."""
    return {"f1": _each(targets, predictions, _f1)}


def _f1(target: str, text: str) -> float:
    wanted, given = normalised(target).split(), normalised(text).split()
    common = sum((collections.Counter(wanted) & collections.Counter(given)).values())
    if not wanted or not given:
        return float(wanted == given)
    return 2 * common / (len(wanted) + len(given))


def _check_rouge(num_samples: int) -> None:
    del num_samples
    extras.require("rouge_score", extra="evaluation", why="ROUGE")


@configurable
@_checked(_check_rouge)
@_of_texts
def rouge(
    targets: Sequence[Any],
    predictions: Sequence[Any],
    kinds: Sequence[str] = ("rouge1", "rouge2", "rougeL"),
    stem: bool = False,
) -> dict[str, Any]:
    """F-measures of ROUGE from 0 to 1 (package rouge-score), of several right texts with the nearest.

    `kinds`: rougeN for any N, rougeL, rougeLsum (of texts with a sentence a line). `stem`: by Porter's stemmer.
    """
    scorer = extras.require("rouge_score.rouge_scorer", extra="evaluation", why="ROUGE")
    try:
        one = scorer.RougeScorer(list(kinds), use_stemmer=stem)
        one.score("", "")
    except (ValueError, TypeError) as error:
        raise UserError(f"rouge.kinds is {kinds!r} ({error}): try ('rouge1', 'rougeL')") from None
    found = {kind: lambda target, text, kind=kind: one.score(target, text)[kind].fmeasure for kind in kinds}
    return {kind: _each(targets, predictions, score) for kind, score in found.items()}


def _check_bleu(num_samples: int) -> None:
    if num_samples > 1:
        raise UserError(f"bleu compares one text an example, EvalTask.num_samples is {num_samples}: set it to 1")
    extras.require("sacrebleu", extra="evaluation", why="BLEU")


@configurable
@_checked(_check_bleu)
@_of_texts
def bleu(
    targets: Sequence[Any], predictions: Sequence[Any], tokenize: str = "13a", lowercase: bool = False
) -> dict[str, Any]:
    """BLEU of all texts together from 0 to 100 (package sacrebleu), its standard error from 200 bootstrap samples.

    `tokenize`: as sacrebleu names it: 13a, intl, char, zh, none, ...
    """
    if any(not isinstance(text, str) for text in predictions):
        raise UserError("bleu compares one text an example: set EvalTask.num_samples = 1")
    sacrebleu = extras.require("sacrebleu", extra="evaluation", why="BLEU")
    if tokenize not in sacrebleu.BLEU.TOKENIZERS:
        raise UserError(f"bleu.tokenize is {tokenize!r}, must be one of {', '.join(sacrebleu.BLEU.TOKENIZERS)}")
    scorer = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=True)  # else a sentence warns
    each = [scorer.sentence_score(text, _several(target)) for target, text in zip(targets, predictions)]
    counts = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in each], np.int64)

    def score(rows: np.ndarray) -> float:
        sums, orders = rows.sum(axis=0).tolist(), (rows.shape[1] - 2) // 2
        return scorer.compute_bleu(sums[:orders], sums[orders:-2], sums[-2], sums[-1], smooth_method="exp").score

    random = np.random.default_rng(0)
    resampled = [score(counts[random.integers(0, len(counts), len(counts))]) for _ in range(_RESAMPLES)]
    return {"bleu": Estimate(score(counts), statistics.stdev(resampled) if len(counts) > 1 else None)}


def _each(targets: Sequence[Any], predictions: Sequence[Any], score: Callable[[str, str], float]) -> list[float]:
    """Of each example the best score over its right answers; of several samples their mean."""
    found = []
    for target, given in zip(targets, predictions, strict=True):
        right = _several(target)
        texts = [given] if isinstance(given, str) else given
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"the prediction {str(given)[:60]} is no text: EvalTask.choices needs metrics of choices")
        found.append(statistics.fmean(max(score(one, text) for one in right) for text in texts))
    return found


# Choices.


@configurable
@_of_choices
def choice_accuracy(targets: Sequence[int], predictions: Sequence[Sequence[Choice]]) -> dict[str, Any]:
    """Whether the right answer is the likeliest: by its probability, and by that to the power of 1 / its length.

    Lengths in bytes (of ASCII acc_norm of lm-eval) and in tokens. Of several that are equally likely the first counts.
    """
    lengths = {
        "accuracy": lambda choice: 1,
        "accuracy_per_byte": lambda choice: max(choice.bytes, 1),
        "accuracy_per_token": lambda choice: max(choice.tokens, 1),
    }
    return {
        name: [
            float(int(np.argmax([one.log_probability / length(one) for one in choices])) == target)
            for target, choices in zip(targets, predictions, strict=True)
        ]
        for name, length in lengths.items()
    }
