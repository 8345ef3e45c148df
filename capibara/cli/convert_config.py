"""Translates a Gin file of T5X: `python -m capibara.convert_config T5X.gin --to=mine.gin`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from capibara.cli.arguments import flags
from capibara.core.types import UserError
from capibara.storage import outputs

_DESCRIPTION = """Translate a T5X Gin file for capibara. The file is only parsed: nothing that it names is imported.

  T5X.gin             a run file, or several, as passed to T5X's --gin_file
  --gin_search_paths  the T5X repository, if the file includes files of it
  --to                the new file; without it the text is printed
  --leave_out         write bindings without a counterpart here as comments

example: capibara convert-config finetune.gin --gin_search_paths=t5x --to=mine.gin

exit codes: 0 translated; 2 invalid input, or bindings without a counterpart"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and translates the file; returns the exit code."""
    parser = flags.ArgumentParser("capibara convert-config", _DESCRIPTION)
    parser.add_argument("source", metavar="T5X.gin", help="the file")
    parser.add_argument("--to", metavar="FILE", help="a new file")
    parser.add_argument("--leave_out", action="store_true", help="turn bindings without a counterpart into comments")
    args = flags.parse_arguments(parser, argv)
    if args.gin_file or args.gin_bindings:
        raise UserError("--gin_file and --gin.NAME are for runs: pass them to capibara train with the new file")
    from capibara.interop.t5x import gin as t5x_gin

    result = t5x_gin.translate(args.source, args.gin_search_paths)
    if result.left and not args.leave_out:
        raise UserError(
            f"{args.source} binds {', '.join(result.left[:5])}{' and more' * (len(result.left) > 5)}, which capibara does not "
            "have: remove it, or pass --leave_out"
        )
    if args.to is None:
        print(result.text, end="")
    else:
        if os.path.lexists(args.to):
            raise UserError(f"--to={args.to} exists already: name another file")
        outputs.check_writable(args.to)
        outputs.save(args.to, result.text)
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
