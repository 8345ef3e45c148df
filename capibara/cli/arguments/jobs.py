"""The flags of `capibara launch WHERE RUN.gin`: those of every job, and one for each field of its back end."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
import typing
from collections.abc import Sequence

from capibara.core import fields
from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend
from capibara.jobs.spec import Capacity


def add_arguments(parser: argparse.ArgumentParser, backend: type[Backend]) -> None:
    """Adds the flags of a job, of what is done with it, and those of the back end's fields."""
    parser.add_argument("--stage", action="store_true", help="stage the job's files, and print what is to be submitted")
    parser.add_argument(
        "--detach", action="store_true", help="end when the job is submitted; then launch manage must run"
    )
    add_job(parser, backend)


def add_job(parser: argparse.ArgumentParser, backend: type[Backend]) -> None:
    """Adds the flags that say what a job is, and those of the back end's fields."""
    parser.add_argument("run", nargs="+", metavar="RUN.gin", help="Gin files of the run, as --gin_file of its verb")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print what is submitted; stage nothing")
    add_state(parser)
    group = parser.add_argument_group("job")
    add = group.add_argument
    add("--slice", metavar="NAME", help="v5e-64, 2xv6e-256, h100-8, cpu-1; default: the run's Plan.slice")
    add("--storage", metavar="URL", help="folder for the job's files, and for a MODEL_DIR that is not absolute")
    add("--name", help="of the job; default: that of the first Gin file")
    add("--image", help="container image that has capibara")
    add("--wheel", metavar="FILE", help="wheel of capibara, for hosts without an image")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable that anyone may read; repeatable")
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME=REFERENCE",
        help="projects/P/secrets/S, kubernetes:S/KEY or env:NAME",
    )
    add("--label", action="append", default=[], metavar="NAME=VALUE", help="of all that is created; repeatable")
    add("--restarts", type=int, default=10, metavar="N", help="most restarts; default: 10")
    add("--grace", type=int, default=300, metavar="S", help="seconds to save a checkpoint after SIGTERM; default: 300")
    add("--priority", help="priority class or quality of service")
    add("--capacity", choices=[str(item) for item in Capacity], default="on_demand", help="default: on_demand")
    add("--reservation", metavar="NAME", help="with --capacity=reserved")
    add("--budget_usd", type=float, metavar="USD", help="the job ends before its chips cost more")
    add("--usd_per_chip_hour", type=float, metavar="USD", help="the actual price; default: the list price on demand")
    add_place(parser, backend)


def add_place(parser: argparse.ArgumentParser, backend: type[Backend]) -> None:
    """Adds --place, and a flag for each field of the back end."""
    group = parser.add_argument_group(
        backend.name, f"fields of {backend.__name__}; --place=FILE.gin can bind them, too"
    )
    group.add_argument(
        "--place", action="append", default=[], metavar="FILE.gin", help="Gin file that is not of the run"
    )
    helps = _helps(backend)
    for field in dataclasses.fields(backend):
        default = "" if field.default in (None, dataclasses.MISSING) else f"; default: {field.default}"
        kind = bool if _kind(backend, field.name) is bool else _kind(backend, field.name)
        group.add_argument(f"--{field.name}", type=_boolean if kind is bool else kind, help=helps[field.name] + default)


def add_state(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of all that reads the jobs' database."""
    parser.add_argument(
        "--state", metavar="FILE", help="database of the jobs; default: $CAPIBARA_STATE, or in ~/.local/state"
    )
    parser.add_argument("--poll", type=float, default=15.0, metavar="S", help="seconds between two looks; default: 15")


def values_of(args: argparse.Namespace, backend: type[Backend]) -> dict[str, object]:
    """The values of the back end's flags that the command line sets."""
    flags = {field.name: getattr(args, field.name) for field in dataclasses.fields(backend)}
    return {name: value for name, value in flags.items() if value is not None}


def pairs(texts: Sequence[str], flag: str) -> dict[str, str]:
    """NAME=VALUE texts as a mapping; raises UserError for others, and for a name that comes twice."""
    result: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"{flag} must be {flag}=NAME=VALUE")  # without the text, which may be a secret
        if name in result:
            raise UserError(f"{flag}={name}=... is there twice: omit one of them")
        result[name] = value
    return result


def _kind(backend: type[Backend], name: str) -> type:
    annotation = fields.annotations_of(backend)[name]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = [item for item in typing.get_args(annotation) if item is not type(None)]
    assert isinstance(annotation, type)
    return annotation


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} must be true or false")
    return text.lower() == "true"


def _helps(backend: type[Backend]) -> dict[str, str]:
    """Field -> its line in the class's docstring."""
    lines = inspect.cleandoc(backend.__doc__ or "").partition("Attributes:")[2].splitlines()
    texts: dict[str, str] = {}
    name = ""
    for line in filter(None, lines):
        if line.startswith("    "):
            texts[name] += f" {line.strip()}"
        else:
            name, _, text = line.strip().partition(": ")
            texts[name] = text
    return {name: text.rstrip(".").replace("%", "%%") for name, text in texts.items()}
