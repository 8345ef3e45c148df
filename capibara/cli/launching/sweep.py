"""Runs a Gin file many times with different bindings: `python -m capibara.launch sweep local quickstart.gin --vary=...`."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence

from capibara.cli.arguments import flags, jobs
from capibara.cli.launching import trial_runs, watching
from capibara.cli.launching.job import facts, job_of
from capibara.core.fields import did_you_mean
from capibara.core.types import TryAgain, UserError
from capibara.jobs import backends, secrets, systems
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing.manager import Times
from capibara.jobs.spec import JobSpec, near_name
from capibara.jobs.sweeps import results
from capibara.jobs.sweeps.folder import Folder
from capibara.jobs.sweeps.jobs import JobLauncher
from capibara.jobs.sweeps.launcher import Launcher
from capibara.jobs.sweeps.local import LocalLauncher
from capibara.jobs.sweeps.study import Study
from capibara.jobs.sweeps.sweep import EarlyStop, Goal, Search, Sweep
from capibara.jobs.sweeps.trial import State, Trial
from capibara.monitoring.status import StatusLine
from capibara.multihost import exits
from capibara.multihost.signals import Signals

_DESCRIPTION = """usage: capibara launch sweep WHERE RUN.gin --vary='NAME = VALUES' ...

Run a Gin file many times with different bindings, and find the best.

WHERE is local, gce, gke, vertex, slurm or ssh. The same command again resumes: trials that have ended stay, others continue
from their last checkpoints. The results are printed and lie in --sweep_dir, also after Ctrl-C.

examples:
  python -m capibara.launch sweep local quickstart.gin --emulate=8 --gin.TRAIN_STEPS=100 \\
    --vary='LEARNING_RATE = [1e-3, 3e-3, 1e-2]' --search=grid
  python -m capibara.launch sweep gke base_v5e64.gin --storage=gs://bucket --image=IMAGE --parallel=4 \\
    --vary='LEARNING_RATE = log(1e-4, 1e-2)' --vary='Schedule.warmup_fraction = uniform(0, 0.1)' \\
    --search=bayesian --trials=32 --early_stop=median --early_stop_after=2000

