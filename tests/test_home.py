"""`~` is the home folder in every path that a user gives: in fields of Gin files and Python, and in flags."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import pathlib
import re
import typing

import pytest

from capibara.cli.arguments import flags
from capibara.config import search
from capibara.core import fields
from capibara.core.fields import FilePath
from capibara.data.sources.sources import JsonlSource
from capibara.training.trainer import Trainer

CLI = pathlib.Path(__file__).resolve().parents[1] / "capibara"
# Texts of configurations whose names sound like a path.
NO_PATHS = {
    "Adafactor.factoring": "a rule",
    "Encryption.key_env": "a variable",
    "Ssh.folder": "a folder of other machines, whose shells expand it",
    "Ssh.config_file": "expanded where it is read",
    "Sweep.files": "hashes",
    "Adapters.paths": "pairs, of --adapter",
}
PATH_NAME = re.compile(r"(^|_)(path|paths|file|files|dir|dirs|folder|exchange|init_from|tokenizer)$")


def classes():
    for name, module in sorted(search.defining_modules().items()):
        cls = getattr(importlib.import_module(module), name)
        if dataclasses.is_dataclass(cls):
            yield cls


def parts(annotation):
    yield annotation
    for part in typing.get_args(annotation) if annotation != FilePath else ():
        yield from parts(part)


def test_every_field_that_is_a_path_knows_the_home_folder():
    found, missing = [], []
    for cls in classes():
        for name, annotation in fields.annotations_of(cls).items():
            option, kinds = f"{cls.__name__}.{name}", [*parts(annotation)]
            if FilePath in kinds:
                found.append(option)
            elif PATH_NAME.search(name) and str in kinds and option not in NO_PATHS:
                missing.append(option)
    assert not missing and len(found) >= 24, found


@pytest.mark.parametrize("value", ["~/a/b", "~", "a/~", "/a", "gs://bucket/~"])
def test_a_path_of_a_field(value, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/me")
    expected = value.replace("~", "/home/of/me", 1) if value.startswith("~") else value
    assert JsonlSource(files=(value, "x"), validation_files=(value,)).files == (expected, "x")
    assert fields.annotations_of(Trainer)["init_from"] == FilePath | None
    assert fields.convert(value, FilePath | None) == expected and fields.convert(None, FilePath | None) is None


def test_the_paths_of_flags(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/me")
    parser = flags.ArgumentParser("x")
    flags.add_model(parser)
    flags.add_adapters(parser)
    parser.add_argument("--text", metavar="TEXT")
    args = flags.parse_arguments(
        parser, ["--model_dir=~/run", "--adapter=a=~/b", "--adapter=~/c", "--gin_file=~/x.gin,y.gin", "--text=~/z"]
    )
    assert (args.model_dir, args.adapter) == ("/home/of/me/run", ["a=/home/of/me/b", "/home/of/me/c"])
    assert (args.gin_file, args.text) == (["/home/of/me/x.gin", "y.gin"], "~/z")


def added_flags():
    """(file, flag, metavar, help) of every flag of the verbs."""
    for path in [
        *(CLI / "cli").rglob("*.py"),
        CLI / "interop/quantize/options.py",
        CLI / "planner/search/questions.py",
    ]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in (
                "add_argument",
                "add",
            ):
                names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                more = {word.arg: getattr(word.value, "value", "") for word in call.keywords}
                if names and names[0].startswith("--") and "action" not in more:
                    yield path.name, names[0], more.get("metavar"), str(more.get("help", ""))


def test_every_flag_that_is_a_path_says_so():
    told = [*added_flags()]
    # Expanded where they are read, or no paths.
    elsewhere = {"--folder", "--storage", "--state", "--gin.NAME=VALUE", "--members", "--quantize"}
    named = re.compile(
        r"^(also )?(write|the same|a file|a new file|folder|path|file|text, or)|\b(to|from) this file\b", re.IGNORECASE
    )
    missing = [
        (file, flag, metavar)
        for file, flag, metavar, text in told
        if named.search(text) and metavar not in flags.PATHS and flag not in elsewhere
    ]
    assert not missing and len(told) > 60
    assert os.path.expanduser("~") != "~"
