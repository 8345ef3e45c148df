"""The tables of docs/migrating_from_*.md name classes, values, functions and Gin files that are there."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

import capibara as cb
from capibara.config.search import defining_modules

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ["maxtext", "trl", "keras"]


def cells(page: str) -> list[str]:
    """The cells of the columns on capibara."""
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| --")]
    return [cell for row in rows for cell in row.strip("| ").split(" | ")[1:]]


@pytest.mark.parametrize("name", PAGES)
def test_the_names_of_the_tables_are_there(name):
    page = (ROOT / "docs" / f"migrating_from_{name}.md").read_text()
    text = "\n".join(cells(page))
    owners = re.findall(r"`(?:cb\.)?([A-Z]\w+)\.[a-z]\w*", text)  # tests/test_docs.py looks at their fields
    assert len(owners) >= 30 and {*owners} <= {*defining_modules()}
    for function in re.findall(r"\bcb\.(\w+)", text):
        assert hasattr(cb, function), function
    for file in re.findall(r"`((?:models|runs|tasks)/\w+\.gin)`", page):
        assert (ROOT / "gin" / file).exists(), file


@pytest.mark.parametrize("name", PAGES)
def test_the_values_of_the_tables_are_taken(name):
    page = (ROOT / "docs" / f"migrating_from_{name}.md").read_text()
    for owner, field, value in re.findall(r'`([A-Z]\w+)\.(\w+) = ("\w+"|\d+)`', "\n".join(cells(page))):
        cls = getattr(cb, owner)
        required = [one.name for one in dataclasses.fields(cls) if one.default is one.default_factory]
        values = {one: 2 if one == "num_heads" else 64 for one in required} | {
            field: value.strip('"') if '"' in value else int(value)
        }
        assert getattr(cls(**values), field) == values[field], (owner, field, value)
