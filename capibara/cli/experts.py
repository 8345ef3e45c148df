"""Measures and rewires the experts of a model: `python -m capibara.experts prune MODEL --experts=4 ... --to=NEW`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from capibara.cli.arguments import expert_operation, flags
from capibara.core.types import UserError
from capibara.interop.experts import OPERATIONS
from capibara.monitoring.status import StatusLine

_DESCRIPTION = """Measure how a mixture of experts uses its experts, and make models with other experts.

  stats      how often each expert is chosen, with which gate and which output, by domain: a JSON file and a picture
  prune      remove the experts that count least
  merge      average experts that are alike
  split      part every expert in smaller ones, which are chosen together
  duplicate  double the experts that most tokens choose
  upcycle    make experts of the MLPs of a model without any

  MODEL      a run folder (its newest checkpoint), a Hugging Face or PEFT folder, or a .gguf file
  --to       a path that does not exist yet. --format=hf, pytorch: a Hugging Face folder; gguf: a file; capibara: a run
             folder. experts.json in it says what each expert is made of
example: capibara experts prune runs/mine --statistics=runs/mine/expert_use.json --experts=8 --to=pruned
exit codes: 0 done; 2 invalid input. docs/experts.md describes the operations"""
_FORMATS = ("hf", "pytorch", "gguf", "capibara")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs it; returns the exit code."""
    parser = flags.ArgumentParser("capibara experts", _DESCRIPTION)
    parser.add_argument("action", nargs="?", choices=("stats", *OPERATIONS))
    parser.add_argument("model", nargs="?", metavar="MODEL")
    expert_operation.add_stats(parser)
    parser.add_argument("--to", dest="target", metavar="PATH", help="where to write the model")
    parser.add_argument("--statistics", metavar="FILE", help="what stats has written of the model")
    parser.add_argument("--format", choices=_FORMATS, help="of --to; default: hf, gguf for x.gguf")
    parser.add_argument("--dtype", metavar="NAME", help="of the result's tensors; default: that of the model")
    expert_operation.add_arguments(parser)
    flags.add_trust(parser)
    args = flags.parse_arguments(parser, argv)
    if not args.action or not args.model:
        actions = ", ".join(OPERATIONS)
        raise UserError(f"experts needs one of stats, {actions}, and a MODEL: capibara experts stats runs/mine")
    expert_operation.check(args)
    return _stats(args) if args.action == "stats" else _rewire(args)


def _stats(args: argparse.Namespace) -> int:
    from capibara.core import devices

    devices.start(args.emulate)
    from capibara.cli.composition import models
    from capibara.evaluation.experts import use
    from capibara.storage import outputs

    path = args.out or use.default_path(args.model)
    picture = path.removesuffix(".json") + ".png"
    outputs.check_writable(path, picture, inputs=[*args.gin_file, *(args.data or ())])
    domains = [*filter(None, (args.domains or "").split(","))]
    with StatusLine() as line:
        line.show("reading", args.model)
        subject = models.open_subject(
            args.model, args.gin_file, args.gin_bindings, args.gin_search_paths,
            step=args.step, weights=args.weights, trust=args.trust_config,
        )  # fmt: skip
        result = use.measured(subject, args.data or (), domains, limit=args.limit, show=line.show)
    use.write(result, path, picture)
    print(*use.table(result), f"written to {path} and {picture}", sep="\n")
    return 0


def _rewire(args: argparse.Namespace) -> int:
    operation = expert_operation.from_args(args)
    import jax

    from capibara.cli.composition.models import ModelReader
    from capibara.interop.experts import rewiring

    jax.config.update("jax_platforms", "cpu")  # a device may have less memory than its host
    reader = ModelReader(trust=args.trust_config)
    with StatusLine() as bar:
        print(
            rewiring.rewire(
                args.model, args.target, operation, args.statistics, args.format, args.dtype, reader, bar.show
            )
        )
    return 0
