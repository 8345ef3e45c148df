"""Sends a run's metrics to trackers, during the run or after it: `python -m capibara.track RUN --to=wandb`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import TryAgain, UserError

_LONGEST_S = 30 * 24 * 3600
_DESCRIPTION = """Send a run's metrics, samples and pictures to trackers: what they have not got yet.

  RUN    a run folder; its trackers/NAME.json say how far each tracker is
  --to   wandb, comet, mlflow, print, or the class of another tracker (--to=JsonlTracker); repeatable.
         Without it: the trackers of the run

examples:
  python -m capibara.track runs/mine --to=wandb --gin.WandbTracker.project=mine
  python -m capibara.track runs/mine --to=mlflow --gin.MlflowTracker.uri=http://localhost:5000

Options of a tracker that the run recorded hold, but for addresses of servers and files: a run folder may come from
anyone. Give these as --gin.CLASS.NAME=VALUE, in a --gin_file, or --trust_config. docs/trackers.md describes the trackers.

exit codes: 0 everything is sent; 2 invalid input; 75 a tracker does not take it: try again"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and sends; returns the exit code."""
    parser = flags.ArgumentParser("capibara track", _DESCRIPTION)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run folder")
    parser.add_argument("--to", action="append", default=[], metavar="NAME", help="a tracker; repeatable")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="give up after so many seconds; default: 600"
    )
    flags.add_trust(parser)
    args = flags.parse_arguments(parser, argv)
    if args.run is None:
        raise UserError("track needs a run folder: capibara track runs/mine --to=wandb")
    if not 0 < args.timeout <= _LONGEST_S:
        raise UserError(f"--timeout={args.timeout:g} must be above 0 and at most {_LONGEST_S} seconds: try 600")
    return _track(args)


def _track(args: flags.Arguments) -> int:
    from capibara.cli.composition import recorded_trackers
    from capibara.monitoring.trackers import state
    from capibara.monitoring.trackers.feeds import Feeds
    from capibara.storage import stores

    folder = stores.of(args.run).absolute(args.run)
    trackers = recorded_trackers.read(
        folder, args.gin_file, args.gin_bindings, args.gin_search_paths, to=args.to, trust=args.trust_config
    )
    with state.locked(folder, within_s=2.0):
        feeds = Feeds(trackers, folder, lambda line: print(line, flush=True))
        feeds.start()
        feeds.end()
        feeds.wait(args.timeout)
        unsent = feeds.unsent()
    if unsent:
        missing = ", ".join(f"{label} has not got {count} line{'s' * (count != 1)}" for label, count in unsent.items())
        raise TryAgain(f"{missing} of {folder}: run this again")
    print(f"sent to {', '.join(feeds.labels)}")
    return 0
