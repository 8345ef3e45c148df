"""Prepares a corpus for training: `python -m capibara.prepare corpus`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from capibara.cli.preparing import builders
from capibara.core.types import UserError

_DESCRIPTION = """Prepare a corpus: drop exact and near duplicates, filter, tokenize and pack once.

IN is a file, a folder, a glob or an address (gs://, s3://): JSON lines, Parquet or text.

  OUT/corpus-*.array_record   rows of packed tokens, for ShardedSource
  OUT/index.json              the counts of each shard, and where each document was read
  OUT/manifest.json           inputs, settings, counts, and what was skipped, with file and line

The output does not depend on --num_workers or --runner.

examples:
  python -m capibara.prepare corpus 'pages/*.jsonl.gz' --out=data/pages --num_workers=8 --gin_file=corpus.gin
  python -m capibara.prepare corpus docs --out=data/docs --gin.CorpusPreparation.length=4096
  python -m capibara.prepare corpus pages --out=data/pages --runner=DirectRunner --num_workers=8
  python -m capibara.prepare corpus pages --out=data/pages --runner=DaskRunner \\
    --beam_options=--dask_client_address=tcp://scheduler:8786

with corpus.gin:
  CorpusPreparation.vocabulary = @TokenizerJsonVocabulary()
  TokenizerJsonVocabulary.path = "tokenizer.json"
  CorpusPreparation.filters = (@LanguageFilter(), @DatatroveFilter())
  LanguageFilter.languages = ("en",)
  DatatroveFilter.name = "GopherQualityFilter"

then, in Gin: Dataset.source = @ShardedSource(), ShardedSource.files = ("data/pages/*.array_record",), and the same
Dataset.vocabulary and Dataset.length."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the word; returns the exit code."""
    created = builders.parser("corpus", _DESCRIPTION)
    created.add_argument("--runner", help="run on Apache Beam: DirectRunner, DaskRunner, FlinkRunner, SparkRunner, ...")
    created.add_argument("--beam_options", default="", help="options of Beam and its runner, as one string")
    args = builders.parsed(created, argv)
    if args.beam_options and not args.runner:
        raise UserError("--beam_options needs --runner: add --runner=DirectRunner, or remove it")

    from capibara import config
    from capibara.builders.preparation import beam, build
    from capibara.builders.preparation.settings import CorpusPreparation
    from capibara.monitoring.status import StatusLine

    settings = config.build(CorpusPreparation)
    config.check_used()
    with StatusLine() as status:
        if args.runner:
            manifest = beam.prepare(args.inputs, args.out, settings, args.runner, _options(args))
        else:
            manifest = build.prepare(args.inputs, args.out, settings, args.num_workers, status.show)
    return builders.report(manifest, args)


def _options(args: argparse.Namespace) -> list[str]:
    """The options of Beam."""
    options = shlex.split(args.beam_options)
    if args.runner == "DirectRunner" and args.num_workers > 1 and "--direct_" not in args.beam_options:
        options += [f"--direct_num_workers={args.num_workers}", "--direct_running_mode=multi_processing"]
    return options
