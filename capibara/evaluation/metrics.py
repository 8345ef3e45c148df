"""Metrics of answers: functions of (targets, predictions) that Gin files refer to.

A metric of your own:

    @capibara.config.configurable          # in my_metrics.py, which a Gin file imports: import my_metrics
    def shorter(targets, predictions):
        return {"shorter": [len(p) < len(t) for t, p in zip(targets, predictions)]}

and then EvalTask.metrics = (@shorter,). A target is the value of the task's `target` key: a text, a list of right texts, or
a dict. A prediction is a text, or a list of texts if the task's num_samples is above 1. The result is a dict; a value is a
list with one number per example (reported as mean and standard error), a single number, or an Estimate. A metric may have a
method `about`, whose dict is added to the results in JSON.
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
from capibara.evaluation import rouge_words

Metric = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, Any]]
_RESAMPLES = 200
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DASHES = str.maketrans("\u2212\ufe63\uff0d", "---")
_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
# Punctuation, but for what makes another number: a sign, a decimal point, and what joins digits.
_PUNCTUATION = re.compile(
    r"(?P<kept>(?<![\w)\]}])-(?=[$]?\.?\d)|(?<![\w.])\.(?=\d)|(?<=\d)[-.,:/^*](?=\.?\d)|(?<=\de)-(?=\d))"
    rf"|[{re.escape(string.punctuation)}]"
)


class Estimate(NamedTuple):
    """A score and its standard error; None: unknown."""

    value: float
    standard_error: float | None = None


class Choice(NamedTuple):
    """A choice: ln p(choice | prompt), and its length."""

    log_probability: float
    tokens: int
    bytes: int


class PairScores(NamedTuple):
    """A reward model's scores of the two answers of a preference pair."""

    chosen: float
    rejected: float


def mean(values: Sequence[float]) -> Estimate:
    """The mean with the standard error s / sqrt(n), s with n - 1; None for a single number."""
    values = [float(value) for value in values]
    if not values:
        raise UserError("a metric returned an empty list, must have one number per example")
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)


def computed(
    metric: Metric, targets: Sequence[object], predictions: Sequence[object], groups: Sequence[str] = ()
) -> tuple[dict[str, Estimate], dict[str, dict[str, Estimate]]]:
    """Calls a metric and converts its values to estimates: of all examples, and of those of each group.

    Values for each example are divided among the groups. A metric that has one number for all, such as BLEU, is called again
    for each group.

    Args:
      metric: the metric.
      targets, predictions: of the examples.
      groups: the group of each example; empty: there are no groups.

    Raises:
      UserError: its values are not numbers, or a list does not have one for each example.
    """
    returned = _returned(metric, targets, predictions)
    estimates = _estimates(metric, returned, len(targets))
    is_of_all = any(isinstance(value, Estimate) or np.ndim(value) == 0 for value in returned.values())
    of_groups = {}
    for group in sorted(set(groups)):
        at = [i for i, other in enumerate(groups) if other == group]
        if is_of_all:
            values = _returned(metric, [targets[i] for i in at], [predictions[i] for i in at])
        else:
            values = {key: [value[i] for i in at] for key, value in returned.items()}
        of_groups[group] = _estimates(metric, values, len(at))
    return estimates, of_groups


def _returned(metric: Metric, targets: Sequence[object], predictions: Sequence[object]) -> Mapping[str, Any]:
    result = metric(targets, predictions)
    if not isinstance(result, Mapping):
        raise UserError(f"the metric {name_of(metric)} returns {type(result).__name__}, must return a dict of numbers")
    return result


def _estimates(metric: Metric, values: Mapping[str, object], count: int) -> dict[str, Estimate]:
    name = name_of(metric)
    return {str(key): _estimate(name, str(key), value, count) for key, value in values.items()}


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
            f"the metric {metric} returns {shown} for {key!r}, must be one number, or one per example ({count})"
        )
    return mean(values.tolist())


def name_of(metric: Metric) -> str:
    """The metric's name in Gin."""
    return getattr(metric, "__name__", None) or type(metric).__name__


