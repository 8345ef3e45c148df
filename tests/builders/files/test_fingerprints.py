"""Fingerprints depend on names and contents, and on nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess

import pytest

import capibara
from capibara.builders.files import fingerprints
from capibara.core.types import UserError


def test_a_file_is_known_by_its_size_and_hash(tmp_path):
    content = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(content)
    found = fingerprints.hash_file(tmp_path / "a")
    assert (found.path, found.bytes) == (str(tmp_path / "a"), 3_000_000)
    assert found.sha256 == hashlib.sha256(content).hexdigest()


def test_inputs_are_sorted_and_unique(tmp_path):
    paths = [tmp_path / f"{i:02}" for i in range(20)]
    for path in paths:
        path.write_text(path.name)
    found = fingerprints.inputs_of([*reversed(paths), paths[3]])
    assert [one.path for one in found] == [str(path) for path in paths]


def test_an_input_that_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a pipe, must be a regular file"):
        fingerprints.inputs_of([tmp_path / "pipe"])


def test_a_data_set_is_known_by_names_and_contents():
    hashes = {"a": "1", "b": "2"}
    assert fingerprints.of_files(hashes) == fingerprints.of_files({"b": "2", "a": "1"})
    others = [{}, {"a": "1"}, {"a": "2", "b": "1"}, {"a": "1", "c": "2"}, {"a:1\n1:b": "2"}]
    assert len({fingerprints.of_files(one) for one in [hashes, *others]}) == 1 + len(others)


def test_equal_values_have_equal_text():
    one = fingerprints.canonical({"b": [1, {"z": "ü", "a": None}], "a": 1.5})
    assert one == fingerprints.canonical({"a": 1.5, "b": [1, {"a": None, "z": "ü"}]})
    assert one == '{"a":1.5,"b":[1,{"a":null,"z":"ü"}]}'
    fingerprints.canonical({"half": "\ud800"}).encode()
    with pytest.raises(ValueError):
        fingerprints.canonical({"a": float("nan")})


@pytest.mark.parametrize("changed", [False, True])
def test_the_version_of_a_checkout_is_its_commit(tmp_path, monkeypatch, changed):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "capibara").mkdir()
    module = tmp_path / "capibara" / "__init__.py"
    module.touch()
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    if changed:
        module.write_text("x = 1")
    monkeypatch.setattr(capibara, "__file__", str(module))
    found = fingerprints.code_version.__wrapped__()
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert found == fingerprints.CodeVersion(package=capibara.__version__, commit=commit, is_changed=changed)


def test_an_installed_package_has_its_version_alone(tmp_path, monkeypatch):
    (tmp_path / "site-packages" / "capibara").mkdir(parents=True)
    monkeypatch.setattr(capibara, "__file__", str(tmp_path / "site-packages/capibara/__init__.py"))
    found = fingerprints.code_version.__wrapped__()
    assert found == fingerprints.CodeVersion(package=capibara.__version__, commit=None, is_changed=False)
