"""The tables of docs/migrating_from_*.md name classes, values, functions and Gin files that are there."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re

import pytest

import capibara as cb
from capibara.api import finetuning
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


def options_of_trl() -> list[tuple[str, str]]:
    """Each option of the table on TRL that `finetune` does not have, with what its row says."""
    page = (ROOT / "docs" / "migrating_from_trl.md").read_text().split("## TRL\n")[1].split("## PEFT\n")[0]
    rows = [line.strip("| ").partition(" | ") for line in page.splitlines() if line.startswith("| ")]
    known = {*inspect.signature(cb.finetune).parameters, *(field.name for field in dataclasses.fields(cb.Trainer))}
    return [
        (name, rest)
        for first, _, rest in rows
        for name in re.findall(r"`([a-z][a-z_0-9]*)`", first)
        if name not in known
    ]


def methods_of(name: str, row: str) -> list[str]:
    if "Kto." in row:
        return ["kto"]
    return ["grpo"] if "Grpo" in row or "rollout" in row else ["dpo"]


def test_an_option_of_trl_is_answered_with_the_name_of_its_row(tmp_path):
    options = options_of_trl()
    assert len(options) > 40
    for name, row in options:
        for method in methods_of(name, row):
            with pytest.raises(cb.UserError, match=f"has no option '{name}': ") as caught:
                cb.finetune("m", [], str(tmp_path / "run"), method=method, **{name: 1})
            hint = str(caught.value).partition(f"'{name}': ")[2]
            assert any(word in row for word in re.findall(r"[\w./]+", hint) if len(word) > 2 and word != "bindings"), (
                hint
            )


@pytest.mark.parametrize(
    "table", ["_BINDINGS", "_OF_REWARDS", *(f"_OF_PREFERENCES.{name}" for name in finetuning._OF_PREFERENCES)]
)
def test_the_fields_of_the_answers_are_there(table):
    name, _, method = table.partition(".")
    fields = getattr(finetuning, name)
    for path in (fields[method] if method else fields).values():
        owner, _, field = path.rpartition("/")[2].partition(".")
        if field:  # else a macro of the preset
            assert field in {item.name for item in dataclasses.fields(getattr(cb, owner))}, path
        else:
            assert f"%{owner}" in (ROOT / "gin" / "runs" / "grpo.gin").read_text()
