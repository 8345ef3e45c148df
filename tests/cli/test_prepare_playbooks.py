"""`capibara prepare playbooks`: settings from Gin, what it prints, and its exit codes."""

from __future__ import annotations

import json

import pytest

from capibara.multihost.exits import EXIT_SKIPPED, EXIT_USER_ERROR, run_verb
from capibara.prepare import main

for _package in ("rensa", "detect_secrets", "openlineage.client"):
    pytest.importorskip(_package)


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.md"
    path.write_text(
        "## S\n[a-1] helpful=9 harmful=0 :: Look at the plan first\n[a-2] helpful=1 harmful=0 :: Add an index\n"
    )
    return path


def run(*arguments):
    return run_verb(main, ["playbooks", *map(str, arguments), "--num_workers=1"])


def test_settings_come_from_gin(book, tmp_path, capfd):
    (tmp_path / "best.gin").write_text(
        "BulletFilter.min_quality = 0.5\nBulletRanking.limits = {'s': 1}\nBulletRanking.domain_from = 'section'\n"
        "PlaybookChats.kinds = ('section',)\n"
    )
    assert run(book, f"--out={tmp_path / 'out'}", f"--gin_file={tmp_path / 'best.gin'}", "--json") == 0
    manifest = json.loads(capfd.readouterr().out)
    assert (manifest["kind"], manifest["config"]["bullets"]["min_quality"]) == ("playbooks", 0.5)
    assert {name: manifest["counts"][name] for name in ("bullets", "conversations", "excluded by min_quality")} == {
        "bullets": 1, "conversations": 1, "excluded by min_quality": 1}  # fmt: skip
    assert (tmp_path / "out/playbooks/s.md").exists()


def test_skipped_input_has_an_exit_code_of_its_own(book, tmp_path, capfd):
    book.write_text(book.read_text() + "[a-3] helpful=many harmful=0 :: Bad\n")
    assert run(book, f"--out={tmp_path / 'out'}") == EXIT_SKIPPED
    captured = capfd.readouterr()
    assert f"{book}:4: malformed: a bullet whose helpful is no whole number" in captured.err
    assert "fingerprint" in captured.out and "bullets read" in captured.out
    assert run(book, f"--out={tmp_path / 'out'}", "--allow_skipped") == 0


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num_workers=-1"], "--num_workers (-1) must be at least 0"),
        (["--gin.AgentFilter.min_success_rate=3.0"], "AgentFilter.min_success_rate (3.0) must be from 0 to 1"),
        (["--gin.BulletFilter.min_vote=3"], "min_vote"),
        (["--gin.AgentFilter.unknown='maybe'"], "unknown"),
    ],
)
def test_mistakes_are_one_line(book, tmp_path, capfd, flags, words):
    code = run_verb(main, ["playbooks", str(book), f"--out={tmp_path / 'out'}", *flags])
    error = capfd.readouterr().err
    assert (
        code == EXIT_USER_ERROR
        and words in error
        and [line[:7] for line in error.splitlines()][-1:] == ["error: "]
        and error.count("error: ") == 1
    )


def test_a_missing_file_is_one_line(tmp_path, capfd):
    assert run(tmp_path / "no.md", f"--out={tmp_path / 'out'}") == EXIT_USER_ERROR
    assert "matches no file" in capfd.readouterr().err