def check_targets(metric: Metric, targets: Sequence[object], where: str) -> None:
    """Raises UserError if a built-in metric cannot use a target; called before any answer is generated."""
    for number, target in enumerate(targets):
        try:
            getattr(metric, "check_target", lambda target: None)(target)
        except UserError as error:
            raise UserError(f"{where}, example {number}: {error}") from None


def _several(target: object) -> list[str]:
    """The right answers of a target."""
    several = target if isinstance(target, (list, tuple)) else [target]
    if not several or isinstance(target, Mapping):
        raise UserError(f"the target {target!r} must be a text or a list of texts: EvalTask.target must name one key")
    return [item if isinstance(item, str) else str(item) for item in several]


def _of_texts(metric: Metric) -> Metric:
    vars(metric).update(judges="texts", check_target=_several)
    return metric


def _checked(check: Callable[[int], None]) -> Callable[[Metric], Metric]:
    """A decorator that registers `check(EvalTask.num_samples)`, which raises before any answer is generated."""

    def marked(metric: Metric) -> Metric:
        vars(metric).update(check=check)
        return metric

    return marked


def _of_choices(metric: Metric) -> Metric:
    vars(metric).update(judges="choices")
    return metric


def _of_pairs(metric: Metric) -> Metric:
    vars(metric).update(judges="pairs")
    return metric


# Text.


def normalised(text: str) -> str:
    """Normalises a text as SQuAD does: lower case, no punctuation or articles, single spaces (arXiv:1606.05250).

    Unlike there, numbers stay what they are: -5 is not 5, 1.5 and 1,5 and 1/5 are not 15, and 1,234 is 1234.
    """
    text = re.sub(r"(?<=\d)\u2013(?=\d)", "-", text.lower().translate(_DASHES))
    text = _GROUPS.sub(lambda match: match[0].replace(",", ""), text)
    text = _ARTICLES.sub(" ", _PUNCTUATION.sub(lambda match: match["kept"] or "", text))
    return " ".join(text.split())


@configurable
@_of_texts
def exact_match(targets: Sequence[object], predictions: Sequence[object], normalise: bool = True) -> dict[str, Any]:
    """Whether the answer is one of the right ones, after `normalised` or, without `normalise`, after stripping space."""
    same = normalised if normalise else str.strip
    return {"exact_match": _each(targets, predictions, lambda target, text: float(same(target) == same(text)))}


@configurable
@_of_texts
def token_f1(targets: Sequence[object], predictions: Sequence[object]) -> dict[str, Any]:
    """F1 of the words shared with the right answer, as in SQuAD; with several right answers, the maximum."""
    return {"f1": _each(targets, predictions, _f1)}


def _f1(target: str, text: str) -> float:
    expected, predicted = normalised(target).split(), normalised(text).split()
    common = sum((collections.Counter(expected) & collections.Counter(predicted)).values())
    if not expected or not predicted:
        return float(expected == predicted)
    return 2 * common / (len(expected) + len(predicted))


def _check_rouge(num_samples: int) -> None:
    del num_samples
    extras.require("rouge_score", extra="evaluation", why="ROUGE")


@configurable
@_checked(_check_rouge)
@_of_texts
def rouge(
    targets: Sequence[object],
    predictions: Sequence[object],
    kinds: Sequence[str] = ("rouge1", "rouge2", "rougeL"),
    stem: bool = False,
    words: str = "unicode",
) -> dict[str, Any]:
    """F-measures of ROUGE from 0 to 1 (package rouge-score); with several right texts, the maximum.

    `kinds`: rougeN for any N, rougeL, rougeLsum (for texts with one sentence per line). `stem`: use Porter's stemmer for
    words in ASCII. `words`: "unicode", words of any script (`rouge_words`); "ascii", those of rouge-score, which drops every
    letter that is not a to z: all of a text in Russian or Chinese, the accents' letters of one in French.
    """
    scorer = extras.require("rouge_score.rouge_scorer", extra="evaluation", why="ROUGE")
    if words not in ("unicode", "ascii"):
        raise UserError(f"rouge.words is {words!r}, must be 'unicode' or 'ascii' (rouge-score's own)")
    tokenizer = rouge_words.Words(stem) if words == "unicode" else None
    if tokenizer is None:
        rouge_words.tell_dropped([text for target in targets for text in _several(target)])
    try:
        item = scorer.RougeScorer(list(kinds), use_stemmer=stem, tokenizer=tokenizer)
        item.score("", "")
    except (ValueError, TypeError) as error:
        raise UserError(f"rouge.kinds is {kinds!r} ({error}): try ('rouge1', 'rougeL')") from None
    result = {kind: lambda target, text, kind=kind: item.score(target, text)[kind].fmeasure for kind in kinds}
    return {kind: _each(targets, predictions, score) for kind, score in result.items()}


