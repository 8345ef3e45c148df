"""python -m capibara.prepare vocabulary: trains a SentencePiece vocabulary on a corpus."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from capibara.cli import ArgumentParser, parse_arguments, run_verb
from capibara.types import UserError

_DESCRIPTION = """Prepares what training needs.

  vocabulary   train a SentencePiece vocabulary on a corpus (BPE with byte fallback; loses nothing)

examples:
  python -m capibara.prepare vocabulary --size=8192 --output=python.model
  python -m capibara.prepare vocabulary --source=jsonl --files 'data/*.jsonl' --field=content --output=my.model
  python -m capibara.prepare vocabulary --gin_file=my_run.gin --output=my.model   (the corpus of Dataset.source)

then, in Gin:
  Dataset.vocabulary = @SentencePieceVocabulary()
  SentencePieceVocabulary.path = "my.model"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the verb; returns the exit code."""
    parser = ArgumentParser(prog="python -m capibara.prepare", description=_DESCRIPTION)
    parser.add_argument("what", choices=["vocabulary"], help="what to prepare")
    parser.add_argument("--source", choices=["stdlib", "text", "jsonl"], default="stdlib", help="kind of corpus")
    parser.add_argument("--files", nargs="+", default=[], metavar="FILE", help="files or globs, for text and jsonl")
    parser.add_argument("--field", default="text", help="the field of a JSON line that holds the text")
    parser.add_argument("--size", type=int, default=8192, help="number of ids (default 8192)")
    parser.add_argument("--sample_megabytes", type=float, default=64.0, help="how much text to train on (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample")
    parser.add_argument("--output", default="tokenizer.model", help="the model file (default tokenizer.model)")
    args = parse_arguments(parser, argv)
    if args.sample_megabytes <= 0:
        raise UserError(f"--sample_megabytes ({args.sample_megabytes}) must be positive")

    from capibara.data.train_vocabulary import train_sentencepiece

    train_sentencepiece(
        _source(args).open("train"),
        args.output,
        size=args.size,
        sample_bytes=int(args.sample_megabytes * 2**20),
        seed=args.seed,
        report=lambda line: print(line, flush=True),
    )
    return 0


def _source(args):
    from capibara.data import sources

    if args.gin_file or args.gin_bindings:
        return _source_in_gin(args)
    if args.source == "stdlib":
        if args.files:
            raise UserError("--files needs --source=text or --source=jsonl")
        return sources.StdlibSource()
    if args.source == "text":
        return sources.TextSource(files=tuple(args.files))
    return sources.JsonlSource(files=tuple(args.files), field=args.field)


def _source_in_gin(args):
    from capibara import config
    from capibara.data.dataset import Dataset

    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    source = config.build(Dataset).source
    if source is None:
        raise UserError("Dataset.source is not set in the Gin files: a SeqIO task brings its own vocabulary")
    return source


if __name__ == "__main__":
    sys.exit(run_verb(main))
