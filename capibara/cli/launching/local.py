"""Runs a verb on this machine and restarts it if it dies: `python -m capibara.launch local --restarts=5 -- train --gin_file=F`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

from capibara.core.types import UserError

_DESCRIPTION = """Run a verb on this machine until it succeeds: restart it after a crash, a hang or a kill.

examples:
  python -m capibara.launch local --restarts=5 -- train --gin_file=quickstart.gin --emulate=8
  python -m capibara.launch local --processes=2 -- train --gin_file=quickstart.gin --emulate=4
  python -m capibara.launch local quickstart.gin --emulate=8

RUN.gin stands for -- train --gin_file=RUN.gin; flags that launch does not have are train's.

A run resumes from its last verified checkpoint. A stopped process (SIGSTOP) is continued after 3 s; if it stops again,
all processes are restarted. They end with their launcher, however that ends.

exit codes: those of the verb; 128 + N if signal N stopped it"""

_MOST_PROCESSES = 1024


def main(argv: Sequence[str]) -> int:
    """Parses the command line and runs the verb; returns the exit code."""
    options, verb = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = Parser(
        "capibara launch local", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", choices=("local",), metavar="local")
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="most restarts; default: 3")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of the verb; default: 1")
    parser.add_argument(
        "--grace", type=float, default=300.0, metavar="S", help="seconds to save and exit after SIGTERM"
    )
    parser.add_argument(
        "--crash_grace",
        type=float,
        default=3.0,
        metavar="S",
        help="seconds to exit after another process crashed",
    )
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print the commands; start nothing")
    parser.add_argument("run", nargs="*", metavar="RUN.gin", help="Gin files of a run that is to be trained")
    args, more = parser.parse_known_args(list(options))
    files = _files(more)
    args.run, more = [*args.run, *files], [item for item in more if item not in files]
    if verb and (args.run or more):
        raise UserError(f"{(args.run or more)[0]} stands before --, but the verb's arguments follow it: move it")
    if args.run:
        verb = ["train", *(f"--gin_file={file}" for file in args.run), *more]
    elif more:
        raise UserError(f"unrecognized arguments: {' '.join(more)} (see --help)")
    check_verb(verb)
    _check(args)
    from capibara.jobs.local import Supervisor

    command = [sys.executable, "-m", f"capibara.{verb[0]}", *verb[1:]]
    supervisor = Supervisor(
        command=command,
        processes=args.processes,
        restarts=args.restarts,
        grace_s=args.grace,
        crash_grace_s=args.crash_grace,
    )
    if args.dry_run:
        print(supervisor.script(), end="")
        return 0
    return supervisor.run()


def _files(arguments: Sequence[str]) -> list[str]:
    """Gin files that follow flags, and are not the value of one."""
    before = ["", *arguments]
    return [
        item
        for flag, item in zip(before, arguments)
        if item.endswith(".gin") and not item.startswith("-") and (not flag.startswith("-") or "=" in flag)
    ]


def check_verb(verb: Sequence[str]) -> None:
    """Raises UserError unless this is a verb with its arguments."""
    from capibara.__main__ import VERBS
    from capibara.core.fields import did_you_mean

    if not verb:
        raise UserError(
            "launch needs a Gin file, or a verb after --: capibara launch local -- train --gin_file=quickstart.gin"
        )
    if verb[0] not in VERBS or verb[0] == "launch":
        raise UserError(f"unknown verb {verb[0]!r} after --{did_you_mean(verb[0], VERBS, 'verbs')}")


def _check(args: argparse.Namespace) -> None:
    if (
        args.restarts < 0
        or not 1 <= args.processes <= _MOST_PROCESSES
        or not (0 <= args.grace < math.inf and 0 <= args.crash_grace < math.inf)
    ):
        raise UserError(
            f"--restarts ({args.restarts}) and --grace ({args.grace:g}) must be at least 0, as must --crash_grace "
            f"({args.crash_grace:g}), --processes ({args.processes}) from 1 to {_MOST_PROCESSES}"
        )


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes raised as UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")
