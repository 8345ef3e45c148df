"""Prints where a checkpoint or a data set comes from: `python -m capibara.prepare lineage PATH`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from capibara.cli.arguments import flags

_DESCRIPTION = """Print the chain from a checkpoint back to its source files, with hashes, and what has changed since.

PATH is a run folder (its newest checkpoint), a step in its checkpoints, a folder that prepare wrote, or a file.
The files of checkpoints are compared by size: `capibara convert verify RUN` compares their hashes.

examples:
  python -m capibara.prepare lineage runs/chats
  python -m capibara.prepare lineage runs/chats/checkpoints/1000 --json
  python -m capibara.prepare lineage data/playbooks --check=sizes

exit codes: 0 everything is unchanged; 1 something has changed or is missing; 2 invalid input"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the word; returns the exit code."""
    parser = flags.ArgumentParser(prog="python -m capibara.prepare lineage", description=_DESCRIPTION)
    parser.add_argument("path", metavar="PATH", help="run folder, checkpoint step, output folder or file")
    parser.add_argument("--json", action="store_true", help="print the chain as one JSON object")
    parser.add_argument(
        "--check",
        choices=["hashes", "sizes"],
        default="hashes",
        help="compare files with what was recorded by their hashes, or only by their sizes, which is quick",
    )
    args = flags.parse_arguments(parser, argv)

    from capibara.builders.lineage.chain import Chain
    from capibara.builders.lineage.nodes import Check
    from capibara.monitoring.status import StatusLine

    with StatusLine() as status:
        chain = Chain(Check(args.check), lambda path: status.show("hashing", path)).of(args.path)
    print(json.dumps(chain.as_json(), indent=1) if args.json else chain.text())
    return int(not chain.is_unchanged)
