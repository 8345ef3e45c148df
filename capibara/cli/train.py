"""Trains a model from a Gin file: `python -m capibara.train --gin_file=quickstart.gin --emulate=8`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.arguments import flags, multihost
from capibara.cli.composition import training_run
from capibara.core.types import UserError

_DESCRIPTION = """Train a model as a Gin file describes; run it again to resume from the last checkpoint.

examples:
  python -m capibara.train --gin_file=quickstart.gin --emulate=8
  python -m capibara.train --gin_file=base_v5e64.gin --emulate=8 --gin.TRAIN_STEPS=3
  python -m capibara.train --gin_file=my_run.gin --gin.MODEL_DIR=runs/mine --gin.TRAIN_STEPS=20000
  python -m capibara.train --gin_file=my_run.gin --profile=100:102
  python -m capibara.train --gin_file=my_run.gin --check --explain

exit codes: 0 finished, 1 a crash, corruption or silent corruption, 2 invalid input, 75 hung, or to be run again,
130 / 143 stopped by ctrl-C / SIGTERM after a checkpoint"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and trains; returns the exit code."""
    parser = flags.ArgumentParser("capibara train", _DESCRIPTION)
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    parser.add_argument("--start_over", action="store_true", help="rename MODEL_DIR if it exists, and start a new run")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check what the run is given, and say so: nothing is compiled or written",
    )
    parser.add_argument("--explain", action="store_true", help="say where each value comes from that is no default")
    parser.add_argument(
        "--profile", metavar="START:STOP", help="trace these steps into MODEL_DIR/profile, and print a summary"
    )
    multihost.add_arguments(parser)
    args = flags.parse_arguments(parser, argv)
    if not args.gin_file:
        raise UserError("--gin_file has no value: name a run file, e.g. --gin_file=quickstart.gin")
    if args.profile is not None:
        args.gin_bindings.extend(_profiled(args.profile))
    outcome = training_run.train_gin(
        args.gin_file,
        args.gin_bindings,
        args.gin_search_paths,
        args.emulate,
        start_over=args.start_over,
        joined=multihost.of(args),
        check=args.check,
        explain=args.explain,
    )
    return 128 + outcome.signal_number if outcome.signal_number else 0


def _profiled(steps: str) -> list[str]:
    """The bindings of --profile."""
    start, colon, stop = steps.partition(":")
    if not colon or not all(step.strip().isdecimal() and len(step) < 16 for step in (start, stop)):
        raise UserError(f"--profile ({steps[:40]!r}) must be START:STOP, two steps: try --profile=100:102")
    return ["Trainer.profile = @Profile()", f"Profile.start = {int(start)}", f"Profile.stop = {int(stop)}"]
