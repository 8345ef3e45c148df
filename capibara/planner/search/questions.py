"""The flags of `plan` and their translation to the search's question."""

from __future__ import annotations

import argparse
import enum
import os
import pathlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from capibara.core.types import UserError
from capibara.planner.hardware import chips

_LARGEST = 1e18  # tokens, seconds, ...: larger numbers are typing errors
_MOST_ROWS = 10**9  # per step
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# Flags that must be numbers above 0, each with an example.
_EXAMPLES = {
    "length": "4096",
    "encoder_length": "512",
    "batch_size": "1024",
    "tokens": "2e11",
    "tokens_per_s": "1e6",
    "max_days": "14",
    "tries": "6",
    "deadline": "1800",
    "top": "8",
}

# Flags that do not apply to generation.
_OF_TRAINING = ("batch_size", "tokens", "usd_per_chip_hour", "state_dtypes", "html", "encoder_length")

if TYPE_CHECKING:
    from capibara.optim import StateDtype
    from capibara.planner.hardware.slices import Slice
    from capibara.planner.model.workload import Workload
    from capibara.planner.search.ranking import Question
    from capibara.sharding import Plan

GOALS = {
    "throughput": "most tokens per second on --slice, at --batch_size if it is set",
    "largest_batch": "most rows per step on --slice",
    "smallest_slice": "fewest chips (of --chips) on which the model can be trained",
    "cheapest": "lowest price per token, within --max_days for --tokens if they are set",
    "target_throughput": "fewest chips that reach --tokens_per_s",
}


class SliceGoal(enum.StrEnum):
    """The goals that choose a slice."""

    SMALLEST_SLICE = "smallest_slice"
    CHEAPEST = "cheapest"
    TARGET_THROUGHPUT = "target_throughput"


SLICE_GOALS = tuple(SliceGoal)


def count(text: str) -> float:
    """A number with an optional suffix: "2e11", "20B", "1.5T".

    Raises:
      argparse.ArgumentTypeError: it is none.
    """
    factor = _SUFFIXES.get(text[-1:].upper())
    try:
        return float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, such as 2e10, 20B or 1.5T") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `plan`. Imports nothing slow, so that --help is fast."""
    goals = "; ".join(f"{name}: {text}" for name, text in GOALS.items())
    add = parser.add_argument
    add("--slice", metavar="NAME", help="v5e-64, v6e-256, 2xv5e-256, ...; default: Plan.slice")
    add("--chips", metavar="A,B", help="chips to consider if the goal chooses a slice; default: v5e,v6e")
    add("--length", type=int, metavar="N", help="tokens of a row; default: Dataset.length, or 2048")
    add("--encoder_length", type=int, metavar="N", help="tokens of an encoder's row")
    add("--batch_size", type=int, metavar="N", help="rows per step; default: the run's, or the best")
    add("--goal", default="throughput", choices=tuple(GOALS), metavar="GOAL", help=goals)
    add("--tokens", type=count, metavar="N", help="total training tokens (2e11, 200B), for days, dollars and advice")
    add("--tokens_per_s", type=count, metavar="N", help="of all chips together, for target_throughput")
    add("--max_days", type=float, metavar="N", help="longest training time, for cheapest")
    add("--usd_per_chip_hour", type=float, metavar="X", help="replaces the list price")
    add("--headroom", type=float, default=0.06, metavar="X", help="share of the HBM to keep free")
    add(
        "--state_dtypes",
        metavar="A,B",
        help="dtypes of the optimizer's state to consider: float32,bfloat16,int8; default: the run's",
    )
    add("--axis", action="append", default=[], metavar="NAME=N", help="fix the size of a mesh axis")
    add("--serve", action="store_true", help="plan generation: mesh, slots of --length tokens, tokens per second")
    add("--verify", action="store_true", help="compile plans until the TPU compiler has proven one")
    add("--tries", type=int, metavar="N", help="most plans that --verify compiles; default: 6")
    add("--deadline", type=float, metavar="S", help="most seconds for each of them; default: 1800")
    add("--top", type=int, default=8, metavar="N", help="number of plans to show")
    add("--explain", action="store_true", help="print every term of the first plan's prediction")
    add("--json", metavar="FILE", help="also write the shown plans to this file")
    add("--html", metavar="FILE", help="write a page with memory, time, roofline and ranking")
    add("--output", metavar="FILE", help="write the first plan as a Gin file for train")
    add("--include", action="store_true", help="make --output self-contained: include --gin_file and --gin.X")


