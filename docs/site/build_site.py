"""Builds the documentation as a site: `python docs/site/build_site.py [OUT]`, by default in build/site; needs no network.

The pages are those of docs/, README.md and its neighbours, the scripts of examples/, and the reference, which is made
from the code. A link that leads nowhere, a page that the navigation lacks and any warning of zensical end the build.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator

import reference

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
_BESIDE = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
# The pages lie beside README.md here, which is index.md, and the files of examples/ are on one page.
_LINKS = {
    **{f"../{name}": name for name in _BESIDE},
    "docs/": "",
    "../examples/extend)": "examples.md#extend)",
    "../examples)": "examples.md)",
    "examples)": "examples.md)",
    "README.md": "index.md",
    "../README.md": "index.md",
}
_EXAMPLES = "# Examples\n\nEach script is read in five minutes and runs on a laptop. `make notebooks` makes notebooks of them.\n"


def examples_page() -> str:
    """The page of the examples: scripts whole, and the names of the files to extend capibara by."""
    parts = [_EXAMPLES]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f'## {path.stem}\n\n```python title="examples/{path.name}"\n{path.read_text()}```\n')
    names = sorted(path.name for path in (ROOT / "examples" / "extend").glob("my_*.py"))
    parts.append(
        "## extend\n\nIn `examples/extend`, each with its Gin file: " + ", ".join(f"`{name}`" for name in names) + ".\n"
    )
    return "\n".join(parts)


def write_pages(folder: pathlib.Path) -> None:
    """Writes all pages and pictures of the site."""
    written = {"index.md": (ROOT / "README.md").read_text(), "examples.md": examples_page(), **reference.pages()}
    written |= {name: (ROOT / name).read_text() for name in _BESIDE}
    written |= {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for there, here in _LINKS.items():
            text = text.replace(f"]({there}", f"]({here}")
        path.write_text(text)
    files = [path for ending in ("png", "svg") for path in (ROOT / "docs").glob(f"*.{ending}")]
    for path in [*files, HERE / "site.css", HERE / "site.js", ROOT / "LICENSE"]:
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "docs" / "manifests", folder / "manifests")


def _named(nav: list[object]) -> Iterator[str]:
    """The pages that a navigation names."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from _named(value if isinstance(value, list) else [value])


def configuration(pages: pathlib.Path) -> str:
    """zensical.toml with the pages of the reference.

    Raises:
      SystemExit: the navigation lacks a page.
    """
    text = (HERE / "zensical.toml").read_text()
    gin = [f"reference/{room}.md" for room in reference._ROOMS]
    verbs = ["reference/commands/index.md", *(f"reference/commands/{verb}.md" for verb in sorted(reference.VERBS))]
    tree = [
        {"Gin and Python names": ["reference/index.md", *gin]},
        {"Commands": verbs},
        "reference/python.md",
    ]
    entries = ", ".join(
        json.dumps(entry)
        if isinstance(entry, str)
        else "".join(f'{{ "{name}" = {json.dumps(value)} }}' for name, value in entry.items())
        for entry in tree
    )
    text = text.replace('"REFERENCE"', entries)
    missing = {str(path.relative_to(pages)) for path in pages.rglob("*.md")} - {
        *_named(tomllib.loads(text)["project"]["nav"])
    }
    if missing:
        raise SystemExit(f"error: docs/site/zensical.toml does not name {', '.join(sorted(missing))}: add them to nav")
    return text


def build(out: pathlib.Path) -> None:
    """Builds the site in `out`, which it replaces.

    Raises:
      SystemExit: the navigation lacks a page, or zensical warns of something.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_pages(folder / "pages")
        (folder / "zensical.toml").write_text(configuration(folder / "pages"))
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        done = subprocess.run(command, cwd=folder, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}error: zensical has warned: mend the pages that it names")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "site", out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=ROOT / "build" / "site")
    target = parser.parse_args().out
    build(target)
    print(f"built {len([*target.rglob('*.html')])} pages: open {target / 'index.html'}")
