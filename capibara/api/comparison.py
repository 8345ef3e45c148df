"""Two models side by side on the same prompts: `capibara.compare`."""

from __future__ import annotations

import dataclasses
import html
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.evaluation.statistics.stopping import Reason, SequentialStopping, Stopped
from capibara.storage import outputs

if TYPE_CHECKING:
    from capibara.api.language_model import LanguageModel

_DRAWS, _PART = 10_000, 500  # of the bootstrap, and how many are in memory at a time
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}th,td{border-bottom:1px solid #8886;padding:.5rem;text-align:left;"
    "vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere}th{position:sticky;top:0;background:Canvas}"
)

Score = Callable[[str, str], float]  # (prompt, answer) -> how good it is


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The answers of two models to the same prompts.

    Attributes:
      names: of the models.
      prompts: what was asked.
      answers: of each model, in the order of the prompts.
      scores: of each model's answers; None: nobody scored them.
      stopped: how a sequential comparison stopped, with its interval; None: the number of prompts was fixed before.
    """

    names: tuple[str, str]
    prompts: tuple[str, ...]
    answers: tuple[tuple[str, ...], tuple[str, ...]]
    scores: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    stopped: Stopped | None = None

    @property
    def differences(self) -> np.ndarray:
        """The second model's score less the first one's, for each prompt: float64 [prompts].

        Raises:
          UserError: the answers have no scores.
        """
        if self.scores is None:
            raise UserError("the answers have no scores: compare(..., score=function of (prompt, answer))")
        first, second = (np.asarray(score, np.float64) for score in self.scores)
        return second - first

    def interval(self, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
        """The bootstrap's confidence interval of the mean difference, over prompts (Efron 1979, percentiles).

        Raises:
          UserError: the answers have no scores, or their number was not fixed before.
        """
        self._check_fixed("interval")
        means = self._draws(self.differences, seed)
        low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def p_value(self, seed: int = 0) -> float:
        """How probable so large a mean difference is if none exists: a paired test by random signs, two-sided.

        Raises:
          UserError: as for `interval`.
        """
        self._check_fixed("p_value")
        values, larger = self.differences, 0
        rng, most = np.random.default_rng(seed), abs(values.mean())
        for _ in range(_DRAWS // _PART):
            signs = rng.integers(0, 2, (_PART, len(values)), np.int8) * 2 - 1
            larger += int(np.count_nonzero(np.abs((signs * values).mean(1)) >= most * (1 - 1e-12)))
        return (larger + 1) / (_DRAWS + 1)

    def __str__(self) -> str:
        first, second = self.names
        if self.scores is None:
            equal = sum(a == b for a, b in zip(*self.answers))
            return f"{first} and {second}: {len(self.prompts)} prompts, {equal} equal answers"
        means = [float(np.mean(score)) for score in self.scores]
        if self.stopped is not None:
            how = str(self.stopped)
        else:
            low, high = self.interval()
            how = f"95% from {low:+.4g} to {high:+.4g}, p = {self.p_value():.3g}, {len(self.prompts)} prompts"
        return f"{first} {means[0]:.4g}, {second} {means[1]:.4g}: difference {means[1] - means[0]:+.4g} ({how})"

    def html(self) -> str:
        """One page with the answers side by side."""
        scores = self.scores or ((), ())
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ("prompt", *self.names))
        rows = []
        for i, prompt in enumerate(self.prompts):
            cells = [prompt]
            for answers, values in zip(self.answers, scores):
                cells.append(answers[i] + (f"\n\nscore {values[i]:.4g}" if values else ""))
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
        title = html.escape(str(self))
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></html>\n"
        )

    def _check_fixed(self, name: str) -> None:
        if self.stopped is not None:
            raise UserError(
                f"{name} is for a number of prompts that was fixed before, and this comparison stopped early: use stopped.bound"
            )

    @staticmethod
    def _draws(values: np.ndarray, seed: int) -> np.ndarray:
        """Means of resampled values, a part of them at a time."""
        rng, count = np.random.default_rng(seed), len(values)
        draws = (rng.integers(0, count, (_PART, count)) for _ in range(_DRAWS // _PART))
        return np.concatenate([values[drawn].mean(1) for drawn in draws])


def compare(
    first: LanguageModel,
    second: LanguageModel,
    prompts: Sequence[Any],
    *,
    score: Score | None = None,
    out: str | None = None,
    stopping: SequentialStopping | None = None,
    **sampling: Any,
) -> Comparison:
    """Answers of two models to the same prompts.

    Args:
      first, second: loaded models.
      prompts: texts, which models with a chat template answer as a user's turn, and others continue.
      score: (prompt, answer) -> how good an answer is; None: none.
      out: a file for one HTML page of the answers; None: none.
      stopping: stops as soon as the difference is known; None: all prompts are asked.
      sampling: as for `LanguageModel.generate`; greedy unless it names a temperature.

    Raises:
      UserError: there are no prompts, a score is no finite number, or is beyond `SequentialStopping.scores`.
    """
    for model in (first, second):
        if not hasattr(model, "generate"):
            raise UserError(f"compare takes loaded models, and {model!r} is none: try cb.load({model!r})")
    prompt_texts = () if isinstance(prompts, str) else tuple(prompts)
    other = next((prompt for prompt in prompt_texts if not isinstance(prompt, str)), None)
    if other is not None:
        raise UserError(f"prompts has {short(other)}, must have texts: give what the user asks, without messages")
    if not prompt_texts:
        raise UserError("prompts must be several texts, at least one: try ['Name three fruits.']")
    if "stream" in sampling:
        raise UserError("stream is of generate: leave it out")
    if out is not None:
        outputs.check_writable(out)
    options = {"temperature": 0.0} | sampling
    if stopping is None:
        answers = (_answers(first, prompt_texts, options), _answers(second, prompt_texts, options))
        scores = (
            None
            if score is None
            else (_scores(score, prompt_texts, answers[0]), _scores(score, prompt_texts, answers[1]))
        )
        result = Comparison(_names(first, second), prompt_texts, answers, scores)
    elif not isinstance(stopping, SequentialStopping):
        raise UserError(f"stopping is {stopping!r}, must be cb.SequentialStopping(...), or None: all prompts are asked")
    elif score is None:
        raise UserError("stopping needs scores: give score=function of (prompt, answer), or leave stopping out")
    else:
        result = _sequential(first, second, prompt_texts, score, stopping, options)
    if out is not None:
        outputs.save(out, result.html())
    return result


def _sequential(
    first: LanguageModel,
    second: LanguageModel,
    prompts: Sequence[str],
    score: Score,
    stopping: SequentialStopping,
    options: dict[str, Any],
) -> Comparison:
    """Asks prompts in a random order, some at a time, until `stopping` has a reason or none is left."""
    # In the file's order, such as easy ones first, later differences could have another mean than earlier ones.
    order = np.random.default_rng(stopping.seed).permutation(len(prompts))
    shuffled = tuple(prompts[i] for i in order)
    sequence, reason, count = stopping.sequence(), None, 0
    answers: tuple[list[str], list[str]] = ([], [])
    scores: tuple[list[float], list[float]] = ([], [])
    while reason is None and count < len(shuffled):
        part = shuffled[count : count + stopping.every]
        for i, model in enumerate((first, second)):
            new = _answers(model, part, options)
            answers[i].extend(new)
            scores[i].extend(stopping.checked(_scores(score, part, new)))
        for i in range(count, count + len(part)):
            sequence.add(scores[1][i] - scores[0][i])
        count += len(part)
        reason = stopping.reason(sequence.bound)
    stopped = Stopped(reason or Reason.ALL_ASKED, count, len(prompts), stopping.alpha, sequence.bound)
    return Comparison(
        _names(first, second),
        shuffled[:count],
        (tuple(answers[0]), tuple(answers[1])),
        (tuple(scores[0]), tuple(scores[1])),
        stopped,
    )


def _answers(model: LanguageModel, prompts: Sequence[str], options: dict[str, Any]) -> tuple[str, ...]:
    if model.chats:
        return tuple(model.chat(prompt, **options) for prompt in prompts)
    return tuple(model.generate(list(prompts), **options))


def _scores(score: Score, prompts: Sequence[str], answers: Sequence[str]) -> tuple[float, ...]:
    values = [score(prompt, answer) for prompt, answer in zip(prompts, answers)]
    for value, prompt in zip(values, prompts):
        if not isinstance(value, numbers.Real) or not np.isfinite(float(value)):
            raise UserError(f"the score of an answer to {prompt[:60]!r} is {value!r}, must be a finite number")
    return tuple(float(value) for value in values)


def _names(first: LanguageModel, second: LanguageModel) -> tuple[str, str]:
    if first.path != second.path:
        return first.path, second.path
    return f"{first.path} (first)", f"{second.path} (second)"
