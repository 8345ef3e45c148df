"""A dashboard that a run starts: its address is printed once, and it ends with the run."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time

import pytest

from capibara import config
from capibara.core.types import UserError
from capibara.monitoring.dashboard.beside import DashboardProcess
from capibara.monitoring.dashboard.settings import DashboardConfig
from capibara.training.base.callbacks import Callback, RunInfo


class Report(Callback):
    """Keeps the lines."""

    def __init__(self):
        self.lines = []

    def on_status(self, text):
        self.lines.append(text)


def info(folder):
    numbers = {"start_step": 0, "total_steps": 10, "param_count": 1, "tokens_per_step": 1, "flops_per_step": 1.0}
    return RunInfo(model_dir=str(folder), **numbers, device_count=1, device_kind="cpu", peak_flops=None, config="")


def lines_of(report):
    limit_s = time.monotonic() + 30
    while not report.lines:
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    return report.lines


def test_it_serves_the_run_and_ends_with_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:  # its port is in use
        report = Report()
        process = DashboardProcess(DashboardConfig(port=other.getsockname()[1], low_goodput=0.75), report)
        begin_s = time.monotonic()
        process.on_train_begin(info(tmp_path))
        assert time.monotonic() - begin_s < 0.5
        try:
            (line,) = lines_of(report)
            port = int(line.rstrip("/").rpartition(":")[2])
            assert port != other.getsockname()[1]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/api/alerts")
            assert json.loads(connection.getresponse().read())["rules"]["low_goodput"] == 0.75
            connection.close()
        finally:
            process.on_train_end(10, "finished")
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert len(report.lines) == 1


def test_a_dashboard_that_cannot_start_is_one_line(tmp_path, monkeypatch):
    report = Report()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    process = DashboardProcess(DashboardConfig(), report)
    process.on_train_begin(info(tmp_path))
    assert lines_of(report)[0].startswith("the dashboard cannot be started: ")
    process.close()


def test_secrets_are_no_arguments(tmp_path, monkeypatch):
    seen = {}

    def popen(command, **options):
        seen.update(command=command, env=options["env"])
        raise OSError("not started by this test")

    monkeypatch.setattr("subprocess.Popen", popen)
    report = Report()
    process = DashboardProcess(DashboardConfig(webhooks=("https://hooks.example/a-secret",), stall_s=7.0), report)
    process.on_train_begin(info(tmp_path))
    assert "not started by this test" in lines_of(report)[0]
    assert (
        "a-secret" not in " ".join(seen["command"])
        and "--gin_bindings=DashboardConfig.stall_s = 7.0" in seen["command"]
    )
    assert seen["env"]["CAPIBARA_DASHBOARD_WEBHOOKS"] == "https://hooks.example/a-secret"


@pytest.mark.parametrize("wrong", [{"port": 70_000}, {"low_goodput": 2.0}, {"spike_sigmas": 0.0}, {"memory_mib": 0}])
def test_options_have_limits(wrong):
    with pytest.raises(UserError, match="DashboardConfig"):
        DashboardConfig(**wrong)


def test_every_option_arrives(tmp_path, monkeypatch):
    seen = []

    def popen(command, **options):
        seen.extend(command)
        raise OSError("not started by this test")

    monkeypatch.setattr("subprocess.Popen", popen)
    hosts = ("dash.portal.example", "x.webhooks.example", *(f"host-{number}.example.com" for number in range(30)))
    report = Report()
    DashboardProcess(DashboardConfig(port=9, allowed_hosts=hosts, spike_window=64), report).on_train_begin(
        info(tmp_path)
    )
    lines_of(report)
    config.parse((), [one.removeprefix("--gin_bindings=") for one in seen if one.startswith("--gin_bindings=")])
    assert config.build(DashboardConfig) == DashboardConfig(allowed_hosts=hosts, spike_window=64)
    assert "--port=9" in seen


def test_a_warning_before_the_address_is_not_taken_for_a_fault(tmp_path, monkeypatch):
    script = (
        "import time; print('UserWarning: old'); print('dashboard: http://127.0.0.1:1/', flush=True); time.sleep(60)"
    )
    popen = subprocess.Popen
    monkeypatch.setattr("subprocess.Popen", lambda command, **options: popen([sys.executable, "-c", script], **options))
    report = Report()
    process = DashboardProcess(DashboardConfig(), report)
    process.on_train_begin(info(tmp_path))
    try:
        assert lines_of(report) == ["dashboard: http://127.0.0.1:1/"]
    finally:
        process.close()
