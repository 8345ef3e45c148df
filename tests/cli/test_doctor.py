"""`capibara doctor` says what is here, what is missing, and the command that installs it."""

from __future__ import annotations

import json
import pathlib
import tomllib

import jax
import pytest

from capibara.cli import doctor
from capibara.core import extras
from capibara.multihost import exits

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def test_it_names_devices_packages_and_what_an_extra_lacks(monkeypatch, capsys, tmp_path):
    installed = extras.version
    monkeypatch.setattr(extras, "version", lambda name: None if name in ("gguf", "wandb") else installed(name) or "1.0")
    assert exits.run_verb(doctor.main, [f"--json={tmp_path}/doctor.json"]) == 0
    shown = capsys.readouterr().out
    assert f"{jax.device_count()} x cpu" in shown and f"jax {jax.__version__}" in shown
    states = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  ")}
    assert states["gguf"].endswith("lacks gguf") and states["wandb"].endswith("lacks wandb")
    assert states["serve"].endswith("installed")
    assert shown.endswith(f"to install one: {extras.install_command('gguf')}\n")
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["missing"]["gguf"] == ["gguf"] and report["missing"]["serve"] == []
    assert not {"command", "git", "host"} & report.keys()  # nothing about whose machine it is


def test_every_extra_is_explained():
    known = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*doctor.USES} == {*known} - {"dev"}


@pytest.mark.parametrize("extra", ["gguf", "serve", "tpu"])
def test_an_installed_distribution_says_the_same(monkeypatch, extra):
    import importlib.metadata

    wanted = extras.missing(extra)
    lines = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    metadata = [f'{line}; extra == "{name}"' for name, each in lines.items() for line in each if ";" not in line]
    monkeypatch.setattr(extras, "CHECKOUT", pathlib.Path("/usr/lib/site-packages"))
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: metadata)
    assert extras.missing(extra) == wanted

    def gone(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", gone)
    assert extras.missing(extra) is None


def test_a_report_that_cannot_be_written_is_one_line(capsys, tmp_path):
    assert exits.run_verb(doctor.main, [f"--json={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
