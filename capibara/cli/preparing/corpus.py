"""Prepares a corpus for training: `python -m capibara.prepare corpus`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.exits import EXIT_SKIPPED
from capibara.core.types import UserError

_DESCRIPTION = """Prepare a corpus: drop equal and similar documents, filter, tokenize and pack once.

IN is a file, a folder, a glob or an address (gs://, s3://): JSON lines, Parquet or text; .gz and .zst, too.

  OUT/corpus-*.array_record   rows of packed tokens, for ShardedSource
  OUT/index.json              the counts of each shard, and where each document was read
  OUT/manifest.json           inputs, settings, counts, and what was skipped, with file and line

A run that was killed resumes with the same command. The output does not depend on --num_workers or --runner.

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
Dataset.vocabulary and Dataset.length.

exit codes: 0 all input was used; 2 invalid input; 3 the output is whole, but some input was malformed and was skipped;
75 a worker was killed: run it again"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the word; returns the exit code."""
    args = _parsed(argv)

    from capibara import config
    from capibara.builders.preparation import beam, build
    from capibara.builders.preparation.settings import CorpusPreparation
    from capibara.monitoring.status import StatusLine

    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    settings = config.build(CorpusPreparation)
    config.check_used()
    with StatusLine() as status:
        if args.runner:
            manifest = beam.prepare(args.inputs, args.out, settings, args.runner, _options(args))
        else:
            manifest = build.prepare(args.inputs, args.out, settings, args.num_workers, status.show)
    if args.json:
        print(json.dumps(manifest.as_json(), indent=1))
    else:
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in manifest.counts.items())
        lines = [manifest.problems.text(), counts, f"{args.out}: {len(manifest.files)} files, see manifest.json"]
        print("\n".join(filter(None, lines)))
    return EXIT_SKIPPED if manifest.problems and not args.allow_skipped else 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.ArgumentParser(prog="python -m capibara.prepare corpus", description=_DESCRIPTION)
    parser.add_argument("inputs", nargs="+", metavar="IN", help="files, folders, globs or addresses")
    parser.add_argument("--out", required=True, metavar="DIR", help="output folder")
    parser.add_argument("--num_workers", type=int, default=1, help="processes (default 1; 0: this one)")
    parser.add_argument("--runner", help="run on Apache Beam: DirectRunner, DaskRunner, FlinkRunner, SparkRunner, ...")
    parser.add_argument("--beam_options", default="", help="options of Beam and its runner, as one string")
    parser.add_argument("--allow_skipped", action="store_true", help="exit with 0 though some input was skipped")
    parser.add_argument("--json", action="store_true", help="print the manifest as one JSON object")
    args = flags.parse_arguments(parser, argv)
    if args.num_workers < 0:
        raise UserError(f"--num_workers ({args.num_workers}) must be at least 0: try 1")
    if args.beam_options and not args.runner:
        raise UserError("--beam_options needs --runner: add --runner=DirectRunner, or leave it out")
    return args


def _options(args: argparse.Namespace) -> list[str]:
    """The options of Beam."""
    options = shlex.split(args.beam_options)
    if args.runner == "DirectRunner" and args.num_workers > 1 and "--direct_" not in args.beam_options:
        options += [f"--direct_num_workers={args.num_workers}", "--direct_running_mode=multi_processing"]
    return options
