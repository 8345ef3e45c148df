"""Trials as jobs of a back end: each is launched once whatever is killed, and ends as its job does."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from capibara.core.types import UserError
from capibara.jobs import bundle
from capibara.jobs.backends.gke import Gke
from capibara.jobs.managing.lifecycle import Rules
from capibara.jobs.managing.manager import Times
from capibara.jobs.managing.records import Records, State
from capibara.jobs.spec import Bundle, JobSpec
from capibara.jobs.sweeps import results
from capibara.jobs.sweeps import trial as trials_
from capibara.jobs.sweeps.jobs import JobLauncher
from capibara.jobs.sweeps.launcher import Progress
from capibara.jobs.sweeps.study import Study
from capibara.jobs.sweeps.sweep import Sweep
from capibara.jobs.sweeps.trial import Trial
from capibara.planner.hardware import slices
from capibara.storage import stores

HERE = pathlib.Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
sys.path += [str(HERE), str(HERE.parent / "systems")]
from fake_kubernetes import FakeKubernetes  # noqa: E402
from trial_hosts import Hosts, commands, live  # noqa: E402

RULES = Rules(settle_s=4.0, vanish_s=1.0, first_s=0.05, longest_s=0.2)


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """test_results draws it."""
    monkeypatch.setattr(results.picture, "draw", lambda *_: b"\x89PNG")


@pytest.fixture
def cluster(tmp_path, monkeypatch, gs):
    with FakeKubernetes(gone_after_s=(0.0, 0.05)) as server:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield server


def sweep_of(**fields):
    return Sweep(vary=["x = uniform(0, 1)"], **{"trials": 4, **fields})


def url_of(folder):
    """The folder of a test's sweep: all tests share a bucket."""
    return f"gs://bucket/{folder.name}/sweep"


def launcher_of(folder, say=lambda line: None):
    (folder / "run.gin").write_text("x = 1\n")
    sources = bundle.Sources(paths={"gin/0/run.gin": folder / "run.gin"}, gin_files=["run.gin"], search_paths=[])
    bundled = Bundle(url=f"gs://bucket/{folder.name}/jobs/s/0", files={})
    spec = JobSpec(name="s", slice_=slices.parse("v5e-8"), bundle=bundled, image="i", arguments=("--gin_file=run.gin",))
    records = Records(folder / "jobs.sqlite", say=say)
    return JobLauncher(records, Gke(), spec, sources, times=Times(poll_s=0.05), rules=RULES, say=say)


def run(folder, sweep, say=lambda line: None, **options):
    study = Study.open(url_of(folder), sweep)
    with launcher_of(folder, say) as launcher:
        study.run(launcher, poll_s=0.05, say=say, **options)
    return study


def wait_for(condition):
    until_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_each_trial_is_a_job_with_its_own_files_and_bindings(cluster, tmp_path):
    with Hosts(cluster) as hosts:
        study = run(tmp_path, sweep_of(), parallel=2)
    assert [str(trial.state) for trial in study.trials] == ["done"] * 4
    assert hosts.created == [(f"s-00{trial.number}", trial.key, "0") for trial in study.trials]
    assert live(cluster) == []
    records = Records(tmp_path / "jobs.sqlite")
    assert {one.name: one.state for one in records.all()} == {f"s-00{number}": State.SUCCEEDED for number in range(4)}
    _, spec = records.find("s-002").spec()
    assert spec.arguments == (
        "--gin_file=run.gin",
        f"--gin_bindings=x = {study.trials[2].bindings['x']}",
        f'--gin_bindings=Trainer.model_dir = "{url_of(tmp_path)}/trials/002"',
    )
    assert spec.labels == {"sweep": "s"} and spec.folder == f"gs://bucket/{tmp_path.name}/jobs/s-002"
    assert stores.of(spec.bundle.url).read(f"{spec.bundle.url}/gin/0/run.gin") == b"x = 1\n"


def test_a_change_of_the_users_files_has_no_effect_on_later_trials(cluster, tmp_path):
    trial = Trial(number=0, key="1f", bindings={"x": "0.5"}, model_dir=f"{url_of(tmp_path)}/trials/000")
    with launcher_of(tmp_path) as launcher:
        before = launcher.spec_of(trial)
        (tmp_path / "run.gin").write_text("x = 2\n")
        assert launcher.spec_of(trial) == before
        launcher.start(trial)
    assert stores.of(before.bundle.url).read(f"{before.bundle.url}/gin/0/run.gin") == b"x = 1\n"


def test_a_trial_that_is_stopped_ends_its_job(cluster, tmp_path):
    trial = Trial(number=0, key="1f", bindings={"x": "0.5"}, model_dir=f"{url_of(tmp_path)}/trials/000")
    with launcher_of(tmp_path) as launcher:
        launcher.stop(trial)  # it is not there
        assert not launcher.knows(trial) and launcher.state(trial).progress is Progress.FAILED
        launcher.start(trial)
        launcher.start(trial)
        wait_for(lambda: cluster.objects("jobsets"))
        assert launcher.state(trial).progress is Progress.RUNNING and launcher.running() == ["s-000"]
        launcher.stop(trial)
        wait_for(lambda: launcher.state(trial).progress is Progress.FAILED)
        assert launcher.state(trial).reason == "job s-000: cancelled" and launcher.running() == []
        assert cluster.objects("jobsets") == {}


