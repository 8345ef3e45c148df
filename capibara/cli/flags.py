"""What every verb's command line shares: the Gin flags, and one line instead of a traceback for user mistakes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from capibara.core.fields import did_you_mean
from capibara.core.types import UserError

# Flags by the names that they had: they work for one version more.
_RENAMED = {"--damaged": "--corrupted", "--objective": "--goal"}


class ArgumentParser(argparse.ArgumentParser):
    """argparse, with mistakes raised as UserError and flags never abbreviated."""

    def __init__(self, prog: str | None = None, description: str | None = None):
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(self)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that every verb takes: --gin_file, --gin_search_paths, --gin_bindings and, in words, --gin.X."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="Gin file, repeatable or comma-separated; searched here, in --gin_search_paths and in capibara's gin/",
    )
    group.add_argument(
        "--gin_search_paths",
        action="append",
        default=[],
        metavar="DIR",
        help="more folders to search for Gin files, repeatable or comma-separated",
    )
    group.add_argument(
        "--gin_bindings",
        action="append",
        default=[],
        metavar="'NAME = VALUE'",
        help="a Gin statement that overrides the files, repeatable",
    )
    group.add_argument(
        "--gin.NAME=VALUE",
        dest="gin_override_help",
        nargs="?",
        help="the same for one macro (--gin.TRAIN_STEPS=500) or parameter (--gin.Trainer.seed=1)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds --model_dir, --model and --trust_config, of verbs that use a model."""
    parser.add_argument("--model_dir", metavar="DIR", help="run folder: its config.gin and newest checkpoint are used")
    parser.add_argument("--model", metavar="PATH", help="instead: a Hugging Face folder or a .gguf file")
    add_trust(parser)


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """Adds --adapter, of verbs that generate."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="load an adapter beside the model, unmerged: a folder of PEFT or a run with adapters; may be repeated; "
        "infer answers with the first",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds --trust_config, of verbs that open run folders."""
    parser.add_argument(
        "--trust_config",
        action="store_true",
        help="import the modules that a run folder's config.gin names, as its run did: for folders that you trust",
    )


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a verb's command line (sys.argv where `argv` is None).

    Returns:
      The namespace, with `gin_file` and `gin_search_paths` as flat lists of str and `gin_bindings` as a list of
      "NAME = VALUE" in the order given, --gin.NAME=VALUE included: what config.parse takes.

    Raises:
      UserError: an unknown flag (with the nearest one) or a bad value.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # --gin.X=Y is rewritten before argparse sees it, so that values such as "-1" and "a b" pass untouched.
    rewritten = [part for arg in argv for part in _rewrite(arg)]
    args, unknown = parser.parse_known_args(rewritten)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        flags = [flag for flag in flags if not flag.startswith("--gin.")]
        name = unknown[0].partition("=")[0]
        if name.startswith("-"):
            raise UserError(f"unknown flag {name}{did_you_mean(name, flags, 'flags')} (see --help)")
        raise UserError(f"unexpected argument {unknown[0]!r} (see --help)")
    args.gin_file = [part for value in args.gin_file for part in value.split(",") if part]
    args.gin_search_paths = [part for value in args.gin_search_paths for part in value.split(",") if part]
    for folder in args.gin_search_paths:
        if not os.path.isdir(os.path.expanduser(folder)):
            raise UserError(f"--gin_search_paths={folder} must be a folder: there is none")
    del args.gin_override_help
    return args


def _rewrite(arg: str) -> tuple[str, ...]:
    flag, equals, value = arg.partition("=")
    if flag in _RENAMED:
        print(f"{flag} is now {_RENAMED[flag]}: the next version does not know the old name", file=sys.stderr)
        return (_RENAMED[flag] + equals + value,)
    if not arg.startswith("--gin."):
        return (arg,)
    name, equals, value = arg.removeprefix("--gin.").partition("=")
    if not name or not equals:
        raise UserError(f"{arg} needs a value after an equals sign: --gin.{name or 'NAME'}=VALUE")
    return (f"--gin_bindings={name} = {value}",)