def check(args: argparse.Namespace) -> None:
    """Raises UserError for invalid flags or combinations."""
    if not args.gin_file:
        raise UserError("--gin_file has no value: name a model or a run file, e.g. --gin_file=models/capibara_8b.gin")
    for name in _EXAMPLES:
        value = getattr(args, name)
        if value is not None and not 0 < value <= _LARGEST:
            raise UserError(
                f"--{name}={value:g} must be above 0 and at most {_LARGEST:g}, e.g. --{name}={_EXAMPLES[name]}"
            )
    if args.usd_per_chip_hour is not None and not 0 <= args.usd_per_chip_hour <= _LARGEST:
        raise UserError(f"--usd_per_chip_hour is {args.usd_per_chip_hour:g}, must be at least 0, e.g. 2.7")
    if args.batch_size is not None and args.batch_size > _MOST_ROWS:
        raise UserError(f"--batch_size={args.batch_size} must be at most {_MOST_ROWS}: try --batch_size=1024")
    if args.tokens is not None and args.tokens < 1:
        raise UserError(f"--tokens={args.tokens:g} must be at least 1, e.g. --tokens=2e11")
    for name in args.chips.split(",") if args.chips is not None else ():
        chips.chip(name)
    if args.chips is not None and args.goal not in SLICE_GOALS:
        raise UserError(
            f"--chips={args.chips} is for goals that look for a slice ({', '.join(SLICE_GOALS)}), not for "
            f"{args.goal}: leave it out"
        )
    for name in ("tries", "deadline"):
        if getattr(args, name) is not None and not args.verify:
            raise UserError(f"--{name}={getattr(args, name):g} needs --verify: add that, or leave it out")
    args.chips, args.tries, args.deadline = args.chips or "v5e,v6e", args.tries or 6, args.deadline or 1800.0
    axes = [text.partition("=")[0] for text in args.axis]
    for axis in axes:
        if axes.count(axis) > 1:
            raise UserError(f"--axis={axis} is given {axes.count(axis)} times: give one size")
    if args.goal == "largest_batch" and args.batch_size is not None:
        raise UserError(f"--batch_size={args.batch_size} with --goal=largest_batch, which chooses it: leave one out")
    for name, goal in (("tokens_per_s", "target_throughput"), ("max_days", "cheapest")):
        if getattr(args, name) is not None and args.goal != goal:
            raise UserError(f"--{name} is for --goal={goal}, not for {args.goal}: leave one out")
    if args.goal == "target_throughput" and args.tokens_per_s is None:
        raise UserError("--goal=target_throughput needs --tokens_per_s, e.g. --tokens_per_s=1e6")
    flags = [f"--{name}" for name in _OF_TRAINING if getattr(args, name) is not None] + ["--axis"] * bool(args.axis)
    flags += [f"--goal={args.goal}"] * (args.goal != "throughput")
    flags += [f"--{name}" for name in ("explain", "include") if getattr(args, name)]
    if args.serve and flags:
        raise UserError(f"{flags[0]} is for training, and --serve plans generation: leave one out")
    if args.include and args.output is None:
        raise UserError("--include needs --output, the Gin file that it extends: add --output=FILE, or leave it out")
    if args.max_days is not None and args.tokens is None:
        raise UserError("--max_days needs --tokens, the length of the training, e.g. --tokens=1e12")
    if args.slice and args.goal in SLICE_GOALS:
        raise UserError(f"--slice={args.slice} with --goal={args.goal}, which chooses one: use --chips instead")


