"""Runs an evaluation: all requested tasks, with results as JSON and as a table."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from capibara import __version__, config
from capibara.core import extras
from capibara.core.types import UserError
from capibara.data.shards import tables
from capibara.data.text import disk
from capibara.data.text.splits import Use
from capibara.evaluation import answers, metrics, seqio_tasks, validation
from capibara.evaluation.answers import Show
from capibara.evaluation.grouping import reward_bench
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
    """The files of the tasks; of tables and data sets of the Hub their names."""
    files: list[str] = []
    for item in [task for task in tasks if isinstance(task, Ours)]:
        lines = [name for name in item.task.files if not tables.is_table(name)]
        files += [path for name in item.task.files if tables.is_table(name) for path in tables.files_of(name)]
        files += disk.listed(f"{item.name}/EvalTask.files", lines, disk.RECORDS, Use.EVALUATION)[0] if lines else []
    return files


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
    if task.pairs:
        del how["format"]
        results: list[Any] = list(answers.scored(subject, name, items, recorded, show))
    elif task.thinking is not None:
        chosen = answers.chosen(subject, name, task, items, task.thinking, ours.reward, recorded, show)
        results = [answer.text for answer in chosen]
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
    return hosts.of_first(lambda: _measured(ours, results, how))


def _thought(strategy: Strategy, chosen: Sequence[Answer]) -> dict[str, Any]:
    """How a strategy answered: its options, what it cost, and how many votes were a tie."""
    ties = [answer.about["tie"] for answer in chosen if "tie" in answer.about]
    cost = {name: sum(getattr(answer, name) for answer in chosen) / len(chosen) for name in ("texts", "tokens")}
    return (
        strategy.described()
        | {f"mean_{name}": value for name, value in cost.items()}
        | ({"ties": sum(ties)} if ties else {})
    )


def _measured(ours: Ours, results: list, how: dict[str, Any]) -> dict[str, Any]:
    """A task's metrics, of all examples and of each group, `how` they came about, and what they say of themselves."""
    name, targets = ours.name, [item.target for item in ours.items]
    groups = [item.group for item in ours.items if item.group is not None]
    estimates: dict[str, Estimate] = {}
    of_groups: dict[str, dict[str, Estimate]] = {group: {} for group in sorted(set(groups))}
    about: dict[str, Any] = {}
    for metric in ours.task.scored_by:
        with config.in_scope(name):  # bindings of the metric's parameters for this task
            new, parts = metrics.computed(metric, targets, results, groups)
        if both := estimates.keys() & new.keys():
            raise UserError(f"two of {name}/EvalTask.metrics return {both.pop()!r}: remove one of them")
        estimates |= new
        for group, part in parts.items():
            of_groups[group] |= part
        about |= getattr(metric, "about", dict)()
    if ours.task.group_by is not None:
        about |= {"groups": _by_group(ours.task.group_by, of_groups, collections.Counter(groups))}
    return _result(estimates, **how, **about)


def _by_group(key: str, of_groups: dict[str, dict[str, Estimate]], counts: Mapping[str, int]) -> dict[str, Any]:
    """The metrics of each group, their means over groups, and those of RewardBench's sections."""
    names = {name: None for estimates in of_groups.values() for name in estimates}
    values = {
        name: {group: estimates[name].value for group, estimates in of_groups.items() if name in estimates}
        for name in names
    }
    sections = {name: reward_bench.sections(of_metric, counts) for name, of_metric in values.items()}
    return {
        "by": key,
        "of": {group: _result(estimates, examples=counts[group]) for group, estimates in of_groups.items()},
        "mean": {name: statistics.fmean(of_metric.values()) for name, of_metric in values.items()},
    } | ({"sections": sections} if any(sections.values()) else {})


def _result(estimates: dict[str, Estimate], **how: object) -> dict[str, Any]:
    values = {name: {"value": item.value, "standard_error": item.standard_error} for name, item in estimates.items()}
    return {"metrics": values, **how}


def table(results: dict[str, Any]) -> list[str]:
    """The results as lines of text."""
    rows: list[tuple[str, ...]] = [("task", "metric", "value", "+-", "of")]
    for name, result in results["tasks"].items():
        size = f"{result['examples']} examples" if "examples" in result else f"{result['batches']} batches"
        rows += _rows(name, result["metrics"], size)
        rows += _group_rows(name, result["groups"]) if "groups" in result else []
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


def _rows(name: str, estimates: Mapping[str, Any], size: str) -> list[tuple[str, ...]]:
    errors = {key: item["standard_error"] for key, item in estimates.items()}
    shown = {key: "" if error is None else f"{error:.4f}" for key, error in errors.items()}
    return [(name, key, f"{item['value']:.4f}", shown[key], size) for key, item in estimates.items()]


def _group_rows(name: str, groups: Mapping[str, Any]) -> list[tuple[str, ...]]:
    by = groups["by"]
    rows = [
        row
        for group, result in groups["of"].items()
        for row in _rows(f"{name}, {by} {group}", result["metrics"], f"{result['examples']} examples")
    ]
    rows += [
        (f"{name}, mean", key, f"{value:.4f}", "", f"{len(groups['of'])} of {by}")
        for key, value in groups["mean"].items()
    ]
    return rows + [
        (f"{name}, {section}", key, f"{value:.4f}", "", "RewardBench")
        for key, sections in groups.get("sections", {}).items()
        for section, value in sections.items()
    ]
