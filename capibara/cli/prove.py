"""Compiles a run's train step for a TPU slice that is not there: `python -m capibara.prove --gin_file=base_v5e64.gin`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from capibara.cli import flags
from capibara.core.types import UserError

_DESCRIPTION = """Compile the train step of a run, as its Gin file says, with the TPU compiler: no TPU is needed.

Says whether it fits a chip's HBM, and what it takes. Needs libtpu (pip install capibara[tpu]). Verdicts are kept in
~/.cache/capibara/verdicts.

examples:
  python -m capibara.prove --gin_file=base_v5e64.gin
  python -m capibara.prove --gin_file=models/llama2_7b.gin --slice=v5e-64 --gin.Plan.batch_size=256 --gin.Plan.remat="'full'"

exit codes: 0 it fits, 1 it does not, 2 a mistake in what was given"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and compiles; returns the exit code."""
    parser = flags.ArgumentParser("capibara prove", _DESCRIPTION)
    parser.add_argument("--slice", metavar="NAME", help="v5e-64, v6e-256, 2xv5e-256, ...; default: Plan.slice")
    parser.add_argument("--length", type=int, metavar="N", help="places of a row; default: Dataset.length, or 2048")
    parser.add_argument("--encoder_length", type=int, metavar="N", help="the same of an encoder's rows")
    parser.add_argument("--deadline", type=float, default=1800, metavar="S", help="seconds after which to stop")
    parser.add_argument("--fresh", action="store_true", help="compile again even where the verdict is known")
    parser.add_argument("--json", metavar="FILE", help="write the verdict there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_arguments(parser, argv)
    if not args.gin_file:
        raise UserError("--gin_file has no value: name a run or a model file, e.g. --gin_file=base_v5e64.gin")
    return prove(args)


def prove(args: argparse.Namespace) -> int:
    """Compiles, or asks a child to; returns the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from capibara import config
    from capibara.monitoring.status import StatusLine
    from capibara.planner.compiler import proof
    from capibara.planner.hardware import slices, topology
    from capibara.planner.report import report
    from capibara.planner.search import automatic
    from capibara.storage import outputs
    from capibara.training import trainer

    asked = slices.parse(args.slice) if args.slice is not None else None
    read = config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    if args.json is not None:
        outputs.check_writable(args.json, inputs=read)
    run = trainer.of_gin(args.length, args.encoder_length)
    if not (asked or run.plan.slice):
        raise UserError("--slice has no value and Plan.slice is not bound: name a slice, e.g. --slice=v5e-64")
    slice_ = asked or slices.parse(run.plan.slice)
    chosen, line = automatic.bindings(run, slice_)
    if chosen:  # as `train` does
        args.gin_bindings = [*args.gin_bindings, *chosen]
        config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
        run = trainer.of_gin(args.length, args.encoder_length)
        print(line)
    run.plan.mesh_shape(slice_.devices, slice_.name)
    if args.child:
        return _compile(run, slice_)
    topology.check(slice_.name)
    given = proof.Configuration(
        args.gin_file, args.gin_bindings, args.gin_search_paths, args.length, args.encoder_length
    )
    with StatusLine() as line:
        result = proof.prove(
            run, given, slice_, deadline_s=args.deadline, fresh=args.fresh,
            status=lambda elapsed_s, phase: line.show(f"{slice_.name}: {phase}", f"{elapsed_s:.0f} s"),
        )  # fmt: skip
    if args.json is not None:
        outputs.save(args.json, json.dumps(report.verdict_json(result), indent=1))
    if result.compiled is None:
        raise UserError(result.message)
    print("\n".join(report.verdict_lines(result, slice_)))
    return 0 if result.compiled.fits else 1


def _compile(run, slice_) -> int:
    from capibara import sharding
    from capibara.models import api
    from capibara.planner.compiler import compile_cache, proof
    from capibara.planner.hardware import topology
    from capibara.training.setup import lower_step

    compile_cache.announce("lowering")
    mesh = sharding.make_mesh(run.plan, topology.slice_devices(slice_.name))
    with proof.without_locations():
        lowered = lower_step(run, api.build(run.model), mesh)
    proof.answer(lowered, slice_, mesh, proof.flags(run, slice_))
    return 0