def test_jobs_outlive_the_sweep_and_another_process_finds_them(cluster, tmp_path):
    """Also one whose run has ended in between: its job is looked after to its end."""
    trials = [
        Trial(number=k, key=f"{k}f", bindings={"x": "0.5"}, model_dir=f"{url_of(tmp_path)}/trials/00{k}")
        for k in (0, 1)
    ]
    study = Study.open(url_of(tmp_path), sweep_of(trials=2))
    with launcher_of(tmp_path) as launcher:
        for trial in trials:
            study.folder.save(trial)
            launcher.start(trial)
        wait_for(lambda: len(cluster.objects("jobsets")) == 2)
    Hosts(cluster).report(commands(cluster.objects("jobsets")["s-000"])[0], is_whole=True)
    lines = []
    with Hosts(cluster) as hosts:
        assert [str(one.state) for one in run(tmp_path, sweep_of(trials=2), lines.append).trials] == ["done"] * 2
    assert sorted(hosts.created) == [("s-000", "0f", "0"), ("s-001", "1f", "0")] and live(cluster) == []
    assert sum(call.startswith("POST") and "jobsets" in call for call in cluster.calls) == 2
    assert "trial 000 was started before: x = 0.5" in lines


def test_a_trial_that_is_repeated_is_another_launch_of_its_job(cluster, tmp_path):
    cluster.refuse_rights("create", "jobsets")
    with pytest.raises(UserError, match="the first 1 trials have failed; trial 000: job s-000: .*create.*jobsets"):
        run(tmp_path, sweep_of(trials=2), give_up_after=1)
    cluster.refusals.clear()
    with Hosts(cluster) as hosts:
        study = run(tmp_path, sweep_of(trials=2), retry_failed=True)
    assert [str(trial.state) for trial in study.trials] == ["done"] * 2 and len(hosts.created) == 2


def test_a_job_of_another_sweep_is_not_touched(cluster, tmp_path):
    mine, other = (Trial(number=0, key=key, bindings={"x": "0.5"}, model_dir=url_of(tmp_path)) for key in ("1f", "2f"))
    with launcher_of(tmp_path) as launcher:
        launcher.start(other)
        with pytest.raises(UserError, match="job s-000 is .*, and is not of this sweep: choose another --name"):
            launcher.start(mine)
        assert not launcher.knows(mine)


def test_a_cluster_that_denies_access_ends_the_sweep_and_loses_nothing(cluster, tmp_path):
    cluster.refuse_rights("list", "jobsets")
    with pytest.raises(UserError, match="list.*jobsets"):
        run(tmp_path, sweep_of())
    cluster.refusals.clear()
    with Hosts(cluster) as hosts:
        assert len(run(tmp_path, sweep_of()).trials) == len({*hosts.created}) == 4


def test_a_bad_trial_is_cancelled(cluster, tmp_path):
    """The job would never end by itself."""
    sweep = sweep_of(trials=7, early_stop="median", seed=8)
    with Hosts(cluster, holds=["s-006"]):
        study = run(tmp_path, sweep)
    assert [str(trial.state) for trial in study.trials] == ["done"] * 6 + ["stopped"]
    assert Records(tmp_path / "jobs.sqlite").find("s-006").state is State.CANCELLED and live(cluster) == []


# Its children are forked after the clients are imported, which takes seconds.
PROGRAM = """
import importlib.util, os, pathlib, random, signal, sys, time
import kubernetes, gcsfs
spec = importlib.util.spec_from_file_location("tests", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
from capibara.jobs.managing import breaker
from capibara.jobs.systems import gke
gke.CALL_S, breaker.FIRST_S, breaker.LONGEST_S = 1.5, 0.05, 0.3
folder, search, trials, kills = pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
if search == "bayesian":
    import optuna

def forked():
    pid = os.fork()
    if pid == 0:
        tests.run(folder, tests.sweep_of(trials=trials, search=search), parallel=3)
        os._exit(0)
    return pid

chance = random.Random(7)
for number in range(kills):
    pid = forked()
    time.sleep(chance.uniform(0.1, 1.0))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it had ended before it was killed"
    print("killed", number + 1, flush=True)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(forked(), 0)[1]))
"""


@pytest.mark.fault(49, 50)
@pytest.mark.parametrize(
    ("search", "trials", "kills"),
    [("random", 4, 2), pytest.param("bayesian", 40, 30, marks=pytest.mark.heavy)],
    ids=["4 trials", "40 trials"],
)
def test_a_sweep_that_is_killed_loses_no_trial_and_runs_none_twice(tmp_path, gs, search, trials, kills):
    with FakeKubernetes(gone_after_s=(0.0, 0.05), chaos=0.1, seed=3, slow_s=0.2) as server, Hosts(server) as hosts:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        command = [sys.executable, "-c", PROGRAM, __file__, tmp_path, search, str(trials), str(kills)]
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "KUBECONFIG": str(tmp_path / "kubeconfig")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"killed {number + 1}" for number in range(kills)]
    study = Study.load(url_of(tmp_path))
    assert [trial.name for trial in study.trials] == [trials_.name_of(number) for number in range(trials)]
    assert {str(trial.state) for trial in study.trials} == {"done"}
    launches = [(name, launch) for name, launch, _ in hosts.created]
    assert len(launches) == len({*launches}) == trials
    assert {*launches} == {(f"s-{trial.name}", trial.key) for trial in study.trials}
    assert live(server) == []
