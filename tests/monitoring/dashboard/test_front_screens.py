"""The script that looks at the dashboard in a browser says what it lacks."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "browser/dashboard_screens.py"


@pytest.fixture
def screens():
    spec = importlib.util.spec_from_file_location("dashboard_screens", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_not_installed_is_named_with_its_command(screens, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert screens.main([str(tmp_path / "out"), "--modules", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "apt-get install -y chromium" in said
    assert f"npm install --prefix {tmp_path} puppeteer-core axe-core" in said
    assert "nodejs" in said


def test_nothing_is_missing_where_all_is_installed(screens, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    for name in screens.PACKAGES:
        (tmp_path / "node_modules" / name).mkdir(parents=True)
    assert screens.missing(tmp_path, "/usr/bin/chromium") == []
