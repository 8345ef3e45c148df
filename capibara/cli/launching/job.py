"""Launches a run as a job of a back end, or shows it: `python -m capibara.launch gke RUN.gin --slice=v5e-64 --dry-run`."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from capibara.cli.arguments import flags, jobs
from capibara.cli.launching import managed
from capibara.core.types import UserError
from capibara.jobs import backends, bundle, secrets, systems
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing import spec_file
from capibara.jobs.spec import Capacity, JobSpec, near_name
from capibara.planner.hardware import slices
from capibara.storage import stores

_DESCRIPTION = """Make a job of Gin files, submit it, and manage it until it has ended.

The Gin files and the modules that they import are staged in --storage, by the hash of their content. What was preempted,
has failed or hangs is made again, and the run resumes. Ctrl-C ends the watch, not the job: `capibara launch manage`
manages it again. --dry-run prints the manifest, the request or the script that would be submitted.

examples:
  python -m capibara.launch gke base_v5e64.gin --storage=gs://bucket --image=IMAGE --dry-run
  python -m capibara.launch gke base_v5e64.gin --storage=gs://bucket --image=IMAGE
  python -m capibara.launch gke base_v5e64.gin --storage=gs://bucket --image=IMAGE --stage | kubectl apply -f -
  python -m capibara.launch slurm my_run.gin --slice=2xh100-8 --storage=/shared --partition=gpu --stage | sbatch"""


def main(argv: Sequence[str]) -> int:
    """Parses the command line and renders the job; returns the exit code."""
    where = argv[0]
    kind = backends.find(where)
    parser = flags.ArgumentParser(f"capibara launch {where}", _DESCRIPTION)
    jobs.add_arguments(parser, kind)
    args = flags.parse_arguments(parser, argv[1:])
    if args.dry_run + args.stage + args.detach > 1:
        raise UserError("--dry-run, --stage and --detach exclude each other: choose one")
    backend, spec, sources = job_of(args, kind)
    spec = spec_file.signed(backend, spec)
    rendered = backend.render(spec)
    is_shown = args.dry_run or args.stage
    if is_shown or args.detach:
        backend.check_unmanaged(spec)
    if not is_shown:  # what is not installed, has no credentials or clashes is found before anything is written
        systems.connect(backend).close()
        managed.check(backend, spec, args)
    if not args.dry_run:
        bundle.stage(spec.bundle, sources)
        spec_file.write(backend, spec)
    print("".join(f"{line}\n" for line in [*facts(spec), *_duration(spec)]), end="", file=sys.stderr)
    if is_shown:
        print(rendered.text(), end="")
        return 0
    return managed.launch(backend, spec, args)


def facts(spec: JobSpec) -> list[str]:
    """What the planner knows of the job's chips and their price, a line each."""
    slice_ = spec.slice_
    hosts = f"{slice_.hosts} host{'s' * (slice_.hosts > 1)}"
    machine = f" ({slice_.machine_type})" if slice_.machine_type else ""
    lines = [f"job {spec.name}: {slice_.name}, {slice_.chips} {slice_.chip.name} chips on {hosts}{machine}"]
    if spec.usd_per_hour is not None:
        price = slice_.chip.price if spec.usd_per_chip_hour is None else None
        dated = f" ({price.describe()})" if price else ""
        lines.append(f"price: {spec.usd_per_hour:,.2f} USD an hour{dated}")
    if spec.longest_s is not None:
        lines.append(
            f"budget: {spec.budget_usd:,.2f} USD, which ends the job after {spec.longest_s / 3600:.2f} hours of a start"
        )
    return [*lines, f"files: {spec.bundle.url}"]


def _duration(spec: JobSpec) -> list[str]:
    """How long the run of the parsed Gin files takes on the job's chips without interruption, and its price: a prediction."""
    from capibara.cli.composition import inspected_run, run_facts

    run = inspected_run.run_of_gin()
    try:
        _, cost, _ = run_facts.prediction(run)
    except UserError as error:
        return [f"predicted time: none, {error}"]
    tokens = run.steps * cost.tokens
    days, usd = cost.days(tokens), cost.usd(tokens, spec.usd_per_chip_hour)
    time = f"{days:,.1f} days" if days >= 1 else f"{24 * days:.2g} hours"
    price = "" if usd is None else f", {usd:,.2f} USD"
    return [f"predicted: {run.steps:,} steps in {time}{price}, without interruptions"]


def job_of(args: argparse.Namespace, kind: type[Backend]) -> tuple[Backend, JobSpec, bundle.Sources]:
    """The back end, the job and its files, of a command line.

    Raises:
      UserError: the Gin files do not configure a run, or the job is not one that the back end can run.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from capibara import config
    from capibara.cli.composition import inspected_run
    from capibara.core import user_modules

    gin_files = [*args.run, *args.gin_file]
    config.parse(args.place, (), args.gin_search_paths)
    backend = config.build(kind, **jobs.values_of(args, kind))
    config.check_used()
    read = config.parse(gin_files, args.gin_bindings, args.gin_search_paths)
    named = args.slice or inspected_run.run_of_gin().plan.slice
    if named is None:
        raise UserError("--slice is not set, and neither is Plan.slice: name the chips, e.g. --slice=v5e-64")
    if args.storage is None:
        raise UserError("--storage is not set: name a folder that the job's hosts can read, e.g. --storage=gs://bucket")
    storage = storage_of(args.storage)
    sources = bundle.collect(
        gin_files, read, args.gin_search_paths, user_modules.files_of(config.imported_modules()), args.wheel
    )
    name = args.name or near_name(pathlib.Path(args.run[0]).stem)
    bindings = [*args.gin_bindings, *_bindings(args.slice, storage)]
    bundle.check(sources, lambda files, folders: config.parse(files, bindings, folders))
    arguments = [f"--gin_file={file}" for file in sources.gin_files]
    arguments += [f"--gin_search_paths={path}" for path in sources.search_paths]
    spec = JobSpec(
        name=name,
        slice_=slices.parse(named),
        arguments=(*arguments, *(f"--gin_bindings={binding}" for binding in bindings)),
        bundle=bundle.describe(sources, name, f"{storage}/jobs"),
        image=args.image,
        environment=jobs.pairs(args.env, "--env"),
        secrets=tuple(map(secrets.parse, args.secret)),
        restarts=args.restarts,
        grace_s=args.grace,
        labels=jobs.pairs(args.label, "--label"),
        priority=args.priority,
        capacity=Capacity(args.capacity),
        reservation=args.reservation,
        budget_usd=args.budget_usd,
        usd_per_chip_hour=args.usd_per_chip_hour,
    )
    return backend, spec, sources


def storage_of(text: str) -> str:
    """A bucket's address, or an absolute path, of --storage."""
    scheme = stores.scheme_of(text)
    if scheme not in ("", "gs", "s3"):
        raise UserError(
            f"--storage={scheme}://... must be in gs:// or s3://, or a folder of a disk that all hosts share"
        )
    return text.rstrip("/") if scheme else os.path.abspath(os.path.expanduser(text))


def _bindings(slice_: str | None, storage: str) -> list[str]:
    """Bindings that a job adds: its slice, and a run folder in the storage if its own path is relative."""
    from capibara import config
    from capibara.training.trainer import Trainer

    values = {"Plan.slice": slice_} if slice_ else {}
    folder = config.build(Trainer).model_dir
    if "://" not in folder and not folder.startswith(("/", "~")):
        values["Trainer.model_dir"] = f"{storage}/{folder}"
    return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
