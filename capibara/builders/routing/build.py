"""Builds a routing set: labels, splits, balances and decontaminates records, and writes them as JSON lines and Parquet."""

from __future__ import annotations

import collections
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence

from capibara.builders.files import fingerprints
from capibara.builders.files.fingerprints import Input
from capibara.builders.files.manifest import MANIFEST, Manifest
from capibara.builders.files.problems import Kind, Problems
from capibara.builders.routing import files, selection, statistics
from capibara.builders.routing.reader import Reader
from capibara.builders.routing.rows import FOLDERS, Scratch, name
from capibara.builders.routing.settings import RoutingSet
from capibara.builders.workers import Workers
from capibara.builders.writing import Output
from capibara.core.types import UserError
from capibara.data.tasks.routing import SCHEMA
from capibara.data.text import folders

KIND = "routing"
ENDINGS = (".jsonl", ".json")


def build(
    paths: Sequence[str],
    folder: str,
    settings: RoutingSet,
    *,
    num_workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    problems: Problems | None = None,
) -> Manifest:
    """Writes train, validation and test as .jsonl and .parquet, contaminated.jsonl, leaks.jsonl, statistics.json and a manifest.

    What an earlier run has read whole is kept; the bytes depend neither on that nor on `num_workers`.

    Args:
      paths: the records: of `prepare executions` and `prepare playbooks`, conversations and documents.
      folder: where to write.
      settings: how the set is made.
      num_workers: processes that each read one file at a time; 0: this one.
      progress: called with the number of files that are read, and of all.
      problems: what was left out of the input before.

    Raises:
      UserError: a package is not installed, the input has an unknown domain, lacks a domain or has too few sources, or the
        folder holds another build or cannot be written.
      TryAgain: a worker process was killed.
    """
    read = Problems()
    read.merge(problems or Problems())
    inputs = fingerprints.inputs_of(path for path in paths if _is_input(path, folder, read))
    if not inputs:
        raise UserError(
            f"IN ({', '.join(paths[:3])}) has no file of records (.jsonl) outside of --out: name the output of another builder"
        )
    with Output(folder, KIND, settings.as_json(), inputs) as output:
        if (manifest := output.done()) is not None:
            return manifest
        sets = settings.decontamination.about()
        _read(inputs, output, settings, num_workers, progress)
        result = Scratch(output.scratch, len(inputs))
        chosen = selection.select(result, settings.splits, settings.balance, settings.names)
        counts = collections.Counter(statistics.counts(chosen, settings.names))
        for whole in output.scratch.all():
            counts.update(whole.counts)
            read.merge(whole.problems)
        _check_any(counts, read)
        settings.splits.check(chosen.sources, chosen.linked)
        statistics.check(chosen, settings.names, settings.min_examples)
        about = {"capibara.kind": KIND, "capibara.schema": str(SCHEMA), "capibara.domains": json.dumps(settings.names)}
        for shard in files.shards(chosen, settings.shards):
            files.write(output, shard, chosen, result, about)
        _write_reports(output, chosen, result, [item.path for item in inputs])
        with output.part("statistics.json") as part:
            statistic = {"schema": SCHEMA, **statistics.of(chosen, settings.names), "evaluation_sets": sets}
            part.write(json.dumps(statistic, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n")
            part.records = 1
        return output.finish(counts, read)


def _is_input(path: str, folder: str, problems: Problems) -> bool:
    """Whether a file may have records: it is no report of a data set, which is counted, and not in the output folder."""
    above, name = os.path.split(os.path.realpath(path))
    root = os.path.realpath(folder)
    if os.path.commonpath([above, root]) == root:
        return False
    if name == MANIFEST or name in folders.BUILD_RECORDS and os.path.exists(os.path.join(above, MANIFEST)):
        problems.add(path, 0, Kind.LEFT_OUT, "is a report of a data set")
        return False
    return True


def _check_any(counts: Mapping[str, int], problems: Problems) -> None:
    """Raises UserError if no record has a domain, with the causes."""
    if counts["labelled"]:
        return
    causes = [f"{count:,} {name}" for name, count in counts.items() if name.startswith("excluded as")]
    causes += [f"{problems.total:,} skipped, the first: {item}" for item in [*problems][:1]]
    raise UserError(
        f"IN has {counts['records']:,} records, and none that is of a domain ({'; '.join(causes) or 'it is empty'}): "
        "correct it, or name other files"
    )


def _read(
    inputs: Sequence[Input],
    output: Output,
    settings: RoutingSet,
    num_workers: int,
    progress: Callable[[int, int], None],
) -> None:
    """Reads all files; those that an earlier run has read are kept."""
    paths = [item.path for item in inputs]
    common = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath([os.path.abspath(p) for p in paths])
    reader = Reader(parts=output.scratch, settings=settings, common=os.path.abspath(common))
    todo = [
        (i, path)
        for i, path in enumerate(paths)
        if any(output.scratch.done(name(folder, i)) is None for folder in FOLDERS)
    ]
    done = itertools.count(len(paths) - len(todo) + 1)
    progress(len(paths) - len(todo), len(paths))
    with Workers(min(num_workers, len(todo)) if len(todo) > 1 else 0) as workers:
        workers.each(reader, todo, lambda: progress(next(done), len(paths)))


def _write_reports(output: Output, chosen: selection.Selection, scratch: Scratch, paths: list[str]) -> None:
    """Writes what was excluded and what was linked."""
    with output.part("contaminated.jsonl") as part:
        for number in range(scratch.files):
            with open(scratch.path("contaminated", number), "rb") as file:
                for line in file:
                    part.write(line)
                    part.records += 1
    with output.part("leaks.jsonl") as part:
        for record in files.leaks(chosen, scratch, paths):
            part.write_record(record)
