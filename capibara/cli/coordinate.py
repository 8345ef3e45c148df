"""Coordinates a group of runs that train apart: `python -m capibara.coordinate --gin_file=runs/coordinate.gin`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import UserError

_DESCRIPTION = """Make one model of those that a group of runs sends, round by round. Each run is a job of its own
(runs/group_node.gin); they and this program meet in a folder on a shared disk or in a bucket. It needs no accelerator, and
run again it resumes.

example:
  python -m capibara.coordinate --gin_file=runs/coordinate.gin --gin.EXCHANGE=gs://bucket/group --gin.NODES=4 \\
    --gin.ROUNDS=20

exit codes: 0 finished; 2 invalid input, or too many rounds failed; 130 / 143 stopped by ctrl-C / SIGTERM.
docs/consensus.md says what a round does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and coordinates; returns the exit code."""
    parser = flags.ArgumentParser("capibara coordinate", _DESCRIPTION)
    args = flags.parse_arguments(parser, argv)
    if not args.gin_file:
        raise UserError("--gin_file has no value: name a file, e.g. --gin_file=runs/coordinate.gin")
    import jax

    from capibara import config
    from capibara.core.interrupt import Interrupted, StopRequest
    from capibara.monitoring.status import StatusLine
    from capibara.strategies.group.coordinator import Coordinator

    jax.config.update("jax_platforms", "cpu")
    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    coordinator = config.build(Coordinator)
    print(*(f"note: {line}\n" for line in config.check_used()), sep="", end="")
    with StopRequest() as stop, StatusLine() as bar:
        try:
            line = coordinator.run(lambda text: print(text, flush=True), lambda: stop.check(0), bar.show)
        except Interrupted:
            print("interrupted: run the command again to resume", flush=True)
            return 128 + (stop.signal_number or 0)
    print(line)
    return 0
