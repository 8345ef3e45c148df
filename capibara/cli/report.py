"""Writes one HTML file on runs, to be mailed: `python -m capibara.report runs/mine --output=report.html`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.cli.arguments import flags
from capibara.core.types import UserError

if TYPE_CHECKING:
    from capibara.monitoring.report.facts import RunFacts
    from capibara.monitoring.report.page import Price

_INPUTS = ("metrics.jsonl", "config.gin", "manifest.json")  # of a run folder: an output must not replace them
_DESCRIPTION = """Write a report on runs: curves, evaluations, where the time went, cost, configuration, samples and data.

It is one HTML file without scripts, which can be mailed. Several runs are compared.

examples:
  python -m capibara.report runs/mine
  python -m capibara.report runs/one runs/two gs://bucket/three --output=compared.html --usd=1.2"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and writes the report; returns the exit code."""
    parser = flags.ArgumentParser("capibara report", _DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, also in gs:// or s3://")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="where to write (default: report.html)")
    parser.add_argument("--title", help="its heading (default: the names of the runs)")
    parser.add_argument(
        "--usd", type=float, help="price of a device-hour in US dollars (default: the list price of the chip)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = flags.parse_arguments(parser, argv)
    if args.usd is not None and not 0 <= args.usd < float("inf"):
        raise UserError(f"--usd ({args.usd}) must be finite and at least 0: try 1.2")

    from capibara.monitoring.report import facts, page
    from capibara.monitoring.status import StatusLine
    from capibara.storage import outputs

    inputs = [os.path.join(folder, name) for folder in args.runs for name in _INPUTS]
    outputs.check_writable(args.output, inputs=inputs)
    with StatusLine() as status:
        runs = []
        for folder in args.runs:
            status.show("reading", folder)
            runs.append(facts.read(folder))
        runs = facts.distinct(runs)

        def price_of(run: RunFacts) -> Price | None:
            return _price(run, args.usd)

        text = page.page(runs, price_of, args.title)
    outputs.save(args.output, text)
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}", file=sys.stderr)
    if args.json:
        print(json.dumps(page.as_json(runs, price_of), indent=1))
    else:
        print(f"{args.output}: {len(runs)} run{'s' * (len(runs) != 1)}, {len(text.encode()):,} bytes")
    return 0


def _price(run: RunFacts, usd: float | None) -> Price | None:
    """The price of a run's devices: that of the flag, or the list price of its chip."""
    from capibara.monitoring.report.page import Price
    from capibara.planner.hardware import chips

    if usd is not None:
        return Price(usd, f"at {usd:g} US dollars a device-hour (--usd)")
    chip = chips.find(str(run.about.get("device_kind")))
    if chip is None or chip.price is None:
        return None
    return Price(
        chip.price.usd / chip.devices,
        f"at the list price of {chip.name}, {chip.price.usd:g} US dollars a chip-hour ({chip.price.describe()})",
    )
