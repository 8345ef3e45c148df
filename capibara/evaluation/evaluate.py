"""Runs an evaluation: all requested tasks, with results as JSON and as a table."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Sequence
from typing import Any

import jax

from capibara import __version__, config
from capibara.core import extras
from capibara.core.types import UserError
from capibara.data.text import disk
from capibara.evaluation import answers, metrics, seqio_tasks, validation
from capibara.evaluation.answers import Show
from capibara.evaluation.metrics import Estimate
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.seqio_tasks import SeqioEvaluation
from capibara.evaluation.subject import Subject
from capibara.evaluation.tasks import EvalTask, Item
from capibara.inference.sampling.sampling import changed
from capibara.inference.thinking.reward_model import RewardModel
from capibara.inference.thinking.strategy import Answer, Strategy
from capibara.multihost import hosts

_PACKAGES = ("jax", "flax", "numpy", "sacrebleu", "rouge-score", "seqio", "lm_eval")


@dataclasses.dataclass(frozen=True)
class Ours:
    """An EvalTask with its items."""

    name: str
    task: EvalTask
    items: list[Item]
    reward: RewardModel | None = None  # that EvalTask.thinking names


@dataclasses.dataclass(frozen=True)
class Seqio:
    """A SeqIO task or mixture."""

    name: str
    options: SeqioEvaluation


@dataclasses.dataclass(frozen=True)
class Validation:
    """The run's validation split."""


Task = Ours | Seqio | Validation


def files_of(tasks: Sequence[Task]) -> list[str]:
    """The files of the tasks."""
    ours = [task for task in tasks if isinstance(task, Ours)]
    return [
        path for item in ours for path in disk.listed(f"{item.name}/EvalTask.files", item.task.files, disk.RECORDS)[0]
    ]


def evaluate(
    subject: Subject, tasks: Sequence[Task], *, limit: int | None, predictions: str | None, show: Show
) -> dict[str, Any]:
    """Evaluates all tasks; returns the results as JSON values.

    Args:
      subject: the model.
      tasks: are evaluated in this order.
      limit: the largest number of examples of a task, and of batches of the validation split.
      predictions: a file for the answers; answers that it already has are reused.
      show: called with the progress.
    """
    results: dict[str, Any] = {}
    with Predictions(predictions, subject.about) as reported:
        for task in tasks:
            begin_s = time.perf_counter()
            for name, result in _of(subject, task, limit, reported, show).items():
                results[name] = result | {"seconds": round(time.perf_counter() - begin_s, 3)}
    return subject.about | {
        "tasks": results,
        "versions": {"capibara": __version__} | {p: v for p in _PACKAGES if (v := extras.version(p)) is not None},
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _of(
    subject: Subject, task: Task, limit: int | None, recorded: Predictions, show: Show
) -> dict[str, dict[str, Any]]:
    """The result of each task of one name; a mixture has several tasks."""
    match task:
        case Validation():
            result, batches = validation.validated(subject, limit, show)
            return {validation.NAME: _result(result, batches=batches)}
        case Seqio(name, options):
            how = {"split": options.split, "sampling": changed(options.sampling)}
            parts = seqio_tasks.evaluated(subject, name, options, limit, recorded, show)
            return {seqio_tasks.PREFIX + part: _result(value, examples=n, **how) for part, (value, n) in parts.items()}
        case Ours(name):
            return {name: _of_ours(subject, task, recorded, show)}


def _of_ours(subject: Subject, ours: Ours, recorded: Predictions, show: Show) -> dict[str, Any]:
    name, task, items = ours.name, ours.task, ours.items
    how: dict[str, Any] = {"examples": len(items), "format": str(task.format), "files": list(task.files)}
    if task.retrieval is not None:
        how |= {"index": task.retrieval.index, "k": task.retrieval.k}
    if task.thinking is not None:
        chosen = answers.chosen(subject, name, task, items, task.thinking, ours.reward, recorded, show)
        results: list[Any] = [answer.text for answer in chosen]
        how |= {"thinking": _thought(task.thinking, chosen), "sampling": changed(task.sampling)}
    elif task.choices is None:
        results = answers.generated(subject, name, task, items, recorded, show)
        how |= {"num_samples": task.num_samples, "sampling": changed(task.sampling)}
        if task.memory is not None:
            how |= {"memory": dataclasses.asdict(task.memory)}
    else:
        results = answers.ranked(subject, name, task, items, recorded, show)
        if task.remix is not None:
            how |= {"remix": dataclasses.asdict(task.remix)}
    show(name, "metrics")
    result, about = hosts.of_first(lambda: _measured(ours, results))
    return _result({metric: Estimate(*item) for metric, item in result.items()}, **how, **about)


def _thought(strategy: Strategy, chosen: Sequence[Answer]) -> dict[str, Any]:
    """How a strategy answered: its options, what it cost, and how many votes were a tie."""
    ties = [answer.about["tie"] for answer in chosen if "tie" in answer.about]
    cost = {name: sum(getattr(answer, name) for answer in chosen) / len(chosen) for name in ("texts", "tokens")}
    return (
        strategy.described()
        | {f"mean_{name}": value for name, value in cost.items()}
        | ({"ties": sum(ties)} if ties else {})
    )


def _measured(ours: Ours, results: list) -> tuple[dict[str, tuple[float, float | None]], dict[str, Any]]:
    """The values and standard errors of a task's metrics, and the metrics' own descriptions of how they ran."""
    name = ours.name
    result: dict[str, Estimate] = {}
    about: dict[str, Any] = {}
    for metric in ours.task.scored_by:
        with config.in_scope(name):  # bindings of the metric's parameters for this task
            new = metrics.computed(metric, [item.target for item in ours.items], results)
        if both := result.keys() & new.keys():
            raise UserError(f"two of {name}/EvalTask.metrics return {both.pop()!r}: remove one of them")
        result |= new
        about |= getattr(metric, "about", dict)()
    return {metric: (entry.value, entry.standard_error) for metric, entry in result.items()}, about


def _result(estimates: dict[str, Estimate], **how: object) -> dict[str, Any]:
    values = {name: {"value": item.value, "standard_error": item.standard_error} for name, item in estimates.items()}
    return {"metrics": values, **how}


def table(results: dict[str, Any]) -> list[str]:
    """The results as lines of text."""
    rows = [("task", "metric", "value", "+-", "of")]
    for name, result in results["tasks"].items():
        size = f"{result['examples']} examples" if "examples" in result else f"{result['batches']} batches"
        for metric, item in result["metrics"].items():
            error = "" if item["standard_error"] is None else f"{item['standard_error']:.4f}"
            rows.append((name, metric, f"{item['value']:.4f}", error, size))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]
    held = {name: entry["programs"] for name, entry in results["tasks"].items() if "programs" in entry}
    return lines + [
        f"{name}: programs isolated by {by['holder']}, {'with' if by['network'] else 'no'} network, tests "
        f"{'in a separate process' if by['separate'] else 'in the same process'}"
        for name, by in held.items()
    ]
