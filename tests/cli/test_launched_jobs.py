"""Jobs from their launch to their end, by the command line, on a cluster that is a server on loopback."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from capibara.cli import launch
from capibara.cli.launching import watching
from capibara.jobs.backends.gke import Gke
from capibara.jobs.managing import spec_file
from capibara.jobs.managing.records import Record, Records, State
from capibara.jobs.spec import Attempt
from capibara.multihost import exits
from capibara.storage import stores

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "jobs" / "systems"), str(HERE.parent / "jobs")]
from fake_kubernetes import FakeKubernetes  # noqa: E402
from job_specs import job  # noqa: E402

CHECKOUT = HERE.parents[1]
GKE = ("gke", "run.gin", "--storage=gs://bucket/cli", "--image=i", "--slice=v5e-8", "--poll=0.05")
RUN = """
include "runs/pretrain.gin"
include "models/tiny.gin"
include "tasks/stdlib.gin"
MODEL_DIR = "runs/mine"
TRAIN_STEPS = 3
BATCH_SIZE = 4
LENGTH = 64
LEARNING_RATE = 1e-3
"""


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch, gs):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPIBARA_STATE", str(tmp_path / "state" / "jobs.sqlite"))
    (tmp_path / "run.gin").write_text(RUN)
    return tmp_path


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    def start(**options):
        server = started.append(FakeKubernetes(gone_after_s=(0.0, 0.1), **options)) or started[-1]
        server.write_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        return server

    started = []
    yield start
    for server in started:
        server.__exit__(None, None, None)


def run(*argv):
    return exits.run_verb(launch.main, list(argv))


def started(server, *argv):
    """A process of `capibara launch` that has made its JobSet."""
    process = subprocess.Popen(
        [sys.executable, "-m", "capibara.launch", *argv],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not server.objects("jobsets"):
        assert process.poll() is None
        time.sleep(0.05)
    return process


def creations(server):
    return [call for call in server.calls if call.startswith("POST ")]


def test_a_job_is_launched_watched_and_listed(cluster, capsys):
    server = cluster(active_after_s=0.1, done_after_s=0.2)
    assert run(*GKE) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.splitlines()[0].startswith("job run: v5e-8, 8 v5e chips on 1 host")
    for state in ("waiting", "running", "succeeded"):
        assert f" job run is {state}" in shown.err
    assert len(creations(server)) == 1

    assert run("list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["JOB", "WHERE", "SLICE", "STATE", "ATTEMPT", "LAUNCHED", "USD", "WHY"]
    assert row.split()[:5] == ["run", "gke", "v5e-8", "succeeded", "1"]
    assert run("list", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["state"] == "succeeded" and listed["slice"] == "v5e-8" and listed["where"] == "gke"
    assert listed["place"] == {"namespace": "default"} and listed["usd"] >= 0 and listed["budget_usd"] is None
    assert run("status", "run", "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert [event["text"] for event in status["history"]] == ["launched", "waiting", "running", "ending", "succeeded"]
    assert run("status", "run") == 0
    assert "succeeded" in capsys.readouterr().out
    assert run("manage") == 0
    assert capsys.readouterr().out == "no jobs to manage\n"


def test_launching_twice_is_one_job(cluster, capsys):
    server = cluster()
    assert run(*GKE, "--detach") == 0
    assert run(*GKE, "--detach") == 0
    assert "job run is waiting already, with the same files and flags" in capsys.readouterr().err
    assert run(*GKE, "--restarts=1", "--detach") == exits.EXIT_USER_ERROR
    assert "choose another --name" in capsys.readouterr().err
    assert len(creations(server)) == 1


def test_a_job_is_cancelled_and_resumed(cluster, capsys):
    server = cluster(active_after_s=0.0)
    assert run(*GKE, "--detach") == 0
    assert run("cancel", "run", "--poll=0.05") == 0
    assert " job run is cancelled" in capsys.readouterr().err and server.objects("jobsets") == {}
    assert run("cancel", "run") == 0
    assert "has ended already: cancelled" in capsys.readouterr().err
    server.fault_next()
    assert run("resume", "run", "--detach") == 0
    assert run("resume", "run", "--detach") == exits.EXIT_USER_ERROR
    assert "there is nothing to resume" in capsys.readouterr().err
    manager = started(server, "manage", "--poll=0.05")
    (made,) = server.objects("jobsets").values()
    assert made["metadata"]["labels"]["capibara-attempt"] == "1"
    assert run("cancel", "run", "--poll=0.05") == 0  # the other manager does it
    assert manager.wait(300) == 0 and "job run is cancelled" in manager.stderr.read()
    assert len(creations(server)) == 2 and server.objects("jobsets") == {}


def test_the_log_of_a_job(cluster, capsys):
    server = cluster(active_after_s=0.0)
    assert run(*GKE, "--detach") == 0
    while run("logs", "run") != 0 or "step 1" not in (out := capsys.readouterr().out):
        for pod in server.pods("run"):
            server.say(pod["metadata"]["name"], "step 1\nstep 2\n")
    assert out.splitlines()[-2:] == ["step 1", "step 2"]


def test_a_job_that_fails_says_why_and_fails(cluster, capsys):
    cluster(active_after_s=0.0, fail=1.0)
    assert run(*GKE, "--restarts=0") == exits.EXIT_FAULT
    err = capsys.readouterr().err
    assert "error: job run has failed: " in err and "(--restarts=0 are used up)" in err


def test_a_missing_right_ends_at_once_with_what_to_ask_for(cluster, capsys):
    server = cluster()
    server.refuse_rights("create", "jobsets")
    assert run(*GKE) == exits.EXIT_FAULT
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: job run has failed: ") and "create" in error and "jobsets" in error
    assert len(creations(server)) == 1


def test_ctrl_c_ends_the_watch_and_not_the_job(cluster, tmp_path):
    server = cluster()
    launched = started(server, *GKE)
    launched.send_signal(signal.SIGINT)
    assert launched.wait(300) == exits.EXIT_INTERRUPTED
    assert "the jobs still run: capibara launch manage manages them" in launched.stderr.read()
    assert len(server.objects("jobsets")) == 1


def test_a_launch_that_is_cancelled_has_not_succeeded(cluster, tmp_path):
    server = cluster()
    launched = started(server, *GKE)
    assert run("cancel", "run", "--detach") == 0
    assert launched.wait(300) == exits.EXIT_FAULT and "job run is cancelled" in launched.stderr.read()


def test_a_job_whose_budget_is_spent_is_not_resumed(cluster, tmp_path, capsys):
    server = cluster(active_after_s=0.0)
    assert run(*GKE, "--detach", "--budget_usd=9.6") == 0
    assert "nothing replaces the job when it is preempted unless capibara launch manage runs" in capsys.readouterr().err
    assert run("cancel", "run", "--poll=0.05") == 0
    records = Records(tmp_path / "state" / "jobs.sqlite")
    ended = records.find("run")
    records.put(dataclasses.replace(ended, attempt=dataclasses.replace(ended.attempt, spent_s=3600)))
    capsys.readouterr()
    assert run("resume", "run") == exits.EXIT_USER_ERROR
    err = capsys.readouterr().err
    assert err.startswith(
        "error: job run cannot be resumed: its chips have cost the budget of 9.60 USD: raise --budget"
    )
    assert len(creations(server)) == 1 and records.find("run").state == "cancelled"


def test_a_job_that_is_resumed_may_fail_as_often_as_a_new_one(tmp_path):
    records = Records(tmp_path / "state" / "jobs.sqlite")
    attempt = Attempt(launch="ab", number=3, failures=2, spent_s=60)
    records.put(Record(name="run", text=spec_file.text_of(Gke(), job()), attempt=attempt, state=State.FAILED))
    assert run("resume", "run", "--detach") == 0
    resumed = records.find("run")
    assert resumed.state is State.REPLACING and resumed.attempt == dataclasses.replace(attempt, failures=0)


def test_of_several_jobs_all_are_resumed_or_none(cluster, tmp_path, capsys):
    cluster(active_after_s=0.0)
    for name in ("run", "other"):
        assert run(*GKE, f"--name={name}", "--detach") == 0
    assert run("cancel", "run", "--poll=0.05") == 0
    assert run("resume", "run", "other", "--detach") == exits.EXIT_USER_ERROR
    assert "job other is waiting: there is nothing to resume" in capsys.readouterr().err.replace("running", "waiting")
    assert Records(tmp_path / "state" / "jobs.sqlite").find("run").state == "cancelled"


def test_what_a_host_says_does_not_drive_the_terminal(tmp_path, capsys):
    path = tmp_path / "state" / "jobs.sqlite"
    records = Records(path)
    text = spec_file.text_of(Gke(), job(name="run"))
    bad = Record(name="run", text=text, attempt=Attempt(), state=State.FAILED, reason="a\x1b[2J\nerror: b\x07")
    records.put(bad)
    records.note("run", "failed: \x1b]0;title\x07")
    for words in (("list",), ("status", "run")):
        assert run(*words) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out and "\x07" not in out and "a [2J error: b" in out
    assert watching.exit_code([bad]) == exits.EXIT_FAULT
    assert capsys.readouterr().err == "error: job run has failed: a [2J error: b \n"


def test_what_a_job_costs_is_that_of_all_its_chips(tmp_path, capsys):
    text = spec_file.text_of(Gke(), job("v5e-8"))
    ended = Record(name="run", text=text, attempt=Attempt(number=1, spent_s=1800), state=State.CANCELLED)
    Records(tmp_path / "state" / "jobs.sqlite").put(ended)
    assert run("list", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["chip_seconds"] == 8 * 1800 and listed["usd"] == pytest.approx(9.6 / 2)


def staged():
    """Jobs, bundles and specs in the storage."""
    folder = stores.folder_of("gs://bucket/cli/jobs")
    return {str(path) for pattern in ("*", "*/*", "*/specs/*") for path in folder.glob(pattern)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--poll=0",), "--poll is 0"),
        (("--state=/proc/none/jobs.sqlite",), "name another --state"),
        (("--restarts=1",), "choose another --name"),
        (("--name=new", "--secret=A=env:NOT_SET"), "which launch gke cannot read"),
    ],
)
def test_nothing_is_staged_for_a_job_that_cannot_be_recorded(cluster, tmp_path, capsys, gs, flags, message):
    cluster()
    assert run(*GKE, "--detach") == 0
    (tmp_path / "run.gin").write_text(RUN + "# changed\n")
    before = staged()
    assert len(before) > 2
    capsys.readouterr()
    assert run(*GKE, "--detach", *flags) == exits.EXIT_USER_ERROR
    assert message in capsys.readouterr().err
    assert staged() == before


def test_a_job_of_another_version_is_listed(tmp_path, capsys):
    Records(tmp_path / "state" / "jobs.sqlite").put(Record(name="run", text='{"x": 1}', attempt=Attempt()))
    for words in (("list",), ("status", "run"), ("list", "--json")):
        assert run(*words) == 0
        out = capsys.readouterr().out
        assert "run" in out and "no file of a job" in out


def test_a_lost_database_is_recovered(cluster, tmp_path, capsys):
    server = cluster(active_after_s=0.0)
    assert run(*GKE, "--detach") == 0
    (tmp_path / "state" / "jobs.sqlite").write_bytes(b"cut")
    assert run("list") == 0
    err = capsys.readouterr().err
    assert "jobs.sqlite.corrupted-" in err and "is quarantined" in err
    assert run("recover", "gke", "--storage=gs://bucket/cli", "--namespace=ml") == 0
    assert capsys.readouterr().out == "found no jobs\n"
    assert run("recover", "gke", "--storage=gs://bucket/cli") == 0
    assert capsys.readouterr().out.startswith("job run: attempt 1\nfound 1 jobs")
    server.play("complete", "run")
    assert run("manage", "--poll=0.05") == 0
    assert len(creations(server)) == 1
    records = Records(tmp_path / "state" / "jobs.sqlite")
    assert records.find("run").state == "succeeded"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("status", "rnu"), "there is no job 'rnu'"),
        (("cancel",), "the following arguments are required: name"),
        (("list", "--poll=0"), "--poll is 0, must be above 0"),
        (("list", "--poll=inf"), "--poll is inf, must be above 0 and at most 3600"),
        (("list", "--state=run.gin"), "run.gin is no database of jobs: name another --state"),
        (("list", "--state=/proc/none/jobs.sqlite"), "name another --state"),
        (("manage", "--state=mine/jbos.sqlite"), "--state=mine/jbos.sqlite does not exist"),
        (("recover", "moon", "--storage=x"), "launch recover cannot look on 'moon'"),
        (("recover", "gke"), "the following arguments are required: --storage"),
        (("recover", "gce", "--storage=gs://b"), "--project is not set"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, message):
    assert run(*argv) == exits.EXIT_USER_ERROR
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("error: ")
    assert not os.path.exists("mine")  # nothing is made of a name that was mistyped


def test_a_cluster_that_is_not_there_is_found_before_anything_is_recorded(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert run(*GKE) == exits.EXIT_USER_ERROR
    assert "gcloud container clusters get-credentials" in capsys.readouterr().err
    assert run("list") == 0 and capsys.readouterr().out.startswith("no jobs in ")
