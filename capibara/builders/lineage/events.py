"""OpenLineage run events, by the classes of openlineage-python.

Files are data sets of the namespace "file", named by their absolute paths, with their sha256 as version; a folder is one,
too, with its fingerprint as version. The spec of the events: https://openlineage.io/docs/spec/object-model
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.builders.files import fingerprints, reading
from capibara.builders.files.fingerprints import File
from capibara.builders.files.problems import Problems
from capibara.core import extras
from capibara.core.types import UserError

if TYPE_CHECKING:
    from openlineage.client import event_v2

NAMESPACE = "file"  # of data sets that are files
_JOBS = "capibara"  # namespace of jobs, where OPENLINEAGE_NAMESPACE does not say another
MOST_FILES = 1000  # inputs or outputs that an event names one by one
_PARENT = "OPENLINEAGE_PARENT_ID"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A file or folder that a run reads or writes.

    Attributes:
      path: absolute.
      version: sha256 of a file, or a fingerprint of a folder; None: unknown.
      bytes: its size; None: unknown.
      files: how many it has.
      records: how many it has; None: unknown.
      fields: names and JSON types of the fields of its records.
    """

    path: str
    version: str | None = None
    bytes: int | None = None
    files: int = 1
    records: int | None = None
    fields: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upstream:
    """A run that made an input.

    Attributes:
      namespace, job: of its job.
      run: its id.
    """

    namespace: str
    job: str
    run: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as all of its events describe it.

    Attributes:
      id: a UUID.
      job: name of the job, such as "prepare.playbooks".
      config: the settings, as JSON values.
      inputs: what it reads.
      upstream: the runs that made the inputs.
    """

    id: str
    job: str
    config: Mapping[str, Any]
    inputs: Sequence[Dataset] = ()
    upstream: Sequence[Upstream] = ()


def new_id() -> str:
    """A new id of a run; raises UserError if openlineage-python is not installed."""
    extras.require("openlineage.client", extra="builders", why="lineage")
    from openlineage.client.uuid import generate_new_uuid

    return str(generate_new_uuid())


def event(run: Run, state: str, outputs: Sequence[Dataset] = (), error: str | None = None) -> event_v2.RunEvent:
    """An event of a run that happens now.

    Args:
      run: the run.
      state: "START", "COMPLETE", "FAIL" or "ABORT".
      outputs: what it wrote.
      error: why it failed, on one line.

    Raises:
      UserError: OPENLINEAGE_PARENT_ID is none.
    """
    from openlineage.client import event_v2, facet_v2

    facets = _run_facets(run.config, run.upstream)
    if error is not None:
        facets["errorMessage"] = facet_v2.error_message_run.ErrorMessageRunFacet(error, "PYTHON")
    job_type = facet_v2.job_type_job.JobTypeJobFacet("BATCH", "CAPIBARA", "JOB")
    return event_v2.RunEvent(
        eventTime=_now(),
        eventType=event_v2.RunState[state],
        producer=_producer(),
        run=event_v2.Run(run.id, _produced(facets)),
        job=event_v2.Job(os.environ.get("OPENLINEAGE_NAMESPACE") or _JOBS, run.job, _produced({"jobType": job_type})),
        inputs=[_input(item) for item in _grouped(run.inputs)],
        outputs=[_output(output) for output in outputs],
    )


def abort_of(start: Mapping[str, Any]) -> event_v2.RunEvent | None:
    """The ABORT of a run that was killed, by its START; None: that is no such event."""
    from openlineage.client import event_v2

    try:
        return event_v2.RunEvent(
            eventTime=_now(),
            eventType=event_v2.RunState.ABORT,
            producer=_producer(),
            run=event_v2.Run(str(start["run"]["runId"])),
            job=event_v2.Job(str(start["job"]["namespace"]), str(start["job"]["name"])),
        )
    except (KeyError, TypeError, ValueError):
        return None


def outputs_of(folder: str, files: Sequence[File], fingerprint: str) -> list[Dataset]:
    """An output folder, absolute, and its files."""
    named = [
        Dataset(
            path=os.path.join(folder, file.name),
            version=file.sha256,
            bytes=file.bytes,
            records=file.records,
            fields=_fields(os.path.join(folder, file.name)),
        )
        for file in files[:MOST_FILES]
    ]
    size, records = sum(file.bytes for file in files), sum(file.records for file in files)
    return [Dataset(path=folder, version=fingerprint, bytes=size, files=len(files), records=records), *named]


def _fields(path: str) -> tuple[tuple[str, str], ...]:
    """The fields of the first record of JSON lines, and their types."""
    if not path.endswith(".jsonl"):
        return ()
    first = next(iter(reading.records(path, Problems())), None)
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return tuple((name, names.get(type(value), "null")) for name, value in first.value.items()) if first else ()


def _grouped(inputs: Sequence[Dataset]) -> list[Dataset]:
    """The inputs; their folders where they are many."""
    if len(inputs) <= MOST_FILES:
        return list(inputs)
    folders: dict[str, list[Dataset]] = {}
    for item in inputs:
        folders.setdefault(os.path.dirname(item.path), []).append(item)
    if len(folders) > MOST_FILES:
        folders = {os.path.commonpath(list(folders)): list(inputs)}
    return [
        Dataset(
            path=folder,
            version=fingerprints.of_files({os.path.relpath(file.path, folder): file.version or "" for file in files}),
            bytes=sum(file.bytes or 0 for file in files),
            files=len(files),
        )
        for folder, files in sorted(folders.items())
    ]


# --- OpenLineage's classes -------------------------------------------------------------------------------------------


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


def _producer() -> str:
    return f"urn:capibara:{fingerprints.code_version().package}"


def _produced(facets: dict[str, Any]) -> dict[str, Any]:
    """The facets, with this program as their producer."""
    for facet in facets.values():
        facet._producer = _producer()
    return facets


def _run_facets(config: Mapping[str, object], upstream: Sequence[Upstream]) -> dict[str, Any]:
    from openlineage.client import facet_v2

    parameters, dependencies = facet_v2.execution_parameters_run, facet_v2.job_dependencies_run
    code = fingerprints.code_version()
    origin = {"package": code.package, "commit": code.commit, "isChanged": code.is_changed}
    facets: dict[str, Any] = {
        "processing_engine": facet_v2.processing_engine_run.ProcessingEngineRunFacet(
            code.package, "capibara", extras.version("openlineage-python")
        ),
        "capibara_code": facet_v2.RunFacet().with_additional_properties(**origin),
        "capibara_folder": facet_v2.RunFacet().with_additional_properties(workingDirectory=os.getcwd()),
        "executionParameters": parameters.ExecutionParametersRunFacet(
            [parameters.ExecutionParameter(key, value=value) for key, value in _flat("", config)]
        ),
    }
    if upstream:
        facets["jobDependencies"] = dependencies.JobDependenciesRunFacet(
            [
                dependencies.JobDependency(
                    dependencies.JobIdentifier(item.namespace, item.job), dependencies.RunIdentifier(item.run)
                )
                for item in upstream
            ]
        )
    if (parent := _parent()) is not None:
        of = facet_v2.parent_run
        facets["parent"] = of.ParentRunFacet(of.Run(parent.run), of.Job(parent.namespace, parent.job))
    return facets


def _parent() -> Upstream | None:
    """The run that started this program, as schedulers name it: NAMESPACE/JOB/RUN in OPENLINEAGE_PARENT_ID."""
    text = os.environ.get(_PARENT)
    if not text:
        return None
    from openlineage.client.event_v2 import Run

    try:
        namespace, job, run = text.split("/")
        Run(run)
    except ValueError:
        raise UserError(f"{_PARENT} ({text}) must be NAMESPACE/JOB/RUN, RUN a UUID: correct it, or unset it") from None
    return Upstream(namespace=namespace, job=job, run=run)


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """The leaves of nested settings, by dotted names."""
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), value[key])
    elif prefix:
        yield prefix, value if isinstance(value, str) else fingerprints.canonical(value)


def _facets(dataset: Dataset) -> dict[str, Any]:
    from openlineage.client import facet_v2

    facets: dict[str, Any] = {}
    if dataset.version is not None:
        facets["version"] = facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet(dataset.version)
    if dataset.fields:
        of = facet_v2.schema_dataset
        facets["schema"] = of.SchemaDatasetFacet([of.SchemaDatasetFacetFields(*field) for field in dataset.fields])
    return _produced(facets)


def _input(dataset: Dataset) -> event_v2.InputDataset:
    from openlineage.client import event_v2, facet_v2

    of = facet_v2.input_statistics_input_dataset
    statistics = of.InputStatisticsInputDatasetFacet(dataset.records, dataset.bytes, dataset.files)
    return event_v2.InputDataset(
        NAMESPACE, dataset.path, inputFacets=_produced({"inputStatistics": statistics}), facets=_facets(dataset)
    )


def _output(dataset: Dataset) -> event_v2.OutputDataset:
    from openlineage.client import event_v2, facet_v2

    of = facet_v2.output_statistics_output_dataset
    statistics = of.OutputStatisticsOutputDatasetFacet(dataset.records, dataset.bytes, dataset.files)
    return event_v2.OutputDataset(
        NAMESPACE, dataset.path, outputFacets=_produced({"outputStatistics": statistics}), facets=_facets(dataset)
    )
