"""Trains a SentencePiece vocabulary, or prepares conversations for fine-tuning: `prepare vocabulary`, `instructions`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.cli.arguments import flags
from capibara.core.types import UserError

if TYPE_CHECKING:
    from capibara.data.sources.sources import Source

_DESCRIPTION = """Prepare data for training.

  vocabulary     train a SentencePiece vocabulary on a corpus (BPE with byte fallback, lossless)
  instructions   write conversations or preference pairs from JSON files, or archives of them, to train.jsonl and
                 held_out.jsonl

examples:
  python -m capibara.prepare vocabulary --size=8192 --output=python.model
  python -m capibara.prepare vocabulary --source=jsonl --files 'data/*.jsonl' --field=content --output=my.model
  python -m capibara.prepare vocabulary --gin_file=my_run.gin --output=my.model   (the corpus of Dataset.source)
  pip download --no-deps --no-binary=llamafactory llamafactory    (its data/ has instructions, tool calls and preferences)
  python -m capibara.prepare instructions --files llamafactory-*.tar.gz --members alpaca_en_demo.json --output=chats

then, in Gin:
  Dataset.vocabulary = @SentencePieceVocabulary()
  SentencePieceVocabulary.path = "my.model"
or tasks/chat.gin with --gin.FILES="('chats/train.jsonl',)" --gin.VALIDATION_FILES="('chats/held_out.jsonl',)"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the words, which is among the arguments; returns the exit code."""
    parser = flags.ArgumentParser(prog="python -m capibara.prepare", description=_DESCRIPTION)
    parser.add_argument("what", choices=["vocabulary", "instructions"], help="what to prepare")
    parser.add_argument("--source", choices=["stdlib", "text", "jsonl"], default="stdlib", help="kind of corpus")
    parser.add_argument("--files", nargs="+", default=[], metavar="FILE", help="files or globs")
    parser.add_argument("--members", nargs="+", default=[], metavar="NAME", help="files to read from archives")
    parser.add_argument("--held_out", type=float, default=0.1, help="share of the instructions held out (default 0.1)")
    parser.add_argument("--field", default="text", help="the field of a JSON line that holds the text")
    parser.add_argument("--size", type=int, default=8192, help="number of ids (default 8192)")
    parser.add_argument("--sample_megabytes", type=float, default=64.0, help="how much text to train on (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--output", metavar="PATH", help="model file (default tokenizer.model), or the instructions' folder (default .)"
    )
    args = flags.parse_arguments(parser, argv)
    if args.sample_megabytes <= 0:
        raise UserError(f"--sample_megabytes ({args.sample_megabytes}) must be positive")

    if args.what == "instructions":
        from capibara.data.chat.instructions import prepare_instructions

        prepare_instructions(args.files, args.output or ".", members=args.members, held_out=args.held_out)
        return 0

    from capibara.data.train_vocabulary import train_sentencepiece

    documents = _source(args).open("train")
    print(f"data: train: {documents.counts}", flush=True)
    train_sentencepiece(
        documents,
        args.output or "tokenizer.model",
        size=args.size,
        sample_bytes=int(args.sample_megabytes * 2**20),
        seed=args.seed,
        report=lambda line: print(line, flush=True),
    )
    return 0


def _source(args: argparse.Namespace) -> Source:
    from capibara.data.sources import sources

    if args.gin_file or args.gin_bindings:
        return _source_in_gin(args)
    if args.source == "stdlib":
        if args.files:
            raise UserError("--files needs --source=text or --source=jsonl: add one of them")
        return sources.StdlibSource()
    if args.source == "text":
        return sources.TextSource(files=tuple(args.files))
    return sources.JsonlSource(files=tuple(args.files), field=args.field)


def _source_in_gin(args: argparse.Namespace) -> Source:
    from capibara import config
    from capibara.data.dataset import Dataset

    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    source = config.build(Dataset).source
    if source is None:
        raise UserError("Dataset.source is not set in the Gin files (a SeqIO task has its own vocabulary): set it")
    return source