exit codes: 0 a trial has ended well, 1 none has, 2 invalid input, or the first trials have all failed, 130 / 143 stopped by
ctrl-C / SIGTERM"""

_LONGEST_NAME = 40  # of a job
_POLL_S = 2.0  # for trials of this machine


def main(argv: Sequence[str]) -> int:
    """Parses the command line and runs the sweep; returns the exit code."""
    where = argv[1] if len(argv) > 1 else "--help"
    if where in ("-h", "--help"):
        print(f"{_DESCRIPTION}\n\n`capibara launch sweep WHERE --help` lists the flags.")
        return 0
    places = ["local", *sorted(backends.NAMES)]
    if where not in places:
        raise UserError(f"launch sweep has no {where!r}{did_you_mean(where, places, 'places')} (see --help)")
    kind = None if where == "local" else backends.find(where)
    args = flags.parse_arguments(_parser(where, kind), argv[2:])
    _check_numbers(args, ("parallel", "give_up_after"), at_least=1)
    if not args.poll > 0:
        raise UserError(f"--poll is {args.poll:g}, must be above 0")
    return _local(args) if kind is None else _jobs(args, kind)


def _parser(where: str, kind: type[Backend] | None) -> argparse.ArgumentParser:
    """The flags of a sweep, and those of a job or of a run on this machine."""
    parser = flags.ArgumentParser(f"capibara launch sweep {where}", _DESCRIPTION.partition("\n\n")[2])
    if kind is None:
        parser.add_argument("run", nargs="+", metavar="RUN.gin", help="Gin files of the run, as --gin_file of train")
        parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print what is run; start nothing")
        parser.add_argument(
            "--poll", type=float, default=_POLL_S, metavar="S", help="seconds between two looks; default: 2"
        )
        add = parser.add_argument_group("local").add_argument
        add("--name", help="of the sweep; default: that of the first Gin file")
        add("--emulate", type=int, metavar="N", help="each trial runs on N emulated CPU devices")
        add("--processes", type=int, default=1, metavar="N", help="processes of a trial; default: 1")
        add("--restarts", type=int, default=3, metavar="N", help="most restarts of a trial; default: 3")
        add("--grace", type=float, default=300.0, metavar="S", help="seconds to save after SIGTERM; default: 300")
    else:
        jobs.add_job(parser, kind)
    _add_sweep(parser, "sweeps/NAME" if kind is None else "STORAGE/sweeps/NAME")
    return parser


def _add_sweep(parser: argparse.ArgumentParser, default_dir: str) -> None:
    add = parser.add_argument_group(
        "sweep", "--sweep_file=FILE.gin can bind those of Sweep, such as Sweep.vary"
    ).add_argument
    add(
        "--vary",
        action="append",
        metavar="'NAME = VALUES'",
        help="a binding that varies: NAME = [value, ...], log(low, high), uniform(low, high) or int(low, high); repeatable",
    )
    add("--search", choices=[str(item) for item in Search], help="how values are chosen; default: random")
    add("--trials", type=int, metavar="N", help="how many; default: all of a grid")
    add("--metric", metavar="NAME", help="eval/NAME or train/NAME, at a trial's last step; default: eval/loss")
    add("--goal", choices=[str(item) for item in Goal], help="default: minimize")
    add("--early_stop", choices=[str(item) for item in EarlyStop], help="which trials are stopped early; default: none")
    add("--early_stop_after", type=int, metavar="STEP", help="none is stopped at an earlier step")
    add("--seed", type=int, metavar="N", help="of random choices; default: 0")
    add("--sweep_file", metavar="FILE.gin", help="Gin file that binds Sweep and is not of the run")
    add("--sweep_dir", metavar="DIR", help=f"folder of the trials and results; default: {default_dir}")
    add("--parallel", type=int, default=1, metavar="N", help="trials at once; default: 1")
    add("--give_up_after", type=int, default=3, metavar="N", help="end if the first N trials all fail; default: 3")
    add("--retry_failed", action="store_true", help="run trials that have failed again")
    add("--json", action="store_true", help="print the results as JSON")


def _check_numbers(args: argparse.Namespace, names: Sequence[str], *, at_least: int) -> None:
    for name in names:
        if not at_least <= getattr(args, name) < math.inf:
            raise UserError(f"--{name}={getattr(args, name)} must be at least {at_least}")


def _local(args: argparse.Namespace) -> int:
    """A sweep on this machine."""
    _check_numbers(args, ("processes",), at_least=1)
    _check_numbers(args, ("restarts", "grace"), at_least=0)
    gin_files = [*args.run, *args.gin_file]
    arguments = [f"--gin_file={file}" for file in gin_files]
    arguments += [f"--gin_search_paths={path}" for path in args.gin_search_paths]
    arguments += [f"--gin_bindings={binding}" for binding in args.gin_bindings]
    if args.emulate is not None:
        arguments.append(f"--emulate={args.emulate}")
    with trial_runs.without_accelerator():
        sweep = _sweep(args)
        folder = Folder(args.sweep_dir or f"sweeps/{args.name or near_name(pathlib.Path(args.run[0]).stem)}")
        paths = _checked(Study(folder, sweep), args)
        sweep = dataclasses.replace(sweep, run=("local", *arguments), files=trial_runs.digest(paths))

    def check() -> None:
        if trial_runs.digest(paths) != sweep.files:
            raise TryAgain("its Gin files or modules have changed since the sweep began: restore them")

    options = [f"--restarts={args.restarts}", f"--processes={args.processes}"]
    launcher = LocalLauncher(str(folder), arguments, flags=options, grace_s=args.grace, check=check)
    if args.dry_run:
        _show(Study(folder, sweep))
        print(shlex.join(launcher.command(Study(folder, sweep).first_trials(1)[0])))
        return 0
    study = Study.open(str(folder), sweep)
    with launcher:
        return _run(study, launcher, args)


def _jobs(args: argparse.Namespace, kind: type[Backend]) -> int:
    """A sweep of jobs."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sweep = _sweep(args)
    if varied := [item.name for item in sweep.space if item.name.rpartition(".")[2] == "slice"]:
        raise UserError(
            f"--vary={varied[0]} = ... would be another job for each slice: launch a sweep for each --slice"
        )
    args.name = _name(args, sweep)
    place = (
        (args.sweep_dir or f"{args.storage}/sweeps/{args.name}") if args.storage else "sweeps"
    )  # job_of needs --storage
    if kind.uses_buckets and args.sweep_dir and "://" not in args.sweep_dir:
        raise UserError(
            f"--sweep_dir={args.sweep_dir} is on this machine, where the jobs do not run: name a folder in a bucket"
        )
    folder = Folder(place if "://" in place else os.path.abspath(os.path.expanduser(place)))
    first = Study(folder, sweep).first_trials(1)[0]
    _checked(Study(folder, sweep), args)
    # The statements of a trial are part of it, since what is varied may have no other value.
    namespace = argparse.Namespace(**{**vars(args), "gin_bindings": [*args.gin_bindings, *first.statements]})
    backend, spec, sources = job_of(namespace, kind)
    common = {f"--gin_bindings={statement}" for statement in first.statements}
    spec = dataclasses.replace(spec, arguments=tuple(argument for argument in spec.arguments if argument not in common))
    digest = trial_runs.digest(path for name, path in sources.paths.items() if not name.endswith(".whl"))
    sweep = dataclasses.replace(sweep, run=(kind.name, spec.slice_.name, *spec.arguments), files=digest)
    if not args.dry_run:
        systems.connect(backend).close()  # no credentials: found before anything is written
    with contextlib.ExitStack() as stack:
        if args.dry_run:  # no job is recorded
            args.state = f"{stack.enter_context(tempfile.TemporaryDirectory())}/jobs.sqlite"
        records = stack.enter_context(watching.Opened(args))
        times = Times(poll_s=args.poll)
        launcher = JobLauncher(records, backend, spec, sources, times=times, say=_say)
        rendered = backend.render(launcher.spec_of(first))
        if args.dry_run:
            _show(Study(folder, sweep))
            print("".join(f"{line}\n" for line in facts(launcher.spec_of(first))), end="", file=sys.stderr)
            print(rendered.text(), end="")
            return 0
        study = Study.open(str(folder), sweep)
        print(_costs(spec, sweep, args.parallel), file=sys.stderr)
        with launcher:
            try:
                return _run(study, launcher, args)
            finally:
                if left := launcher.running():
                    _say(
                        f"{len(left)} jobs still run ({', '.join(left)}): repeat the command to resume the sweep, or end them "
                        "with capibara launch cancel"
                    )


