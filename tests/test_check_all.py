"""The runner of all checks: what it runs, and what it makes of the outcome."""

from __future__ import annotations

import pathlib
import sys

import pytest

from tests import check_all


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.setattr(check_all, "LOGS", tmp_path)
    return tmp_path


def test_options_choose_the_checks(tmp_path):
    options = check_all.parsed(
        ["--only=heavy,peers,wheel", "--pythons=sh", "--parts=2", f"--peers=t5x={sys.executable}"]
    )
    names = [check.name for check in check_all.checks(options, tmp_path)]
    assert names == ["make test-heavy 1/2", "make test-heavy 2/2", "make test-peer t5x", "wheel, sh"]


def test_the_wheel_of_a_python_by_its_path_has_an_environment_of_its_own(tmp_path):
    (check,) = check_all.checks(check_all.parsed(["--only=wheel", f"--pythons={sys.executable}"]), tmp_path)
    environments = [command[-1] for command in check.commands if command[1:3] == ["-m", "venv"]]
    assert len(environments) == 1 and environments[0].startswith(str(tmp_path))


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--only=tests", "--only has 'tests', must be of test, heavy, peers, site, wheel"),
        ("--pythons=python2.0", "--pythons has 'python2.0', which is not installed"),
        ("--peers=t5x=/nowhere", "--peers has t5x='/nowhere', must be the python"),
        ("--peers=t5x=/", "--peers has t5x='/', must be the python"),
        ("--parts=0", "--parts is 0, must be at least 1"),
        ("--only=peers", "--peers names none: nothing would be checked"),
    ],
)
def test_a_wrong_option_is_one_line(flag, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        check_all.parsed(["--pythons=sh", flag])
    assert message in capsys.readouterr().err


def test_a_check_fails_with_its_first_command_that_fails(logs):
    failing = [sys.executable, "-c", "print('no'); raise SystemExit(3)"]
    never = [sys.executable, "-c", f"import pathlib; pathlib.Path({str(logs / 'ran')!r}).touch()"]
    result = check_all.run(check_all.Check("a check", [failing, never]))
    assert not result.passed and not (logs / "ran").exists()
    assert (logs / "a_check.log").read_text() == "no\n"
    assert "FAILED" in check_all.row(result)


def test_the_table_has_the_counts_of_pytest(logs):
    lines = "= 3 failed, 12 passed, 4 skipped in 9.12s =\n13 passed, 1 skipped in 2.00s (0:00:02)"
    result = check_all.run(check_all.Check("tests", [[sys.executable, "-c", f"print({lines!r})"]]))
    assert result.passed and result.counts == "13 passed, 1 skipped"
    assert check_all.row(result).split()[:2] == ["tests", "passed"]


def test_its_targets_are_those_of_the_makefile():
    targets = {line.split(":")[0] for line in pathlib.Path(check_all.CHECKOUT, "Makefile").read_text().splitlines()}
    assert {"test", "test-heavy", "test-peer", "site"} <= targets
