"""What the verb `plan` can be asked: its flags, and what they mean to the search."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from capibara.types import UserError

if TYPE_CHECKING:
    from capibara.planner.search import Question
    from capibara.planner.workload import Workload

OBJECTIVES = {
    "throughput": "most tokens a second on --slice, at --batch_size where there is one",
    "largest_batch": "most rows of a step on --slice",
    "smallest_slice": "fewest chips (of --chips) on which the model can be trained",
    "cheapest": "fewest dollars for --tokens, within --max_days where it is given",
    "target_throughput": "fewest chips that make --tokens_per_s",
}
SLICE_OBJECTIVES = ("smallest_slice", "cheapest", "target_throughput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `plan`. Nothing heavy is imported: --help must be quick."""
    goals = "; ".join(f"{name}: {text}" for name, text in OBJECTIVES.items())
    add = parser.add_argument
    add("--slice", metavar="NAME", help="v5e-64, v6e-256, 2xv5e-256, ...; default: Plan.slice")
    add("--chips", default="v5e,v6e", metavar="A,B", help="whose slices to weigh where the objective is about slices")
    add("--length", type=int, metavar="N", help="places of a row; default: Dataset.length, or 2048")
    add("--encoder_length", type=int, metavar="N", help="the same of an encoder's rows")
    add("--batch_size", type=int, metavar="N", help="rows of a step; default: the run's, or the best")
    add("--objective", default="throughput", choices=tuple(OBJECTIVES), metavar="GOAL", help=goals)
    add("--tokens", type=float, metavar="N", help="of the whole training, for days, dollars and advice")
    add("--tokens_per_s", type=float, metavar="N", help="of all chips, for target_throughput")
    add("--max_days", type=float, metavar="N", help="longest training, for cheapest")
    add("--usd_per_chip_hour", type=float, metavar="X", help="in place of the list price")
    add("--headroom", type=float, default=0.06, metavar="X", help="share of the HBM to keep free")
    add("--axis", action="append", default=[], metavar="NAME=N", help="a mesh axis of that size")
    add("--verify", action="store_true", help="compile plans until one is proven by the TPU compiler")
    add("--tries", type=int, default=6, metavar="N", help="plans to compile at most")
    add("--deadline", type=float, default=1800, metavar="S", help="seconds for each of them")
    add("--top", type=int, default=8, metavar="N", help="plans to show")
    add("--explain", action="store_true", help="print every term of the first plan's prediction")
    add("--json", metavar="FILE", help="write the shown plans there")
    add("--html", metavar="FILE", help="write a page with memory, time, roofline and ranking there")
    add("--output", metavar="FILE", help="write the first plan there, as a Gin file for train")
    add("--include", action="store_true", help="let --output include the --gin_file, so that it stands alone")


def check(args: argparse.Namespace) -> None:
    """Raises UserError for flags that make no sense, or none together."""
    if not args.gin_file:
        raise UserError("--gin_file has no value: name a model or a run file, e.g. --gin_file=models/capibara_8b.gin")
    for name in ("length", "encoder_length", "batch_size", "tokens", "tokens_per_s", "max_days", "tries", "deadline", "top"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} is {value:g}, must be above 0")
    if args.usd_per_chip_hour is not None and not args.usd_per_chip_hour >= 0:
        raise UserError(f"--usd_per_chip_hour is {args.usd_per_chip_hour:g}, must be at least 0")
    if args.objective == "target_throughput" and args.tokens_per_s is None:
        raise UserError("--objective=target_throughput needs --tokens_per_s, e.g. --tokens_per_s=1e6")
    if args.max_days is not None and args.tokens is None:
        raise UserError("--max_days needs --tokens, the length of the training, e.g. --tokens=1e12")
    if args.slice and args.objective in SLICE_OBJECTIVES:
        raise UserError(f"--slice={args.slice} with --objective={args.objective}, which looks for one: give --chips instead")


def question(args: argparse.Namespace, work: Workload, batch_size: int | None) -> Question:
    """The search's question.

    Args:
      args: the flags.
      work: what is trained.
      batch_size: of the run; None: it has none.
    """
    from capibara.planner import search
    from capibara.planner.search import Objective, Question

    largest = args.objective == "largest_batch"
    return Question(
        objective=Objective.LARGEST_BATCH if largest else Objective.THROUGHPUT,
        batch_size=None if largest else args.batch_size or batch_size,
        headroom=args.headroom,
        state_dtypes=tuple(work.state),
        fixed=tuple(search.parse_axis(text) for text in args.axis),
    )
