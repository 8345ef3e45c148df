"""Merges models of one architecture into one: `python -m capibara.merge A B --method=ties --base=C --to=...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from capibara.cli.arguments import flags, merging_method
from capibara.core.types import UserError
from capibara.monitoring.status import StatusLine

_DESCRIPTION = """Merge models of one architecture and tokenizer into one, tensor by tensor.

  A B ...  the models: run folders (their newest checkpoints), Hugging Face, PEFT or T5X folders, .gguf files
  --base   the model that they were fine-tuned from, for methods that merge offsets from it
  --to     a path that does not exist yet. --format=hf: a Hugging Face folder; pytorch: the same with
           pytorch_model.bin; gguf: a file; t5x: a T5X checkpoint; capibara: a run folder.
           A report with the models' hashes and the settings goes to merge.json in it, or beside a file

example: python -m capibara.merge poet coder --method=ties --base=smol --density=0.3 --to=both

exit codes: 0 done; 2 invalid input. docs/merging.md describes the methods; each has further settings in Gin
(--gin.Ties.normalize=False)."""
_FORMATS = ("hf", "pytorch", "gguf", "t5x", "capibara")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and merges; returns the exit code."""
    parser = flags.ArgumentParser("capibara merge", _DESCRIPTION)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a model to merge; repeatable")
    parser.add_argument("--to", dest="target", metavar="PATH", help="where to write the result")
    parser.add_argument("--base", metavar="PATH", help="the model that the others were fine-tuned from")
    merging_method.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random masks; default: 0")
    parser.add_argument("--tokenizer", metavar="MODEL", help="take this model's tokenizer, though others differ")
    parser.add_argument("--format", choices=_FORMATS, help="of --to; default: hf, gguf for x.gguf")
    parser.add_argument("--dtype", metavar="NAME", help="of the result's tensors; default: that of the models")
    flags.add_trust(parser)
    return _merge(flags.parse_arguments(parser, argv))


def _merge(args: argparse.Namespace) -> int:
    if not args.models or not args.target:
        raise UserError("merge needs models and --to=PATH: capibara merge A B --method=linear --to=NEW")
    if args.seed < 0:
        raise UserError(f"--seed={args.seed} must be at least 0: try 0")
    method = merging_method.from_args(args)
    import jax

    from capibara.cli.composition.models import ModelReader
    from capibara.interop.merge import merging

    jax.config.update("jax_platforms", "cpu")  # a device may have less memory than its host
    merge = merging.Merge(
        models=tuple(args.models), method=method, base=args.base, tokenizer=args.tokenizer, seed=args.seed
    )
    with StatusLine() as bar:
        reader = ModelReader(trust=args.trust_config)
        summary = merging.merge(merge, args.target, args.format, args.dtype, reader, bar.show)
    print(summary)
    return 0