def _sweep(args: argparse.Namespace) -> Sweep:
    """The sweep that --sweep_file and the flags describe."""
    from capibara import config

    config.parse([args.sweep_file] if args.sweep_file else [], (), args.gin_search_paths)
    names = {field.name for field in dataclasses.fields(Sweep)}
    values = {name: value for name, value in vars(args).items() if name in names - {"run"} and value is not None}
    sweep = config.build(Sweep, **values)
    config.check_used()
    if any(map(secrets.has_secret, sweep.vary)):
        raise UserError(
            "--vary has a value that looks like a secret, and everyone who sees the sweep could read it: remove it"
        )
    bound = {binding.partition("=")[0].strip() for binding in args.gin_bindings}
    if both := [item.name for item in sweep.space if item.name in bound]:
        raise UserError(f"{both[0]} is varied, and set by a flag to one value: remove one of them")
    return sweep


def _name(args: argparse.Namespace, sweep: Sweep) -> str:
    """The name of a sweep, to which those of its jobs add a number."""
    most = _LONGEST_NAME - 1 - max(3, len(str(sweep.count - 1)))
    if args.name is None:
        return near_name(pathlib.Path(args.run[0]).stem)[:most].rstrip("-")
    if len(args.name) > most:
        raise UserError(f"--name={args.name} must have at most {most} characters: the names of jobs add a number")
    return str(args.name)


def _checked(study: Study, args: argparse.Namespace) -> list[pathlib.Path]:
    """Checks the first trials; returns the user's files that they consist of."""
    return trial_runs.check_trials(study, [*args.run, *args.gin_file], args.gin_bindings, args.gin_search_paths)


def _show(study: Study) -> None:
    """Says which trials there will be, as far as that is known."""
    sweep = study.sweep
    most = min(sweep.count, 1 if sweep.search is Search.BAYESIAN else 20)
    for trial in study.first_trials(most):
        print(f"trial {trial.name}: {trial.shown}", file=sys.stderr)
    if sweep.count > most:
        print(f"and {sweep.count - most} more", file=sys.stderr)


def _costs(spec: JobSpec, sweep: Sweep, parallel: int) -> str:
    """How many jobs there will be, and what they cost, in a line."""
    at_once = min(parallel, sweep.count)
    line = f"sweep {spec.name}: {sweep.count} trials on {spec.slice_.name}, {at_once} at once"
    if spec.usd_per_hour is not None:
        line += f", {at_once * spec.usd_per_hour:,.2f} USD an hour"
    if spec.budget_usd is not None:
        line += f", at most {sweep.count * spec.budget_usd:,.2f} USD"
    return line


def _run(study: Study, launcher: Launcher, args: argparse.Namespace) -> int:
    """Runs the sweep, and prints the results however it ends; returns the exit code."""
    try:
        with StatusLine() as line, Signals() as signals:
            study.run(
                launcher,
                parallel=args.parallel,
                poll_s=args.poll,
                give_up_after=args.give_up_after,
                retry_failed=args.retry_failed,
                say=_say,
                watch=lambda trials: line.show(*_progress(study.sweep, trials)),
                pause=signals.pause,
            )
    finally:
        if trials := study.trials:
            print((results.json_of if args.json else results.table)(study.sweep, trials), end="", flush=True)
            print(f"files: {study.folder}/results.txt, .json, .csv and .png", file=sys.stderr)
    best = results.best(study.sweep, study.trials)
    if best is None:
        print("error: no trial has ended well", file=sys.stderr)
        return exits.EXIT_FAULT
    print(f"best: {results.line(study.sweep, best)}, in {best.model_dir}", file=sys.stderr)
    return 0


def _progress(sweep: Sweep, trials: Sequence[Trial]) -> tuple[str, str]:
    """The line that shows a sweep while it runs."""
    states = collections.Counter(trial.state for trial in trials)
    ended = sum(count for state, count in states.items() if state.has_ended)
    parts = [f"{states[state]} {state}" for state in (State.RUNNING, State.STOPPED, State.FAILED) if states[state]]
    if (best := results.best(sweep, trials)) is not None:
        parts.append(f"best {sweep.metric} {best.value:.6g} of trial {best.name}")
    return f"{ended} of {sweep.count} trials have ended", ", ".join(parts) or "none runs"


def _say(text: str) -> None:
    """Prints a line with the time, over the line of the progress."""
    print(f"{chr(13)}\x1b[K" if sys.stderr.isatty() else "", end="", file=sys.stderr)
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