def _check_bleu(num_samples: int) -> None:
    if num_samples > 1:
        raise UserError(f"bleu needs one text per example, EvalTask.num_samples is {num_samples}: set it to 1")
    extras.require("sacrebleu", extra="evaluation", why="BLEU")


@configurable
@_checked(_check_bleu)
@_of_texts
def bleu(
    targets: Sequence[object], predictions: Sequence[object], tokenize: str = "13a", lowercase: bool = False
) -> dict[str, Any]:
    """Corpus BLEU from 0 to 100 (package sacrebleu), with a standard error from 200 bootstrap samples.

    `tokenize`: a tokenizer of sacrebleu: 13a, intl, char, zh, none, ...
    """
    if any(not isinstance(text, str) for text in predictions):
        raise UserError("bleu needs one text per example: set EvalTask.num_samples = 1")
    sacrebleu = extras.require("sacrebleu", extra="evaluation", why="BLEU")
    if tokenize not in sacrebleu.BLEU.TOKENIZERS:
        raise UserError(f"bleu.tokenize is {tokenize!r}, must be one of {', '.join(sacrebleu.BLEU.TOKENIZERS)}")
    scorer = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=True)  # avoids a warning
    each = [scorer.sentence_score(text, _several(target)) for target, text in zip(targets, predictions)]
    counts = np.array([[*item.counts, *item.totals, item.sys_len, item.ref_len] for item in each], np.int64)

    def score(rows: np.ndarray) -> float:
        sums, orders = rows.sum(axis=0).tolist(), (rows.shape[1] - 2) // 2
        return scorer.compute_bleu(sums[:orders], sums[orders:-2], sums[-2], sums[-1], smooth_method="exp").score

    random = np.random.default_rng(0)
    resampled = [score(counts[random.integers(0, len(counts), len(counts))]) for _ in range(_RESAMPLES)]
    return {"bleu": Estimate(score(counts), statistics.stdev(resampled) if len(counts) > 1 else None)}


def _each(targets: Sequence[Any], predictions: Sequence[Any], score: Callable[[str, str], float]) -> list[float]:
    """The score of each example: the best over its right answers, averaged over its samples."""
    result = []
    for target, prediction in zip(targets, predictions, strict=True):
        right = _several(target)
        texts = [prediction] if isinstance(prediction, str) else prediction
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"the prediction {str(prediction)[:60]} must be a text: EvalTask.choices needs metrics of choices"
            )
        result.append(statistics.fmean(max(score(item, text) for item in right) for text in texts))
    return result


# Choices.


@configurable
@_of_choices
def choice_accuracy(targets: Sequence[int], predictions: Sequence[Sequence[Choice]]) -> dict[str, Any]:
    """Whether the right choice has the highest probability, and the highest probability ** (1 / length).

    Lengths are in bytes (for ASCII text this is lm-eval's acc_norm) and in tokens. Among equal choices the first wins.
    """
    lengths = {
        "accuracy": lambda choice: 1,
        "accuracy_per_byte": lambda choice: max(choice.bytes, 1),
        "accuracy_per_token": lambda choice: max(choice.tokens, 1),
    }
    return {
        name: [
            float(int(np.argmax([item.log_probability / length(item) for item in choices])) == target)
            for target, choices in zip(targets, predictions, strict=True)
        ]
        for name, length in lengths.items()
    }


# Pairs.


@configurable
@_of_pairs
def pair_accuracy(targets: Sequence[None], predictions: Sequence[PairScores]) -> dict[str, Any]:
    """Whether the chosen answer has the higher score; equal scores are wrong, as in RewardBench (arXiv:2403.13787)."""
    del targets
    return {"accuracy": [float(pair.chosen > pair.rejected) for pair in predictions]}
