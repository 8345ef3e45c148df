"""Finds the jobs of a system by their labels: `python -m capibara.launch recover gke --storage=gs://bucket`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from capibara.cli.arguments import jobs
from capibara.cli.launching.job import storage_of
from capibara.cli.launching.local import Parser
from capibara.cli.launching.watching import Opened, say
from capibara.core.types import UserError
from capibara.jobs import backends, systems
from capibara.jobs.managing import recovery

_DESCRIPTION = """Find the jobs of a system by the labels of their resources, where the database is lost.

Then `capibara launch manage` manages them. Stop other managers of these jobs first.

example:
  python -m capibara.launch recover gce --storage=gs://bucket --project=my-project --zone=us-west4-a"""


def main(argv: Sequence[str]) -> int:
    """Parses the command line and adds the jobs to the database; returns the exit code."""
    where = argv[1] if len(argv) > 1 else "--help"
    if where not in backends.NAMES and where not in ("-h", "--help"):
        raise UserError(f"launch recover cannot look on {where!r}: name one of {', '.join(sorted(backends.NAMES))}")
    kind = backends.find(where if where in backends.NAMES else "gke")
    parser = Parser(
        f"capibara launch recover {kind.name}",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("where", choices=sorted(backends.NAMES), help="the system")
    parser.add_argument("--storage", required=True, metavar="URL", help="of the jobs, as when they were launched")
    jobs.add_state(parser)
    jobs.add_place(parser, kind)
    args = parser.parse_args(list(argv[1:]))
    from capibara import config

    config.parse(args.place, (), ())
    backend = config.build(kind, **jobs.values_of(args, kind))
    config.check_used()
    system = systems.connect(backend)
    with Opened(args) as records:
        try:
            added = recovery.recover(records, backend, system, storage_of(args.storage), say)
        finally:
            system.close()
        for path in records.recovered():
            say(f"{path.name} is what {path.parent} had before; jobs of other systems are found by launch recover, too")
    for item in added:
        print(f"job {item.name}: attempt {item.attempt.number + 1}")
    print(f"found {len(added)} jobs: capibara launch manage manages them" if added else "found no jobs")
    return 0
