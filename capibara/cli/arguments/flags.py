"""Command-line parsing common to all verbs: the Gin flags, and one-line errors for invalid input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from capibara.core.fields import did_you_mean, in_home
from capibara.core.types import UserError

# Old names of flags; they work for one more version.
_RENAMED = {"--damaged": "--corrupted", "--objective": "--goal"}

# What a value's name in --help says of it: that it is a path.
PATHS = ("DIR", "FILE", "FILE.gin", "IN", "MODEL", "NAME=PATH", "PATH", "RUN", "RUN.gin", "RUNS", "T5X.gin")

Arguments = argparse.Namespace  # of a command line


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
    """Adds the flags of every verb: --gin_file, --gin_search_paths, --gin_bindings and the shorthand --gin.X."""
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
    """Adds --model_dir, --model and --trust_config, for verbs that use a model."""
    parser.add_argument("--model_dir", metavar="DIR", help="run folder: its config.gin and newest checkpoint are used")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="instead: a Hugging Face folder, a .gguf file, or OWNER/NAME on the Hugging Face Hub",
    )
    add_trust(parser)


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """Adds --adapter, for verbs that generate."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="load an adapter beside the model, unmerged: a PEFT folder or a run with adapters; repeatable; "
        "infer answers with the first",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds --trust_config, for verbs that open run folders."""
    parser.add_argument(
        "--trust_config",
        action="store_true",
        help="import the modules that a run folder's config.gin names; only for folders that you trust",
    )


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a verb's command line; `argv` defaults to sys.argv.

    Returns:
      The namespace, with `gin_file` and `gin_search_paths` as flat lists of str, and `gin_bindings` as a list of
      "NAME = VALUE" in the order of the command line, --gin.NAME=VALUE included, for config.parse.

    Raises:
      UserError: an unknown flag (the message suggests the nearest one) or an invalid value.
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
    _check_not_empty(parser, args)
    args.gin_file = [part for value in args.gin_file for part in value.split(",") if part]
    args.gin_search_paths = [part for value in args.gin_search_paths for part in value.split(",") if part]
    for action in parser._actions:
        if action.metavar in PATHS:
            setattr(args, action.dest, _in_home(getattr(args, action.dest)))
    for folder in args.gin_search_paths:
        if not os.path.isdir(folder):
            raise UserError(f"--gin_search_paths={folder} must be a folder: it does not exist")
    del args.gin_override_help
    return args


def _check_not_empty(parser: argparse.ArgumentParser, args: Arguments) -> None:
    """Raises UserError if a name or path is empty, as --to=$TARGET is where the variable is not set."""
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if action.metavar in (*PATHS, "NAME") and "" in (value if isinstance(value, list) else [value]):
            flag = (action.option_strings or [action.metavar])[0]
            hint = ", or leave it out" if action.option_strings and not action.required else ""
            raise UserError(f"{flag} is empty: give it a value{hint}")


def _in_home(value: object) -> object:
    """Paths of a flag with ~ replaced by the home folder: a shell does so only at the beginning of an argument."""
    if isinstance(value, list):
        return [_in_home(part) for part in value]
    if not isinstance(value, str):
        return value
    name, equals, path = value.partition("=")  # NAME=PATH
    return f"{name}={in_home(path)}" if equals and path.startswith("~") else in_home(value)


def _rewrite(arg: str) -> tuple[str, ...]:
    flag, equals, value = arg.partition("=")
    if flag in _RENAMED:
        print(f"{flag} is now {_RENAMED[flag]}: the next version will reject the old name", file=sys.stderr)
        return (_RENAMED[flag] + equals + value,)
    if not arg.startswith("--gin."):
        return (arg,)
    name, equals, value = arg.removeprefix("--gin.").partition("=")
    if not name or not equals:
        raise UserError(f"{arg} needs a value after an equals sign: --gin.{name or 'NAME'}=VALUE")
    return (f"--gin_bindings={name} = {value}",)
