"""What the reports of several hosts amount to while a job runs."""

import dataclasses
import json
import pathlib
import sys

import pytest

from capibara.jobs.managing.watch import Watch
from capibara.jobs.spec import Bundle

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from job_specs import job  # noqa: E402


@pytest.fixture
def spec(tmp_path):
    """Of two hosts."""
    bundle = Bundle(url=f"{tmp_path}/jobs/run/0123456789abcdef", files={})
    return job("2xh100-8", bundle=bundle)


def report(spec, host, beats, code=None):
    folder = pathlib.Path(spec.reports)
    folder.mkdir(parents=True, exist_ok=True)
    values = {"host": host, "beats": beats, "started_s": 1.0, "code": code, "message": ""}
    (folder / f"{host}.json").write_text(json.dumps(values))


def test_a_host_is_silent_since_its_report_has_changed(spec):
    watch, lines = Watch(), []
    report(spec, "a", 1)
    watch.read(spec, 100.0, lines.append)
    assert watch.missing == 1 and watch.silent_s(130.0) == 30.0
    report(spec, "b", 1)
    watch.read(spec, 140.0, lines.append)
    assert watch.missing == 0 and watch.silent_s(150.0) == 50.0
    report(spec, "a", 2)
    watch.read(spec, 150.0, lines.append)
    assert watch.silent_s(150.0) == 10.0 and lines == []


def test_a_host_is_silent_beside_one_that_has_ended(spec):
    watch = Watch()
    report(spec, "a", 1, code=0)
    report(spec, "b", 1)
    watch.read(spec, 100.0, print)
    report(spec, "b", 2)
    watch.read(spec, 110.0, print)
    assert watch.silent_s(1_110.0) == 1_000.0
    report(spec, "b", 3, code=0)
    watch.read(spec, 1_110.0, print)
    assert watch.silent_s(9_999.0) == 0.0 and watch.outcome_of(spec).code == 0


def test_reports_of_an_earlier_attempt_do_not_count(spec):
    watch = Watch()
    report(spec, "a", 1, code=1)
    watch.read(spec, 100.0, print)
    assert watch.outcome_of(spec).code == 1
    attempt = dataclasses.replace(spec.attempt, number=1)
    again = dataclasses.replace(spec, attempt=attempt)
    assert watch.outcome_of(again).code is None and watch.silent_s(9_999.0) == 0.0
