"""Converts models and manages a run's checkpoints: `python -m capibara.convert --from=... --to=...`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import UserError
from capibara.interop import submodel_options as submodel
from capibara.interop.peft import sum_options
from capibara.interop.quantize import options as quantize
from capibara.monitoring.status import StatusLine
from capibara.storage import outputs

_DESCRIPTION = """Convert a model to another format, or manage the checkpoints of a run folder.

  --from  a run folder (its newest checkpoint), a Hugging Face, PEFT, T5X or MaxText folder, or a .gguf file
  --to    a new path. --format=hf: a Hugging Face folder; pytorch: the same with pytorch_model.bin; gguf: a file; t5x: a
          T5X checkpoint; hf_token_classification: hf, with scores of steps; peft: a run's adapters; peft_fused: with a
          layer's experts fused, as transformers 5 expects; gguf_lora: adapters for llama.cpp; capibara: a run folder
  list    list the steps with their size, date, score and origin
  verify  read every file of the run folder and of every step, and compare it with the manifests
  seal    accept the run folder's own files as they are now, after you edited one by hand
  prune   remove steps; keeps the --keep=N newest, multiples of --keep_every=N and the last verified step

examples: python -m capibara.convert --from=poet --plus=coder --weights=0.7,0.3 --to=both --format=peft
          python -m capibara.convert --from=runs/mine --to=mine.gguf --quantize=gptq --calibration=chats.jsonl

exit codes: 0 done, all steps verified; 1 some steps failed verification; 2 invalid input"""
FORMATS = "hf hf_token_classification pytorch gguf t5x peft peft_fused gguf_lora capibara".split()
_PRUNE = ("keep", "keep_every", "corrupted", "dry_run")
_MODEL = (*"source target format dtype base trust_config".split(), *quantize.FLAGS, *sum_options.FLAGS, *submodel.FLAGS)
_OF = dict.fromkeys(_MODEL, ("a model",)) | {"step": ("list", "verify")} | dict.fromkeys(_PRUNE, ("prune",))


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and runs it; returns the exit code."""
    parser = flags.ArgumentParser("capibara convert", _DESCRIPTION)
    parser.add_argument("action", nargs="?", choices=("list", "verify", "seal", "prune"))
    parser.add_argument("run", nargs="?", metavar="RUN", help="for list, verify, seal and prune: the run folder")
    parser.add_argument("--from", dest="source", metavar="PATH", help="the model to convert")
    parser.add_argument("--to", dest="target", metavar="PATH", help="where to write it")
    parser.add_argument("--format", choices=FORMATS, help="of --to; default: hf, gguf for x.gguf")
    parser.add_argument("--base", metavar="PATH", help="the base model of an adapter; default: the one that it names")
    sum_options.add_arguments(parser)
    quantize.add_arguments(parser)
    submodel.add_arguments(parser)
    parser.add_argument("--step", type=int, metavar="N", help="for list and verify: only this step")
    parser.add_argument("--keep", type=int, metavar="N", help="for prune: number of newest steps to keep")
    parser.add_argument("--keep_every", type=int, metavar="N", help="for prune: keep multiples of it")
    parser.add_argument("--corrupted", action="store_true", help="for prune: remove quarantined steps, too")
    parser.add_argument("--dry_run", action="store_true", help="for prune: only list what would be removed")
    parser.add_argument("--json", metavar="FILE", help="also write the report to this file")
    flags.add_trust(parser)
    args = flags.parse_arguments(parser, argv)
    _check(args, args.action or "a model")
    return _model(args) if args.action is None else convert(args)


def _model(args: argparse.Namespace) -> int:
    import jax

    from capibara.cli.composition.models import ModelReader
    from capibara.interop import conversion

    jax.config.update("jax_platforms", "cpu")  # a device may have less memory than its host
    source, how, part = sum_options.from_args(args), quantize.from_args(args), submodel.from_args(args)
    reader = ModelReader((args.gin_file, args.gin_bindings, args.gin_search_paths), args.trust_config)
    with StatusLine() as bar:
        print(conversion.convert(source, args.target, args.format, args.dtype, args.base, reader, how, bar.show, part))
    return 0


def _check(args: argparse.Namespace, action: str) -> None:
    for name, value in vars(args).items():
        if action not in _OF.get(name, (action,)) and value is not None and value is not False:
            flag = "--" + {"source": "from", "target": "to"}.get(name, name) + ("" if value is True else f"={value}")
            raise UserError(f"{flag} is for {' and '.join(_OF[name])}, not for {action}: leave it out")
    if not args.action and not (args.source and args.target):
        raise UserError("convert needs --from=PATH and --to=PATH, or list, verify, seal or prune with a run folder")
    if args.action and not args.run:
        raise UserError(f"{action} needs RUN, a run folder: name one, e.g. runs/mine")


def convert(args: argparse.Namespace) -> int:
    """Runs an action on a run's checkpoints; returns the exit code."""
    from capibara.checkpoints import inspection

    inspection.check(args.action, args.keep, args.keep_every)
    outputs.check_writable(*filter(None, [args.json]))
    options = {name: getattr(args, name) for name in _PRUNE}
    result = inspection.Inspection(args.run, args.step)
    with StatusLine() as line:
        table = result.done(args.action, lambda step: line.show("verifying", f"step {step}"), **options)
    print("\n".join(inspection.lines(table, args.action)))
    if args.json is not None:
        outputs.save(args.json, json.dumps(table, indent=1))
    return int(args.action == "verify" and any(row["faults"] for row in table))
