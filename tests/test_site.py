"""The site: it is built without a warning, its links lead somewhere, and the reference has what the code has."""

from __future__ import annotations

import dataclasses
import html.parser
import importlib
import inspect
import json
import pathlib
import re
import sys

import pytest

import capibara as cb
from capibara.__main__ import VERBS
from capibara.config.search import defining_modules

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def builder():
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    yield importlib.import_module("build_site")
    sys.path.remove(str(ROOT / "docs" / "site"))


@pytest.fixture(scope="module")
def site(builder, tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "out"
    builder.build(out)
    return out


@pytest.fixture(scope="module")
def reference(builder):
    return builder.reference.pages()


class Page(html.parser.HTMLParser):
    """The links and anchors of a page, and what a browser loads with it."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("img", "script", "iframe", "source") and values.get("src"):
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values["href"])


def test_links_and_anchors_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    for path, page in pages.items():
        for target in page.loaded:
            assert not re.match(r"(https?:)?//", target), f"{path.name} loads {target}"
            assert (path.parent / target.partition("?")[0]).exists(), f"{path.name} loads {target}"
        for target in page.links:
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            there = (path.parent / name).resolve() if name else path
            assert there.exists(), f"{path.name} links to {target}"
            assert there not in pages or anchor in pages[there].ids, f"{path.name} links to {target}"


def test_the_search_has_the_text_of_guides_and_of_the_reference(site):
    entries = json.loads((site / "search.json").read_text())["items"]
    text = " ".join(f"{entry['location']} {entry['text']}" for entry in entries)
    for words in ("reference/training.html#trainer", "init_from", "capibara finetune", "--start_over"):
        assert words in text, words


@pytest.mark.parametrize(
    ("page", "text", "message"),
    [
        ("examples.md", "# Examples\n\n[a](nowhere.md)\n", "page does not exist"),
        ("examples.md", "# Examples\n\n[a](python.md#nowhere)\n", "anchor does not exist"),
        ("lost.md", "# Lost\n", "does not name lost.md"),
    ],
)
def test_a_link_to_nowhere_and_a_page_without_a_place_end_the_build(
    page, text, message, builder, reference, monkeypatch, tmp_path
):
    monkeypatch.setattr(builder.reference, "pages", lambda: {**reference, page: text})
    with pytest.raises(SystemExit, match=message):
        builder.build(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_reference_has_every_configurable_with_every_field(reference):
    listed = {*re.findall(r" as (\w+)$", (ROOT / "capibara" / "__init__.pyi").read_text(), re.MULTILINE)}
    modules = defining_modules()
    assert {*modules} <= listed
    for name in listed:
        page = f"reference/{modules[name].split('.')[1]}.md" if name in modules else "reference/python.md"
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", reference[page], re.MULTILINE | re.DOTALL)
        assert section, f"{page} lacks {name}"
        item = getattr(cb, name)
        if name in modules and dataclasses.is_dataclass(item):
            rows = re.findall(r"^\| <code>([^|]*)</code> \| <code>.+</code> \| .+ \| .+ \|$", section[1], re.MULTILINE)
            names = [field.name.replace("_", "&#95;") for field in dataclasses.fields(item) if field.init]
            assert rows == names, name


def test_the_reference_has_every_verb_with_every_flag(reference, builder):
    commands = [*builder.reference.commands()]
    assert {argv[0] for argv in commands} == {*VERBS} and len(commands) > 40
    for argv in commands:
        page = reference[f"reference/commands/{argv[0]}.md"]
        assert re.search(rf"^#+ capibara {' '.join(argv)}$", page, re.MULTILINE), argv
    source = (ROOT / "capibara" / "cli" / "train.py").read_text()
    flags = re.findall(r'add_argument\(\s*"(--\w+)', source)
    assert len(flags) >= 4
    for flag in flags:
        assert flag.replace("_", "&#95;") in reference["reference/commands/train.md"], flag


def test_the_reference_has_the_methods_of_a_model_and_the_parameters_of_a_function(reference):
    page = reference["reference/python.md"]
    for method in ("generate", "chat", "logits", "embed", "score", "save"):
        assert f"### LanguageModel.{method}\n" in page, method
    finetune = page.partition("## finetune\n")[2].partition("\n## ")[0]
    for name in inspect.signature(cb.finetune).parameters:
        assert f"| <code>{name.replace('_', '&#95;')}</code> |" in finetune, name
    assert "| <code>hbm&#95;bytes</code> | memory of a chip, predicted. |" in page


def test_a_field_without_a_meaning_ends_the_build(builder, monkeypatch):
    monkeypatch.setattr(cb.Plan, "__doc__", "Mesh and batch.")
    with pytest.raises(KeyError, match="Plan.batch_size"):
        builder.reference.configurable_pages()


def test_the_script_that_looks_at_the_site_names_what_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "browser"))
    screens = importlib.import_module("site_screens")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert screens.main([str(tmp_path), str(tmp_path / "out"), "--modules", str(tmp_path), "--pages=index"]) == 2
    error = capsys.readouterr().err
    assert "apt-get install -y chromium" in error and "index.html of the site: make site" in error


def test_the_script_that_looks_at_the_site_looks_at_eight_pages(site, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "browser"))
    pages = importlib.import_module("site_screens").PAGES.split(",")
    assert len(pages) == 8 and all((site / f"{name}.html").is_file() for name in pages)
