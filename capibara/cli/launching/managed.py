"""What can be done with jobs that were launched: `python -m capibara.launch list|status|logs|cancel|resume|manage|recover`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Sequence

from capibara.cli.arguments import jobs
from capibara.cli.launching import watching
from capibara.cli.launching.local import Parser
from capibara.cli.launching.watching import Opened, say
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.jobs import systems
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing import lifecycle, spec_file
from capibara.jobs.managing.records import Record, Records, State
from capibara.jobs.secrets import Source
from capibara.jobs.spec import Attempt, JobSpec
from capibara.multihost import exits

_TEXTS = {
    "list": "List the jobs that were launched from here.",
    "status": "Show a job, with its history.",
    "logs": "Print the log of a job, or where it is.",
    "cancel": "End jobs: the run saves a checkpoint, and their resources are deleted.",
    "resume": "Run jobs again that have failed or were cancelled; a run resumes from its last verified checkpoint.",
    "manage": "Manage all jobs until they have ended: what was preempted, has failed or hangs is replaced.",
}
_STARTED = (State.WAITING, State.RUNNING)


def main(argv: Sequence[str]) -> int:
    """Parses the command line and does it; returns the exit code."""
    verb = argv[0]
    parser = Parser(f"capibara launch {verb}", description=_TEXTS[verb], allow_abbrev=False)
    if verb in ("status", "logs", "cancel", "resume"):
        parser.add_argument("name", nargs=1 if verb in ("status", "logs") else "+", help="of the job")
    jobs.add_state(parser)
    if verb in ("list", "status"):
        parser.add_argument("--json", action="store_true", help="print JSON")
    if verb in ("cancel", "resume"):
        parser.add_argument("--detach", action="store_true", help="leave it to a manager that runs")
    if verb == "manage":
        parser.add_argument("--forever", action="store_true", help="wait for jobs that are launched later, too")
    args = parser.parse_args(list(argv[1:]))
    if args.state and not os.path.exists(os.path.expanduser(args.state)):
        raise UserError(f"--state={args.state} does not exist, so it has no jobs: name another --state")
    with Opened(args) as records:
        for name in getattr(args, "name", ()):
            if records.find(name) is None:
                known = [item.name for item in records.all()]
                raise UserError(f"there is no job {name!r}{did_you_mean(name, known, 'jobs')} in {records.path}")
        return _ACTIONS[verb](records, args)


def check(backend: Backend, spec: JobSpec, args: argparse.Namespace) -> None:
    """Raises UserError if a job could not be recorded, before its files are staged."""
    missing = [
        secret.name for secret in spec.secrets if secret.source is Source.ENVIRONMENT and secret.name not in os.environ
    ]
    if missing:
        raise UserError(f"the variable {missing[0]} of --secret=...=env:{missing[0]} is not set: set it")
    with Opened(args) as records:
        records.check(Record(name=spec.name, text=spec_file.text_of(backend, spec), attempt=Attempt()))


def launch(backend: Backend, spec: JobSpec, args: argparse.Namespace) -> int:
    """Records a job whose files are staged, submits it and manages it; returns the exit code."""
    record = Record(
        name=spec.name,
        text=spec_file.text_of(backend, spec),
        attempt=Attempt(launch=secrets.token_hex(4)),
        launched_s=time.time(),
    )
    with Opened(args) as records:
        added = records.add(record)
        if added.attempt.launch == record.attempt.launch:
            records.note(spec.name, "launched")
        else:
            say(f"job {spec.name} is {added.state} already, with the same files and flags")
        result = watching.manage(
            records,
            [spec.name],
            args,
            lambda value: value[0].state.is_final or (args.detach and value[0].state in _STARTED),
        )
        if args.detach and not result[0].state.is_final:
            say("nothing replaces the job when it is preempted unless capibara launch manage runs")
        return watching.exit_code(result) or (exits.EXIT_FAULT if result[0].state is State.CANCELLED else 0)


def _list(records: Records, args: argparse.Namespace) -> int:
    result, now_s = records.all(), time.time()
    if args.json:
        print(json.dumps([watching.as_json(item, now_s) for item in result], indent=2))
    else:
        print(watching.table(result, now_s) if result else f"no jobs in {records.path}\n", end="")
    return 0


def _status(records: Records, args: argparse.Namespace) -> int:
    (record,), now_s = _named(records, args), time.time()
    history = records.history(record.name)
    if args.json:
        events = [{"time_s": time_s, "text": text} for time_s, text in history]
        print(json.dumps({**watching.as_json(record, now_s), "history": events}, indent=2))
        return 0
    print(watching.table([record], now_s))
    for time_s, text in history:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time_s))}  {watching.printable(text)}")
    return 0


def _logs(records: Records, args: argparse.Namespace) -> int:
    (record,) = _named(records, args)
    backend, spec = record.spec()
    system = systems.connect(backend)
    try:
        mine = [item for item in system.resources() if item.job == spec.name]
        present = [item for item in mine if item.attempt.launch == record.attempt.launch]
        if not present:
            raise UserError(f"job {spec.name} has no resource at present: it is {record.state}")
        newest = max(present, key=lambda item: (item.attempt.number, item.created_s))
        for line in system.log(spec, newest):
            print(watching.printable(line))
    finally:
        system.close()
    return 0


def _cancel(records: Records, args: argparse.Namespace) -> int:
    for item in _named(records, args):
        if item.state.is_final:
            say(f"job {item.name} has ended already: {item.state}")
        else:
            records.cancel(item.name)
    return _until_over(records, args)


def _resume(records: Records, args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as locks:
        for name in args.name:
            if not locks.enter_context(records.lock(name)):
                raise UserError(f"job {name} is managed by another process: wait until it has ended")
        result = _named(records, args)
        for item in result:
            _check_resumes(item)
        for item in result:
            attempt = dataclasses.replace(item.attempt, failures=0)
            again = dataclasses.replace(item, attempt=attempt, outcome=None, reason="resumed", due_s=0.0, pauses=0)
            records.resume(dataclasses.replace(again, state=State.REPLACING))  # what is left of it is deleted first
            records.note(item.name, "resumed")
    return _until_over(records, args)


def _check_resumes(record: Record) -> None:
    """Raises UserError unless a job can be resumed."""
    if record.state is State.SUCCEEDED:
        raise UserError(f"job {record.name} has succeeded: launch it again with a larger TRAIN_STEPS to train on")
    if not record.state.is_final:
        raise UserError(f"job {record.name} is {record.state}: there is nothing to resume")
    _, spec = record.spec()
    if lifecycle.is_over_budget(spec, record.spent_s(time.time())):
        raise UserError(f"job {record.name} cannot be resumed: {lifecycle.over_budget(spec)}")


def _until_over(records: Records, args: argparse.Namespace) -> int:
    if args.detach:
        say("that is done by the manager that runs, or by the next capibara launch manage")
        return 0
    result = watching.manage(records, args.name, args, lambda value: all(item.state.is_final for item in value))
    return watching.exit_code([item for item in result if item.state is not State.CANCELLED])


def _manage(records: Records, args: argparse.Namespace) -> int:
    result = watching.manage(
        records, None, args, lambda value: not args.forever and all(item.state.is_final for item in value)
    )
    print(watching.table(result, time.time()) if result else "no jobs to manage\n", end="")
    return watching.exit_code(result)


def _named(records: Records, args: argparse.Namespace) -> list[Record]:
    return [item for name in args.name if (item := records.find(name)) is not None]


_ACTIONS = {
    "list": _list,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "resume": _resume,
    "manage": _manage,
}
