"""Measures how a model uses its experts, on its run's held-out text or on a file: `capibara experts stats`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence

from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import JsonlSource
from capibara.evaluation.subject import Subject
from capibara.interop.experts import measuring, picture
from capibara.interop.experts.statistics import Statistics
from capibara.storage import outputs
from capibara.training import feed, run_folder

FILE = "expert_use.json"


def measured(
    subject: Subject,
    data: Sequence[str] = (),
    domains: Sequence[str] = (),
    *,
    limit: int | None = None,
    show: Callable[[str, str], None] = lambda topic, detail: None,
) -> Statistics:
    """How a model uses its experts.

    Args:
      subject: the model.
      data: JSON lines files with a `text` and optionally a `domain`; empty: the validation split of the run.
      domains: the domains that count apart; empty: those of the run's data.
      limit: the largest number of batches; None: all.
      show: reports the progress.

    Raises:
      UserError: the data cannot be read, or the model has no experts that tokens choose.
    """
    path = str(subject.about["model"])
    measuring.check(subject.model.config, path)
    if not data and subject.about["step"] is None:
        raise UserError(f"{path} is no run, which would have data: name texts, --data=texts.jsonl")
    dataset = _dataset(subject.trainer.dataset, data, domains)
    trainer = dataclasses.replace(subject.trainer, dataset=dataset, loss=None)
    with contextlib.closing(feed.validation_loader(trainer, subject.mesh)) as loader:
        return measuring.measure(
            subject.model,
            subject.params,
            itertools.islice(loader, limit),
            trainer.plan,
            subject.mesh,
            path=path,
            domains=dataset.domains,
            show=lambda number: show("measuring", f"batch {number}"),
        )


def default_path(model: str) -> str:
    """Where the statistics of a run are written.

    Raises:
      UserError: the model is no run.
    """
    if not (os.path.isdir(model) and run_folder.is_run(model)):
        raise UserError(f"{model} is no run folder, where statistics go by default: name a file, --out={FILE}")
    return os.path.join(model, FILE)


def write(statistics: Statistics, path: str, picture_path: str) -> None:
    """Writes the file and the picture of statistics."""
    statistics.write(path)
    outputs.replace(picture_path, picture.draw(statistics))


def table(statistics: Statistics) -> list[str]:
    """Lines that tell, of each domain, its tokens and how unevenly they use the experts."""
    lines = [f"{'domain':<16}{'tokens':>12}{'busiest expert':>16}{'idlest expert':>16}{'unused':>8}"]
    for name, of in statistics.domains.items():
        load = of.routed / max(of.routed.mean(), 1e-9)
        unused = int((of.routed == 0).sum())
        lines.append(
            f"{name:<16}{of.tokens:>12,}{f'{load.max():.2f} x mean':>16}{f'{load.min():.2f} x mean':>16}{unused:>8}"
        )
    return lines


def _dataset(dataset: Dataset, data: Sequence[str], domains: Sequence[str]) -> Dataset:
    chosen = tuple(domains) or dataset.domains
    if not data:
        return dataclasses.replace(dataset, domains=chosen)
    source = JsonlSource(files=(), validation_files=tuple(data))  # there is no training
    return dataclasses.replace(
        dataset,
        source=source,
        mixture_or_task_name=None,
        task_module=None,
        use_cached=False,
        vocabulary=dataset.get_vocabulary(),
        domains=chosen,
    )
