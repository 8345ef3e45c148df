"""Compiles a run's train step for a TPU slice: `python -m capibara.prove --gin_file=base_v5e64.gin`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import UserError

_DESCRIPTION = """Compile a run's train step, as its Gin file describes it, with the TPU compiler. Needs no TPU.

Reports whether it fits a chip's HBM, and how much it needs. Needs libtpu (the extra tpu). Caches results in
~/.cache/capibara/verdicts.

examples:
  python -m capibara.prove --gin_file=base_v5e64.gin
  python -m capibara.prove --gin_file=models/llama2_7b.gin --slice=v5e-64 --gin.Plan.batch_size=256 --gin.Plan.remat="'full'"

exit codes: 0 it fits, 1 it does not fit, 2 invalid input"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and compiles; returns the exit code."""
    parser = flags.ArgumentParser("capibara prove", _DESCRIPTION)
    parser.add_argument("--slice", metavar="NAME", help="v5e-64, v6e-256, 2xv5e-256, ...; default: Plan.slice")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a row; default: Dataset.length, or 2048")
    parser.add_argument("--encoder_length", type=int, metavar="N", help="tokens of an encoder's row")
    parser.add_argument("--deadline", type=float, default=1800, metavar="S", help="most seconds to compile")
    parser.add_argument("--fresh", action="store_true", help="compile even if the result is cached")
    parser.add_argument("--json", metavar="FILE", help="also write the result to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_arguments(parser, argv)
    if not (args.gin_file or args.child):
        raise UserError("--gin_file has no value: name a run or a model file, e.g. --gin_file=base_v5e64.gin")
    return prove(args)


def prove(args: argparse.Namespace) -> int:
    """Compiles, in this process or a child; returns the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from capibara import sharding
    from capibara.cli.composition import inspected_run, pretrained
    from capibara.config import written
    from capibara.models import api
    from capibara.monitoring.status import StatusLine
    from capibara.planner.compiler import compile_cache, proof
    from capibara.planner.hardware import slices, topology
    from capibara.planner.report import halves, report
    from capibara.planner.search import automatic, splits
    from capibara.storage import outputs

    of_flag = None if args.slice is None else slices.parse(args.slice)
    read = pretrained.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    if args.json is not None:
        outputs.check_writable(args.json, inputs=read)
    run = inspected_run.run_of_gin(args.length, args.encoder_length)
    slice_ = of_flag or (slices.parse(run.plan.slice) if run.plan.slice else None)
    if slice_ is None:
        raise UserError("--slice has no value and Plan.slice is not bound: name a slice, e.g. --slice=v5e-64")
    planned, title = automatic.planned(run, slice_)
    if title:  # as in `train`; the child that compiles is told by flags
        args.gin_bindings = [*args.gin_bindings, *(item.line for item in written.differences(run, planned))]
        run = planned
        print(title)
    part = splits.training_part(run, slice_)
    run.plan.mesh_shape(part.devices, slice_.name if part == slice_ else f"{slice_.name} without rollout_devices")
    if args.child:
        from capibara.training.setup import lower_step

        compile_cache.announce("lowering")
        mesh = sharding.make_mesh(run.plan, topology.slice_devices(slice_.name)[: part.devices])
        with proof.without_locations():
            lowered = lower_step(run, api.build(run.model), mesh)
        proof.answer(lowered, slice_, mesh, proof.flags(run, slice_))
        return 0
    topology.check(slice_.name)
    configuration = proof.Configuration(
        args.gin_file, args.gin_bindings, args.gin_search_paths, args.length, args.encoder_length
    )
    with StatusLine() as line:
        result = proof.prove(
            run, configuration, slice_, deadline_s=args.deadline, fresh=args.fresh,
            status=lambda elapsed_s, phase: line.show(f"{slice_.name}: {phase}", f"{elapsed_s:.0f} s"),
        )  # fmt: skip
    if args.json is not None:
        outputs.save(args.json, json.dumps(report.verdict_json(result), indent=1))
    if result.compiled is None:
        raise UserError(result.message)
    print("\n".join([*report.verdict_lines(result, slice_), *halves.engine_lines(run)]))
    return 0 if result.compiled.fits else 1
