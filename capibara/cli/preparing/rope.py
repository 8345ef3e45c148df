"""Extends a model's context by another scaling of its rotary positions: `python -m capibara.prepare rope`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import UserError

_DESCRIPTION = """Extend the context of a model with rotary positions, without training: the search of LongRoPE (arXiv:2402.13753).

--out gets rope.gin (bindings for every verb), rope.json (losses of this scaling, of YaRN, of NTK-aware and of linear scaling, and
what config.json says) and evaluations.jsonl, with which an interrupted search resumes. Settings: --gin.RopeSearch.NAME=VALUE.

examples:
  python -m capibara.prepare rope --model=Qwen3-0.6B-Base --data=books.jsonl --length=131072 --out=longer
  python -m capibara.convert --from=Qwen3-0.6B-Base --gin_file=longer/rope.gin --to=Qwen3-0.6B-128k
  python -m capibara.prepare rope --model_dir=runs/mine --data=long.jsonl --length=4096 --out=longer --gin.RopeSearch.iterations=10"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, searches and prints a table; returns the exit code."""
    parser = flags.ArgumentParser("python -m capibara.prepare rope", _DESCRIPTION)
    flags.add_model(parser)
    parser.add_argument(
        "--data", action="append", default=[], metavar="FILES", help="JSON lines with a text; repeatable"
    )
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a row that the model should read")
    parser.add_argument(
        "--original_length", type=int, metavar="N", help="of pre-training; default: of the model's rows"
    )
    parser.add_argument("--out", metavar="DIR", help="the folder to write")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    args = flags.parse_arguments(parser, argv)
    if bool(args.model_dir) == bool(args.model):
        raise UserError("pass one of --model_dir (a run folder) and --model (a Hugging Face folder or .gguf file)")
    for name, example in (("data", "books.jsonl"), ("length", "32768"), ("out", "longer")):
        if not getattr(args, name):
            raise UserError(f"--{name} is missing: try --{name}={example}")
    for name in ("length", "original_length"):
        if (value := getattr(args, name)) is not None and value < 2:
            raise UserError(f"--{name}={value} must be at least 2")

    from capibara import config
    from capibara.cli.composition import models
    from capibara.core import devices
    from capibara.evaluation.context import extension
    from capibara.evaluation.context.search import RopeSearch
    from capibara.monitoring.status import StatusLine

    devices.start(args.emulate)
    subject = models.open_subject(
        args.model_dir or args.model, args.gin_file, args.gin_bindings, args.gin_search_paths, trust=args.trust_config
    )
    settings = config.build(RopeSearch)
    config.check_used()
    with StatusLine() as status:
        report = extension.extend(
            subject, args.data, args.out, args.length, args.original_length, settings, status.show
        )
    print(*extension.table(report), sep="\n")
    print(f"Written to {args.out}: use it by --gin_file={args.out}/{extension.GIN}")
    return 0
