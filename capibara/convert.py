"""Looks after the checkpoints of a run: `python -m capibara.convert verify runs/mine`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from capibara import cli
from capibara.types import UserError

_DESCRIPTION = """Look after the checkpoints of a run folder.

  list    the steps that there are, with their size, date, score and where they come from
  verify  read every file of every step and compare it with the step's manifest
  prune   remove steps: --keep=N newest and --keep_every=N stay, and the last that is what was saved

examples:
  python -m capibara.convert list runs/mine
  python -m capibara.convert verify runs/mine --json=verdict.json
  python -m capibara.convert prune runs/mine --keep=1 --dry_run

exit codes: 0 done, all steps are what was saved; 1 some are not; 2 a mistake in what was given"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and does it; returns the exit code."""
    parser = cli.ArgumentParser("capibara convert", _DESCRIPTION)
    parser.add_argument("action", choices=("list", "verify", "prune"), metavar="list|verify|prune")
    parser.add_argument("run", metavar="RUN", help="the run folder, MODEL_DIR")
    parser.add_argument("--step", type=int, metavar="N", help="of list and verify: this one alone")
    parser.add_argument("--keep", type=int, metavar="N", help="of prune: newest steps that stay")
    parser.add_argument("--keep_every", type=int, metavar="N", help="of prune: multiples of it stay")
    parser.add_argument("--damaged", action="store_true", help="of prune: remove what was moved aside, too")
    parser.add_argument("--dry_run", action="store_true", help="of prune: say what would go, and remove nothing")
    parser.add_argument("--json", metavar="FILE", help="write what is printed there")
    args = cli.parse_arguments(parser, argv)
    _check(args)
    return convert(args)


def _check(args: argparse.Namespace) -> None:
    if not args.run:
        raise UserError(f"{args.action} has '' for RUN, must be a run folder: name one, e.g. runs/mine")
    if args.action == "prune" and args.keep is None:
        raise UserError("prune needs --keep, how many of the newest steps stay, e.g. --keep=1")
    for name in ("keep", "keep_every"):
        value = getattr(args, name)
        if value is not None and (args.action != "prune" or value < 1):
            raise UserError(f"--{name}={value} is of prune, and at least 1")
    if (args.damaged or args.dry_run) and args.action != "prune":
        raise UserError(f"--{'damaged' if args.damaged else 'dry_run'} is of prune, not of {args.action}: leave it out")
    if args.step is not None and args.action == "prune":
        raise UserError(f"--step={args.step} is of list and verify, not of prune: leave it out")


def convert(args: argparse.Namespace) -> int:
    """Does what was asked; returns the exit code."""
    from capibara import outputs
    from capibara.monitoring.status import StatusLine
    from capibara.training import inspection

    found = inspection.Inspection(args.run, args.step)
    if args.json is not None:
        outputs.check_writable(args.json)
    match args.action:
        case "list":
            table, code = found.listed(), 0
        case "verify":
            with StatusLine() as line:
                table = found.verified(lambda step: line.show("verifying", f"step {step}"))
            code = int(any(row["faults"] for row in table))
        case _:
            table = found.pruned(args.keep, args.keep_every, damaged=args.damaged, dry_run=args.dry_run)
            code = 0
    print("\n".join(inspection.lines(table)))
    if args.json is not None:
        outputs.save(args.json, json.dumps(table, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(cli.run_verb(main))
