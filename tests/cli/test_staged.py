"""What a host of a job does: it reports how its verb has ended, unless its system starts it again."""

import pytest

from capibara.cli import launch
from capibara.cli.launching import staged
from capibara.core.types import TryAgain, UserError
from capibara.jobs import reports
from capibara.multihost import exits


def ended_with(monkeypatch, tmp_path, result):
    """The exit code of `launch staged` whose verb ends with a code or an error, and the report."""

    def run(*_):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(staged, "_run", run)
    command = ["staged", "--url=x", "--sha256=y", f"--reports={tmp_path}/reports", "--", "train", "--gin_file=run.gin"]
    try:
        code = exits.run_verb(launch.main, command)
    except OSError:  # of our own code: with a traceback
        code = exits.EXIT_FAULT
    (report,) = reports.read(f"{tmp_path}/reports").values()
    return code, report


@pytest.mark.parametrize("result", [0, 1, 2, 75, 137])
def test_the_exit_code_is_reported(monkeypatch, tmp_path, result):
    """137: every start of the verb was killed, as by a lack of memory."""
    code, report = ended_with(monkeypatch, tmp_path, result)
    assert code == report.code == result
    assert report.message == ("see its log for why train has ended" if result else "")


@pytest.mark.parametrize("result", [130, 143])
def test_a_host_that_was_stopped_is_started_again(monkeypatch, tmp_path, result):
    assert ended_with(monkeypatch, tmp_path, result)[1].code is None


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("no"), 2), (TryAgain("not now"), 75), (OSError("broken"), exits.EXIT_FAULT)]
)
def test_an_error_is_reported(monkeypatch, tmp_path, capsys, error, code):
    ended, report = ended_with(monkeypatch, tmp_path, error)
    assert ended == report.code == code
    assert str(error) in report.message
