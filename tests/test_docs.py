"""README.md and docs/: links lead to a file, commands have flags, Gin files and parameters that are there."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
import shlex
import textwrap

import pytest

import capibara as cb
from capibara import config
from capibara.cli import launch
from capibara.cli.arguments import flags
from capibara.cli.composition import pretrained
from capibara.config.search import defining_modules

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))


class Parsed(Exception):
    """Carries what a command line says, instead of doing it."""


def commands() -> list[tuple[pathlib.Path, str, str]]:
    """Page, folder and command of each indented `capibara VERB`, lines that end with a backslash joined.

    The folder is that of a `cd` before it in the same block; "" where there is none.
    """
    found = []
    for page in PAGES:
        for block in re.findall(r"(?:^ {4}.+\n)+", page.read_text(), re.MULTILINE):
            folder = ""
            for line in block.replace("\\\n", " ").splitlines():
                folder = line.split()[1] if line.strip().startswith("cd ") else folder
                if line.strip().startswith(("python -m capibara.", "capibara ")):
                    found.append((page, folder, " ".join(line.partition("  #")[0].split())))
    return found


COMMANDS = commands()


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
    for name in re.findall(r"`((?:capibara|tests|benchmarks|docs|gin)/[\w./]+\.\w+)", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_that_are_named_are_there(page):
    for owner, name in re.findall(r"`(?:cb\.)?([A-Z]\w+)\.([a-z]\w*)", page.read_text()):
        if owner in defining_modules():
            cls = getattr(cb, owner)
            fields = {field.name for field in dataclasses.fields(cls)}
            assert name in fields or hasattr(cls, name), f"{page.name} names {owner}.{name}"


def test_the_readme_is_short_and_names_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in text]


READ_MODELS = ("train", "finetune", "plan", "prove", "prepare")  # verbs whose Gin files may name MODEL and TEACHER


def test_there_are_commands():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("page", "folder", "command"), COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_is_one_that_the_verb_takes(page, folder, command, monkeypatch, tmp_path):
    """To the point where it would begin its work: flags, the Gin files, and every name that a binding has."""
    monkeypatch.chdir(ROOT / folder if folder else tmp_path)
    for name, text in re.findall(r"^ {4}# (\w+\.\w+)\n((?: {4}.+\n)+)", page.read_text(), re.MULTILINE):
        (tmp_path / name).write_text(textwrap.dedent(text))  # the reader's own
    argv = shlex.split(command.removeprefix("python -m capibara.").removeprefix("capibara "))
    argv = argv[: argv.index("|")] if "|" in argv else argv
    argv = argv[argv.index("--") + 1 :] if "--" in argv else argv
    verb, *argv = argv
    parse = flags.parse_arguments

    def parsed(parser, argv=None):
        raise Parsed(parse(parser, argv))

    def opened(args):
        raise Parsed(args)

    if verb == "launch" and argv[0] in ("list", "status", "logs", "cancel", "resume", "manage", "recover"):
        place = "recover" if argv[0] == "recover" else "managed"
        monkeypatch.setattr(f"capibara.cli.launching.{place}.Opened", opened)
        with pytest.raises(Parsed):
            launch.main(argv)
        return
    module = importlib.import_module(f"capibara.cli.{verb.replace('-', '_')}")
    monkeypatch.setattr(module if hasattr(module, "parse_arguments") else flags, "parse_arguments", parsed)
    with pytest.raises(Parsed) as found:
        module.main(argv)
    (args,) = found.value.args
    config.reset()
    try:
        config.parse(
            [*(args.run if verb == "launch" else ()), *args.gin_file],
            args.gin_bindings,
            args.gin_search_paths,
            of_readers=(pretrained.MODEL, pretrained.TEACHER) if verb in READ_MODELS else (),
        )
    finally:
        config.reset()
