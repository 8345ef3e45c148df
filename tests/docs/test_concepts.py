"""The pictures of docs/concepts.md are those that their script draws, and have every room of the code."""

from __future__ import annotations

import importlib
import pathlib
import sys
import xml.etree.ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pictures():
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    yield importlib.import_module("pictures")
    sys.path.remove(str(ROOT / "docs" / "site"))


def words(svg: str) -> list[str]:
    """The lines of text of a picture."""
    return [item.text or "" for item in xml.etree.ElementTree.fromstring(svg).iter() if item.tag.endswith("}text")]


def test_the_pictures_are_up_to_date_and_shown(pictures):
    page = (ROOT / "docs" / "concepts.md").read_text()
    for name, draw in pictures.PICTURES.items():
        path = ROOT / "docs" / f"concept_{name}.svg"
        assert path.read_text() == draw(), f"run python docs/site/pictures.py: {path.name} is old"
        assert f"]({path.name})" in page and words(draw())


def test_every_room_is_drawn_above_what_it_imports(pictures):
    folders = {path.parent.name for path in (ROOT / "capibara").glob("*/__init__.py")} - {"cli", "api"}
    assert folders <= {*words(pictures.rooms())} and len(folders) > 20
    for room, others in pictures.imports().items():
        assert all(pictures.level(other) < pictures.level(room) for other in others), room
    assert "core" in pictures.imports()["training"] and pictures.level("core") == 0