def slice_of(of_flag: Slice | None, plan: Plan) -> Slice:
    """The slice from --slice, or else from the Gin files.

    Raises:
      UserError: no slice is named, or the Gin files' does not exist.
    """
    from capibara.planner.hardware import slices

    bound = slices.parse(plan.slice) if plan.slice else None
    result = of_flag or bound
    if result is None:
        raise UserError("--slice has no value and Plan.slice is not bound: name a slice, e.g. --slice=v5e-64")
    return result


def question(args: argparse.Namespace, work: Workload, plan: Plan, batch_size: int | None) -> Question:
    """The search's question.

    Args:
      args: the flags.
      work: the workload.
      plan: the run's plan.
      batch_size: of the run; None: it is not set.
    """
    from capibara.planner.model import workload
    from capibara.planner.search import ranking
    from capibara.planner.search.ranking import Goal, Question

    workload.check_one_model(plan)
    largest = args.goal == "largest_batch"
    return Question(
        goal=Goal.LARGEST_BATCH if largest else Goal.THROUGHPUT,
        batch_size=None if largest else args.batch_size or batch_size,
        headroom=args.headroom,
        state_dtypes=tuple(work.state),
        fixed=tuple(ranking.parse_axis(text) for text in args.axis),
    )


def state_dtypes(args: argparse.Namespace) -> tuple[StateDtype, ...] | None:
    """The dtypes of --state_dtypes; None without it."""
    from capibara.core import fields
    from capibara.optim import StateDtype

    if args.state_dtypes is None:
        return None
    known = [str(dtype) for dtype in StateDtype]
    for name in args.state_dtypes.split(","):
        if name not in known:
            near = fields.nearest(name, known)
            hint = f": did you mean {near[0]}?" if near else ""
            raise UserError(f"--state_dtypes has {name!r}, must be of {', '.join(known)}{hint}")
    return tuple(StateDtype(name) for name in dict.fromkeys(args.state_dtypes.split(",")))


def included(args: argparse.Namespace) -> list[str]:
    """The Gin files that a self-contained plan includes; those of --gin_search_paths by their full path."""
    paths = (
        [os.path.abspath(os.path.join(folder, file)) for folder in args.gin_search_paths] for file in args.gin_file
    )
    return [next(filter(os.path.isfile, there), file) for there, file in zip(paths, args.gin_file)]


def notes(
    args: argparse.Namespace, plan: Plan, batch_size: int | None, read: Iterable[str | os.PathLike[str]] = ()
) -> list[str]:
    """Lines that tell the user how the search treated fields of Plan that are set.

    Args:
      args: the flags.
      plan: of the run.
      batch_size: of the run; None: it is not set.
      read: all Gin files that were read; if two describe a model, the later one's statements win.
    """
    from capibara.sharding import MESH_AXES, Plan

    names = (*MESH_AXES, "remat", "remat_names", "accumulation", "pipeline_microbatches", "pipeline_repeats")
    unset, lines = Plan(batch_size=plan.batch_size), []
    if anew := [f"Plan.{name}" for name in names if getattr(plan, name) != getattr(unset, name)]:
        lines.append(f"chosen by the search, ignoring the Gin files: {', '.join(anew)}; --axis=NAME=N fixes a size")
    if batch_size is not None and args.batch_size is None and args.goal != "largest_batch":
        lines.append(f"kept: Plan.batch_size = {batch_size}; override it by --batch_size or --goal=largest_batch")
    sizes = re.compile(r"^\w+Config\.num_layers\s*=", re.MULTILINE)
    models = [os.fspath(path) for path in read if sizes.search(pathlib.Path(path).read_text(encoding="utf-8"))]
    if len(models) > 1:
        lines.append(f"one model from several files, where later statements win: {', '.join(models)}")
    return lines
