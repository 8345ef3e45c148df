"""The pages of the dashboard, without a browser: no markup from data, nothing from elsewhere, colours that can be told apart."""

from __future__ import annotations

import html.parser
import itertools
import pathlib
import re

import pytest

from capibara.monitoring.dashboard import app
from capibara.monitoring.metrics_file import goodput

STATIC = pathlib.Path(app.__file__).resolve().parent / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
SHEETS = sorted(STATIC.glob("*.css"))
SERVED = re.compile(r"[a-z0-9_.-]+\.(html|css|js|svg)")
RUN_COLOURS = 8


def text_of(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


class Page(html.parser.HTMLParser):
    """The tags of a page, and the text within scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline += data.strip()


INDEX = Page(text_of(STATIC / "index.html"))


def test_the_folder_is_flat_and_its_names_are_served():
    assert SCRIPTS and SHEETS
    assert not [path.name for path in STATIC.iterdir() if not path.is_file() or not SERVED.fullmatch(path.name)]


def test_the_page_has_no_inline_script_and_no_inline_style():
    assert not INDEX.inline
    assert not [tag for tag, attrs in INDEX.tags for name in attrs if name == "style" or name.startswith("on")]


def test_the_page_names_its_language_width_and_landmarks():
    tags = [tag for tag, _ in INDEX.tags]
    assert ("html", {"lang": "en"}) in INDEX.tags
    assert {"header", "nav", "main", "title"} <= {*tags}
    viewport = next(attrs["content"] for tag, attrs in INDEX.tags if attrs.get("name") == "viewport")
    assert viewport == "width=device-width, initial-scale=1", "a fixed scale would forbid to enlarge"


@pytest.mark.parametrize("path", [STATIC / "index.html", *SCRIPTS, *SHEETS], ids=lambda path: path.name)
def test_nothing_is_loaded_from_elsewhere(path):
    text = text_of(path).replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://[^\s\"')]+|//[a-z0-9-]+\.[a-z]{2,}/", text)


FORBIDDEN = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\(|new Function|setAttribute\(\"style\"|srcdoc|javascript:"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_texts_never_become_markup_or_code(path):
    assert not re.findall(FORBIDDEN, text_of(path))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_imports_name_what_is_exported(path):
    for names, module in re.findall(r"^import ([^;]+?) from \"\./([\w.-]+)\";$", text_of(path), re.MULTILINE):
        exported = re.findall(
            r"^export (?:async )?(?:function|const|class) (\w+)", text_of(STATIC / module), re.MULTILINE
        )
        wanted = re.findall(r"\w+", names) if names.startswith("{") else []
        assert {*wanted} <= {*exported}, f"{path.name} imports from {module}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_imported_names_are_used(path):
    text = text_of(path)
    for names in re.findall(r"^import ([^;]+?) from", text, re.MULTILINE):
        for name in re.findall(r"\w+", names.replace("* as", "")):
            assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{path.name} does not use {name}"


def test_every_script_is_reached_from_the_page():
    wanted, reached = [attrs["src"].rpartition("/")[2] for tag, attrs in INDEX.tags if tag == "script"], set[str]()
    while wanted:
        name = wanted.pop()
        if name not in reached:
            reached.add(name)
            wanted += re.findall(r"from \"\./([\w.-]+)\"", text_of(STATIC / name))
    assert reached == {path.name for path in SCRIPTS}


def test_files_that_are_named_are_there():
    texts = [text_of(path) for path in [STATIC / "index.html", *SCRIPTS, *SHEETS]]
    named = {name for text in texts for name in re.findall(r"/static/([\w.-]+)", text)}
    assert named - {"plotly.min.js"} <= {path.name for path in STATIC.iterdir()}
    assert "plotly.min.js" in named


def test_the_addresses_that_are_asked_for_are_routes():
    routes = re.findall(r"Route\(\"(/api/[^\"]+)\"", pathlib.Path(app.__file__).read_text())
    patterns = [re.sub(r"\{\w+\}", "[^/?]+", route) for route in routes]
    asked = {
        re.sub(r"\$\{[^}]*\}", "x", address)
        for path in SCRIPTS
        for address in re.findall(r"[\"`](/api/[^\"`?]+)", text_of(path))
    }
    assert len(asked) > 8
    assert not [address for address in asked if not any(re.fullmatch(one, address) for one in patterns)]


def test_the_parts_of_the_time_have_looks_of_their_own():
    (listed,) = re.findall(r"const PART_SLOTS = \{(.*?)\}", text_of(STATIC / "parts.js"), re.DOTALL)
    slots = {name.strip(' "'): int(slot) for name, slot in re.findall(r"([\w \"]+): (\d+)", listed)}
    assert {*slots} == {name.replace("_", " ") for name in goodput.CATEGORIES}
    assert len({*slots.values()}) == len(slots) and max(slots.values()) <= 2 * RUN_COLOURS


def test_classes_of_the_style_sheets_are_used():
    sheets = re.sub(r"url\([^)]*\)|\d\.\d+|/\*.*?\*/", "", "\n".join(map(text_of, SHEETS)), flags=re.DOTALL)
    classes = {*re.findall(r"\.([a-z][\w-]*)", sheets)}
    used = "\n".join(text_of(path) for path in [STATIC / "index.html", *SCRIPTS])
    assert len(classes) > 80
    assert not [name for name in sorted(classes) if not re.search(rf"(?<![\w-]){name}(?![\w-])", used)]


def tokens(theme: str) -> dict[str, str]:
    """Custom properties of a theme that are plain colours."""
    sheet = text_of(STATIC / "base.css")
    light, dark = (
        re.search(pattern, sheet, re.DOTALL)
        for pattern in (r":root \{(.+?)\}", r":root\[data-theme=\"dark\"\] \{(.+?)\}")
    )
    assert light and dark
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light[1]))
    return found | (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark[1])) if theme == "dark" else {})


def linear(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def contrast(one: str, two: str) -> float:
    """The contrast of two colours as WCAG 2 defines it."""
    low, high = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour))) for colour in (one, two))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_can_be_read(theme):
    found = tokens(theme)
    pairs = [(ink, paper) for ink in ("ink", "ink-2", "muted", "accent", "bad") for paper in ("bg", "surface", "hover")]
    pairs += [(tone, f"{tone}-soft") for tone in ("good", "warn", "bad", "accent")] + [("on-accent", "accent")]
    poor = {pair: contrast(found[pair[0]], found[pair[1]]) for pair in pairs}
    assert not {pair: round(value, 2) for pair, value in poor.items() if value < 4.5}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_edges_stand_out(theme):
    found = tokens(theme)
    lines = [f"series-{slot}" for slot in range(1, RUN_COLOURS + 1)] + ["edge"]
    assert not {name: round(contrast(found[name], found["surface"]), 2) for name in lines
                if contrast(found[name], found["surface"]) < 3.0}  # fmt: skip


# What people without one kind of cone see, of linear RGB (Machado, Oliveira and Fernandes, 2009; severity 1).
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(colour: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as it is seen."""
    seen = [min(1, max(0, sum(w * c for w, c in zip(row, linear(colour))))) for row in matrix]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(w * c for w, c in zip(row, seen)) / white for row, white in zip(to_xyz, (0.9505, 1.0, 1.089))]
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN)
def test_the_first_colours_of_runs_differ_for_all_eyes(theme, eyes):
    found = tokens(theme)
    colours = {slot: lab(found[f"series-{slot}"], SEEN[eyes]) for slot in range(1, 5)}
    apart = {
        (one, two): sum((a - b) ** 2 for a, b in zip(colours[one], colours[two])) ** 0.5
        for one, two in itertools.combinations(colours, 2)
    }
    assert not {pair: round(value, 1) for pair, value in apart.items() if value < 10}


def test_those_who_want_less_motion_get_none():
    sheets = "\n".join(map(text_of, SHEETS))
    assert re.search(r"prefers-reduced-motion: reduce\) \{\s+\*,[^}]*animation: none !important", sheets)
