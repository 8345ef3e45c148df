"""Finds mesh, batch size and remat for a model on a slice: `python -m capibara.plan --gin_file=F --slice=v5e-64`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core import allocator
from capibara.planner.search import questions

_DESCRIPTION = """Find mesh, batch size and rematerialisation for a model on a TPU slice, and predict their cost.

All figures are predictions, made in a second or two. --verify checks the first plan with the TPU compiler (about a
minute for each plan that it tries; needs libtpu, but no TPU).

examples:
  python -m capibara.plan --gin_file=models/capibara_8b.gin --slice=v5e-64 --length=4096 --batch_size=512
  python -m capibara.plan --gin_file=base_v5e64.gin --explain
  python -m capibara.plan --gin_file=models/capibara_1b.gin --slice=v5e-64 --verify --output=plan.gin
  python -m capibara.plan --gin_file=models/llama3_70b.gin --slice=v6e-16 --serve --length=8192
  python -m capibara.plan --gin_file=models/capibara_8b.gin --goal=cheapest --tokens=2e11 --max_days=14"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and prints the ranking; returns the exit code."""
    parser = flags.ArgumentParser("capibara plan", _DESCRIPTION)
    questions.add_arguments(parser)
    args = flags.parse_arguments(parser, argv)
    questions.check(args)
    return plan(args)


@allocator.without_collection()
def plan(args: argparse.Namespace) -> int:
    """Searches, verifies and reports; returns the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # computes only shapes
    from capibara import config
    from capibara.cli.composition import inspected_run, pretrained, serving_plan
    from capibara.models import api
    from capibara.monitoring.status import StatusLine
    from capibara.planner.compiler import proof, verify
    from capibara.planner.hardware import slices, topology
    from capibara.planner.model import workload
    from capibara.planner.report import explain, files, halves, report
    from capibara.planner.search import slice_choice, splits
    from capibara.storage import outputs

    of_flag = None if args.slice is None else slices.parse(args.slice)  # errors are raised before the model is built
    dtypes = questions.state_dtypes(args)
    configuration = proof.Configuration(
        args.gin_file, args.gin_bindings, args.gin_search_paths, args.length, args.encoder_length
    )
    read = pretrained.parse(configuration.gin_files, configuration.gin_bindings, configuration.gin_search_paths)
    written = [path for path in (args.json, args.html, args.output) if path is not None]
    outputs.check_writable(*written, inputs=read)
    run = inspected_run.run_of_gin(args.length, args.encoder_length)
    if args.serve:
        return serving_plan.plan(args, api.build(run.model), run.dataset.length, questions.slice_of(of_flag, run.plan))
    workload.check_ordinary(run)
    work = workload.of_run(run, dtypes)
    rows = run.plan.batch_size if config.is_bound("Plan.batch_size") else None
    question = questions.question(args, work, run.plan, rows)
    result, money = [], {"tokens": args.tokens, "usd": args.usd_per_chip_hour}
    if args.goal in questions.SLICE_GOALS:
        slice_choice.check_all_train(run, args.goal)
        with StatusLine() as line:
            result = slice_choice.offers(work, args, question, lambda name: line.show("searching", name))
        chosen = slice_choice.best(result, args)
        slice_, layout = chosen.slice_, splits.Layout(chosen.slice_, chosen.ranked)
    else:
        slice_ = questions.slice_of(of_flag, run.plan)
        layout = splits.search(run, slice_, work, question)
    walk, part = verify.unproven(layout.ranked, question), layout.part
    if args.verify:
        topology.check(slice_.name)
        with StatusLine() as line:
            child = configuration.bound(layout.bindings)
            prove = proof.prover(layout.divided(run), child, work, slice_, deadline_s=args.deadline, status=line.show)
            walk = verify.walk(work, part, question, prove, most=args.tries)
        layout = layout.ranked_again(walk.ranked)
    files.save(args, walk, work, layout, result, **money)
    if result:
        report.show_offers(result, chosen, **money)
    report.show(walk, work, part, top=args.top, **money)
    print("".join(f"{line}\n" for line in halves.lines(layout)), end="")
    print("".join(f"note: {line}\n" for line in questions.notes(args, run.plan, rows, read)), end="")
    if args.explain:
        print("\n".join(explain.lines(walk.ranked[0], work, part)))
    return 0
