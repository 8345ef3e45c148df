"""Takes models in and out, and looks after the checkpoints of a run: `python -m capibara.convert --from=... --to=...`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from capibara.cli import flags
from capibara.core.types import UserError
from capibara.interop import submodel_options as submodel
from capibara.interop.peft import sum_options
from capibara.interop.quantize import options as quantize
from capibara.monitoring.status import StatusLine
from capibara.storage import outputs

_DESCRIPTION = """Convert a model from one form to another, or look after the checkpoints of a run folder.

  --from  a run folder (its newest checkpoint), a folder of Hugging Face, PEFT or T5X, or a .gguf file
  --to    what is not there yet. --format=hf: a Hugging Face folder, pytorch: the same with pytorch_model.bin, gguf: a file,
          t5x: a T5X checkpoint, peft: a run's adapters, peft_fused: the same, a layer's experts in one as
          transformers 5 has them, gguf_lora: a run's or PEFT's adapters for llama.cpp, capibara: a run folder to begin from
  list    the steps that there are, with their size, date, score and where they come from
  verify  read every file of the run folder and of every step and compare it with the manifests
  seal    take the run folder's own files as they are now, after you changed one by hand
  prune   remove steps: --keep=N newest and --keep_every=N stay, and the last that is what was saved

examples: python -m capibara.convert --from=poet --plus=coder --weights=0.7,0.3 --to=both --format=peft
          python -m capibara.convert --from=runs/mine --to=mine.gguf --quantize=gptq --calibration=chats.jsonl

exit codes: 0 done, all steps are what was saved; 1 some are not; 2 a mistake in what was given"""
_FORMATS = ("hf", "pytorch", "gguf", "t5x", "peft", "peft_fused", "gguf_lora", "capibara")
_PRUNE = ("keep", "keep_every", "corrupted", "dry_run")
_MODEL = (*"source target format dtype base trust_config".split(), *quantize.FLAGS, *sum_options.FLAGS, *submodel.FLAGS)
_OF = dict.fromkeys(_MODEL, ("a model",)) | {"step": ("list", "verify")} | dict.fromkeys(_PRUNE, ("prune",))


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and does it; returns the exit code."""
    parser = flags.ArgumentParser("capibara convert", _DESCRIPTION)
    parser.add_argument("action", nargs="?", choices=("list", "verify", "seal", "prune"))
    parser.add_argument("run", nargs="?", metavar="RUN", help="of these: the run folder, MODEL_DIR")
    parser.add_argument("--from", dest="source", metavar="PATH", help="the model to convert")
    parser.add_argument("--to", dest="target", metavar="PATH", help="where it is written")
    parser.add_argument("--format", choices=_FORMATS, help="of --to; default: hf, gguf for x.gguf")
    parser.add_argument("--base", metavar="PATH", help="of an adapter: its model; default: what it names")
    sum_options.add_arguments(parser)
    quantize.add_arguments(parser)
    submodel.add_arguments(parser)
    parser.add_argument("--step", type=int, metavar="N", help="of list and verify: this one alone")
    parser.add_argument("--keep", type=int, metavar="N", help="of prune: newest steps that stay")
    parser.add_argument("--keep_every", type=int, metavar="N", help="of prune: multiples of it stay")
    parser.add_argument("--corrupted", action="store_true", help="of prune: remove what was quarantined, too")
    parser.add_argument("--dry_run", action="store_true", help="of prune: only say what would go")
    parser.add_argument("--json", metavar="FILE", help="write what is printed there")
    flags.add_trust(parser)
    args = flags.parse_arguments(parser, argv)
    _check(args, args.action or "a model")
    return _model(args) if args.action is None else convert(args)


def _model(args: argparse.Namespace) -> int:
    import jax

    from capibara.interop import conversion
    from capibara.training.run_folder import RunFolders

    jax.config.update("jax_platforms", "cpu")  # a chip's memory is smaller than its host's
    what = (sum_options.asked(args), args.target, args.format, args.dtype, args.base)
    gin, how = (args.gin_file, args.gin_bindings, args.gin_search_paths), quantize.asked(args)
    with StatusLine() as bar:
        print(conversion.convert(*what, gin, RunFolders(args.trust_config), how, bar.show, submodel.asked(args)))
    return 0


def _check(args: argparse.Namespace, action: str) -> None:
    for name, value in vars(args).items():
        if action not in _OF.get(name, (action,)) and value is not None and value is not False:
            flag = "--" + {"source": "from", "target": "to"}.get(name, name) + ("" if value is True else f"={value}")
            raise UserError(f"{flag} is of {' and '.join(_OF[name])}, not of {action}: leave it out")
    if not args.action and not (args.source and args.target):
        raise UserError("convert needs --from=PATH and --to=PATH, or list, verify, seal or prune with a run folder")
    if args.action and not args.run:
        raise UserError(f"{action} has {args.run or ''!r} for RUN, must be a run folder: name one, e.g. runs/mine")


def convert(args: argparse.Namespace) -> int:
    """Does what was asked of a run's checkpoints; returns the exit code."""
    from capibara.checkpoints import inspection

    inspection.check(args.action, args.keep, args.keep_every)
    outputs.check_writable(*filter(None, [args.json]))
    options = {name: getattr(args, name) for name in _PRUNE}
    found = inspection.Inspection(args.run, args.step)
    with StatusLine() as line:
        table = found.done(args.action, lambda step: line.show("verifying", f"step {step}"), **options)
    print("\n".join(inspection.lines(table, args.action)))
    if args.json is not None:
        outputs.save(args.json, json.dumps(table, indent=1))
    return int(args.action == "verify" and any(row["faults"] for row in table))
