"""What the words of builders share: flags, the build, its report and exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from capibara.cli.arguments import flags
from capibara.multihost import exits

if TYPE_CHECKING:
    from capibara.builders.files.manifest import Manifest
    from capibara.builders.files.problems import Problems

_Settings = TypeVar("_Settings", contravariant=True)

_EXIT_CODES = """

Input that cannot be read is skipped, counted, and named with file and line; the rest is used.
exit codes: 0 all input was used (or --allow_skipped); 3 some was skipped; 2 invalid input; 75 try again"""


def parser(word: str, description: str, *, workers: bool = True) -> flags.ArgumentParser:
    """A parser with the flags of every builder: IN ..., --out, --num_workers, --allow_skipped, --json, --lineage_url.

    Args:
      word: what follows `prepare`, such as "playbooks".
      description: for --help; what exit codes mean is added.
      workers: whether it has --num_workers.
    """
    created = flags.ArgumentParser(prog=f"python -m capibara.prepare {word}", description=description + _EXIT_CODES)
    created.add_argument("inputs", nargs="+", metavar="IN", help="files, folders and globs; .gz and .zst are unpacked")
    created.add_argument(
        "--out", required=True, metavar="DIR", help="output folder; a build that was killed resumes there"
    )
    if workers:
        created.add_argument("--num_workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    created.add_argument("--allow_skipped", action="store_true", help="end with exit code 0 if input was skipped")
    created.add_argument("--json", action="store_true", help="print the manifest as JSON")
    created.add_argument(
        "--lineage_url",
        metavar="URL",
        help="also send the OpenLineage events of OUT/lineage.jsonl to this server (default: OPENLINEAGE_URL; the key is in "
        "OPENLINEAGE_API_KEY)",
    )
    return created


def parsed(created: flags.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line of a builder's word, with the Gin files parsed and the server of lineage set.

    Raises:
      UserError: a flag or a Gin file is wrong.
    """
    from capibara import config
    from capibara.core.types import UserError

    args = flags.parse_arguments(created, argv)
    if not args.out:
        raise UserError("--out ('') must be a folder: try data/set")
    if getattr(args, "num_workers", 0) < 0:
        raise UserError(f"--num_workers ({args.num_workers}) must be at least 0: try 1")
    if args.lineage_url is not None:
        os.environ["OPENLINEAGE_URL"] = args.lineage_url
    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    return args


class _Build(Protocol[_Settings]):
    """What builds a data set of files."""

    def __call__(
        self,
        paths: Sequence[str],
        folder: str,
        settings: _Settings,
        *,
        num_workers: int,
        progress: Callable[[int, int], None],
        problems: Problems,
    ) -> Manifest: ...


def run(
    build: _Build[_Settings], settings: _Settings, endings: Sequence[str], args: argparse.Namespace, word: str
) -> int:
    """Builds a data set of the files that the user names, with a status line, and reports it.

    Args:
      build: the builder.
      settings: of the builder; Gin's other bindings are refused.
      endings: of the files that are read of a folder, such as ".jsonl".
      args: the command line.
      word: what the status line says, such as "playbooks".

    Returns:
      The exit code.

    Raises:
      UserError: see the builder; or a binding is not used, or an input is missing.
    """
    from capibara import config
    from capibara.builders.files import reading
    from capibara.builders.files.problems import Problems
    from capibara.monitoring.status import StatusLine

    config.check_used()
    problems = Problems()
    paths = reading.expand(args.inputs, endings, problems, args.out)
    with StatusLine() as status:
        manifest = build(
            paths,
            args.out,
            settings,
            num_workers=args.num_workers,
            progress=lambda done, total: status.show(word, f"{done} of {total} files"),
            problems=problems,
        )
    return report(manifest, args)


def report(manifest: Manifest, args: argparse.Namespace) -> int:
    """Prints what was built, and on standard error what was skipped; returns the exit code."""
    if args.json:
        print(json.dumps(manifest.as_json(), indent=1, ensure_ascii=False, sort_keys=True))
    else:
        size = sum(file.bytes for file in manifest.files)
        print(f"{args.out}: {len(manifest.files):,} files, {size:,} bytes, fingerprint {manifest.fingerprint}")
        print("\n".join(f"  {name:<32}{count:>16,}" for name, count in manifest.counts.items()))
    if not manifest.problems:
        return 0
    print(manifest.problems.text(), file=sys.stderr)
    return exits.EXIT_SKIPPED if manifest.counts["skipped"] and not args.allow_skipped else 0
