"""Files that a verb writes its results to."""

from __future__ import annotations

import pathlib

import pytest

from capibara import outputs
from capibara.types import UserError


def test_a_check_leaves_nothing_behind(tmp_path):
    outputs.check_writable(str(tmp_path / "new" / "folder" / "a.json"), str(tmp_path / "new" / "b.json"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "a.json").write_text("kept")
    outputs.check_writable(str(tmp_path / "a.json"))
    assert (tmp_path / "a.json").read_text() == "kept"
    with pytest.raises(UserError, match="is named for two outputs"):
        outputs.check_writable(str(tmp_path / "b"), str(tmp_path / "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_check_keeps_what_another_process_writes_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.json"
    write = outputs._write

    def other_writes(name, text, mode):
        write(name, text, mode)
        pathlib.Path(name).write_text("of another")

    monkeypatch.setattr(outputs, "_write", other_writes)
    outputs.check_writable(str(path))
    assert path.read_text() == "of another"
