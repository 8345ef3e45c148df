"""Writes long documents with questions about them: `python -m capibara.prepare ruler`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import UserError
from capibara.storage import outputs

_DESCRIPTION = """Write documents of any length with questions that have one answer, after RULER, as JSON lines.

  needle, needles   one fact in prose, among none or seven of others
  facts             one fact among facts of others alone
  variables         the variables that a chain of assignments gives a number
  common_words      the three words of a list that are the most frequent
  docstrings        the function of the standard library that a line of documentation describes

Lengths are in tokens of --tokenizer. The documents depend on Ruler.seed, not on each other.

examples:
  python -m capibara.prepare ruler --tokenizer=runs/chat --out=ruler.jsonl
  python -m capibara.prepare ruler --tokenizer=runs/chat --out=long.jsonl --gin.Ruler.tasks='("needle", "facts")' \\
    --gin.Ruler.lengths='(4096, 131072)' --gin.Ruler.examples=16
  python -m capibara.evaluate --model_dir=runs/chat --gin_file=evaluation/ruler.gin --gin.RULER='("long.jsonl",)'"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and writes the file; returns the exit code."""
    parser = flags.ArgumentParser("python -m capibara.prepare ruler", _DESCRIPTION)
    parser.add_argument("--tokenizer", metavar="PATH", help="folder with a tokenizer.json, or a run folder")
    parser.add_argument("--out", metavar="FILE", help="the .jsonl file to write")
    args = flags.parse_arguments(parser, argv)
    for name, example in (("tokenizer", "runs/chat"), ("out", "ruler.jsonl")):
        if not getattr(args, name):
            raise UserError(f"--{name} is missing: name it, such as --{name}={example}")
    if os.path.lexists(args.out):
        raise UserError(f"--out={args.out} exists already: name another, or remove it")
    outputs.check_writable(args.out, inputs=args.gin_file)

    from capibara import config
    from capibara.builders.ruler import build
    from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
    from capibara.monitoring.status import StatusLine

    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    settings = config.build(build.Ruler)
    config.check_used()
    with StatusLine() as status:
        show = lambda text: status.show("writing", text)  # noqa: E731
        count = build.write(settings, TokenizerJsonVocabulary(path=args.tokenizer), args.out, show)
    print(f"{count} documents in {args.out}")
    return 0
