"""Manifests: the record of a checkpoint's origin."""

import json
import subprocess

import capibara
from capibara.checkpoints import manifest


def git(folder, *command):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *identity, *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_versions_and_configuration():
    found = json.loads(json.dumps(manifest.provenance("a = 1")))
    assert (found["capibara"], found["config"], found["devices"]) == (capibara.__version__, "a = 1", "8 x cpu")
    assert found["packages"]["jax"].startswith("0.")


def test_the_commit_and_whether_files_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert manifest.commit() is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a.gin").write_text("a = 1")
    git(tmp_path, "add", "a.gin")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert manifest.commit() == head
    (tmp_path / "a.gin").write_text("a = 2")
    assert manifest.commit() == f"{head}+"


def test_without_git_nothing_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert manifest.commit() is None
