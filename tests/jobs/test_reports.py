"""What hosts report, and what that amounts to."""

import json
import threading
import time

import pytest

from capibara.jobs import reports
from capibara.jobs.reports import Outcome, Report, Reporter


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in (*reports.INDICES, "MEGASCALE_SLICE_ID"):
        monkeypatch.delenv(name, raising=False)


def until(condition, seconds=300.0):
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it has not come in time"
        time.sleep(0.01)


def only(folder):
    (report,) = reports.read(str(folder)).values()
    return report


def test_a_host_reports_until_its_end(tmp_path):
    folder = tmp_path / "reports" / "ab-0"
    with Reporter(str(folder), every_s=0.02) as reporter:
        until(lambda: len(reports.read(str(folder))) == 1)
        first = only(folder)
        until(lambda: only(folder).beats > first.beats + 2)
        assert not only(folder).is_final
        reporter.end(2, "x  must\nbe y")
        assert only(folder).code == 2 and only(folder).message == "x must be y"
    assert only(folder).is_final


def test_a_host_that_is_ended_from_outside_reports_no_end(tmp_path):
    with Reporter(str(tmp_path), every_s=0.02):
        until(lambda: reports.read(str(tmp_path)))
    assert only(tmp_path).code is None


def test_a_storage_that_cannot_be_written_does_not_end_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    lines = []
    with Reporter(f"{tmp_path}/file/reports", every_s=0.01, say=lines.append):
        until(lambda: lines)
        time.sleep(0.1)
        (tmp_path / "file").unlink()
        until(lambda: len(lines) > 1)
    assert "cannot be written" in lines[0] and lines[1] == "the reports of this host are written again"
    assert len(lines) == 2  # once, not with each report


def test_nothing_is_reported_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Reporter("") as reporter:
        reporter.end(0)
    assert [*tmp_path.iterdir()] == [] and "capibara-reports" not in {one.name for one in threading.enumerate()}


def test_hosts_have_names_of_their_own(monkeypatch):
    alone = reports.host_name()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    indexed = reports.host_name()
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    assert indexed == f"{alone}-3" and reports.host_name() == f"{alone}-1-3"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"host": 1}', b"\xff\xfe", b'{"host": "a", "beats": 1, "started_s": 1, "code": 999}'],
)
def test_a_file_that_is_no_report_counts_as_missing(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    good = {"host": "b", "beats": 3, "started_s": 1.5, "code": None, "message": ""}
    (tmp_path / "b.json").write_text(json.dumps(good))
    assert reports.read(str(tmp_path)) == {"b": Report(host="b", beats=3, started_s=1.5)}


def test_no_folder_has_no_reports(tmp_path):
    assert reports.read(f"{tmp_path}/none") == {}


def report(code, message=""):
    return Report(host=f"h{code}", beats=1, started_s=0.0, code=code, message=message)


@pytest.mark.parametrize(
    ("codes", "hosts", "expected"),
    [
        ([], 1, Outcome()),
        ([None], 1, Outcome()),
        ([0], 1, Outcome(code=0)),
        ([0, 0], 3, Outcome()),
        ([0, None], 2, Outcome()),
        ([0, 0], 2, Outcome(code=0)),
        ([0, 1], 2, Outcome(code=1, message="h1")),
        ([1, 2, None], 3, Outcome(code=2, message="h2")),
    ],
)
def test_what_the_reports_amount_to(codes, hosts, expected):
    assert reports.outcome({str(n): report(code) for n, code in enumerate(codes)}, hosts) == expected


def test_the_message_of_the_host_that_has_failed():
    found = {"a": report(1, "x"), "b": report(2, "--y must be z")}
    assert reports.outcome(found, 2) == Outcome(code=2, message="h2: --y must be z")
