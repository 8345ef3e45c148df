"""Finds mesh, batch and recomputation for a model on a slice: `python -m capibara.plan --gin_file=F --slice=v5e-64`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from capibara import cli
from capibara.types import UserError

_DESCRIPTION = """Find mesh, batch size and recomputation for a model on a TPU slice, and what it would take.

Everything printed is predicted: nothing is run, and no TPU is needed.

examples:
  python -m capibara.plan --gin_file=models/capibara_8b.gin --slice=v5e-64 --length=4096 --batch_size=512
  python -m capibara.plan --gin_file=base_v5e64.gin --explain
  python -m capibara.plan --gin_file=models/mixtral_8x7b.gin --slice=v6e-256 --tokens=1e12 --output=plan.gin"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and prints the ranking; returns the exit code."""
    parser = cli.ArgumentParser("capibara plan", _DESCRIPTION)
    parser.add_argument("--slice", metavar="NAME", help="v5e-64, v6e-256, 2xv5e-256, ...; default: Plan.slice")
    parser.add_argument("--length", type=int, metavar="N", help="places of a row; default: Dataset.length, or 2048")
    parser.add_argument("--encoder_length", type=int, metavar="N", help="the same of an encoder's rows")
    parser.add_argument("--batch_size", type=int, metavar="N", help="rows of a step; default: the run's, or the best")
    parser.add_argument("--objective", default="throughput", choices=("throughput", "largest_batch"))
    parser.add_argument("--headroom", type=float, default=0.06, metavar="X", help="share of the HBM to keep free")
    parser.add_argument("--axis", action="append", default=[], metavar="NAME=N", help="a mesh axis of that size")
    parser.add_argument("--tokens", type=float, metavar="N", help="of the whole training, for days and dollars")
    parser.add_argument("--usd_per_chip_hour", type=float, metavar="X", help="in place of the list price")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="plans to show")
    parser.add_argument("--explain", action="store_true", help="print every term of the first plan's prediction")
    parser.add_argument("--json", metavar="FILE", help="write the shown plans there")
    parser.add_argument("--html", metavar="FILE", help="write a page with memory, time, roofline and ranking there")
    parser.add_argument("--output", metavar="FILE", help="write the first plan there, as a Gin file for train")
    args = cli.parse_arguments(parser, argv)
    if not args.gin_file:
        raise UserError("--gin_file has no value: name a model or a run file, e.g. --gin_file=models/capibara_8b.gin")
    return plan(args)


def plan(args: argparse.Namespace) -> int:
    """Searches and reports; returns the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes are all that is computed
    from capibara import config
    from capibara.planner import page, report, search, slices
    from capibara.planner.search import Objective, Question

    asked = slices.parse(args.slice) if args.slice else None  # mistakes show before the model is looked at
    fixed = tuple(search.parse_axis(text) for text in args.axis)
    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    work, batch_size, slice_name = _workload(args)
    if not (asked or slice_name):
        raise UserError("--slice has no value and Plan.slice is not bound: name a slice, e.g. --slice=v5e-64")
    slice_ = asked or slices.parse(slice_name)
    question = Question(
        objective=Objective(args.objective),
        batch_size=None if args.objective == Objective.LARGEST_BATCH else args.batch_size or batch_size,
        headroom=args.headroom,
        state_dtypes=tuple(work.state),
        fixed=fixed,
    )
    ranked = search.search(work, slice_, question)
    if not ranked[0].fits:
        raise UserError(search.too_big(ranked[0], work, slice_, question))
    if args.json:
        shown = [report.as_json(one, work, slice_, args.tokens, args.usd_per_chip_hour) for one in ranked[: args.top]]
        report.save(args.json, json.dumps({"plans": shown}, indent=1))
    if args.output:
        report.save(args.output, report.gin(ranked[0], work, slice_))
    if args.html:
        report.save(args.html, page.page(ranked, work, slice_))
    report.show(ranked, work, slice_, top=args.top, tokens=args.tokens, usd=args.usd_per_chip_hour)
    if args.explain:
        print("\n".join(report.explain(ranked[0], work, slice_)))
    return 0


def _workload(args: argparse.Namespace) -> tuple[Any, int | None, str | None]:
    """The workload of the Gin files, the run's batch size and its slice; of a model alone neither."""
    from capibara import config
    from capibara.planner import workload

    lengths = {"length": args.length, "encoder_length": args.encoder_length}
    if not config.is_bound("Trainer.model"):
        return workload.of_bound_model(**lengths), None, None
    from capibara.training.trainer import Trainer

    trainer = config.build(Trainer, model_dir="unused")
    return workload.of_run(trainer, **lengths), trainer.plan.batch_size, trainer.plan.slice


if __name__ == "__main__":
    sys.exit(cli.run_verb(main))
