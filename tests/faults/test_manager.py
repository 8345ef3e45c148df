"""The manager of jobs is killed again and again, its database is cut, and the systems fail: no job twice, none lost."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import pytest

from capibara.jobs import reports
from capibara.jobs.managing.records import Records, State
from capibara.storage import stores

HERE = pathlib.Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
SYSTEMS = HERE.parent / "jobs" / "systems"
FAKES = {
    "gce": ("fake_tpu.py", "--active-after=0.3", "--preempt=0.3"),
    "gke": ("fake_kubernetes.py", "--active-after=0.3", "--done-after=0.5", "--fail=0.2"),
    "vertex": ("fake_vertex.py", "--active-after=0.3", "--done-after=0.5", "--delay-landing=1"),
}
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: fake
contexts: [{name: fake, context: {cluster: fake, user: fake}}]
clusters: [{name: fake, cluster: {server: "http://127.0.0.1:%s"}}]
users: [{name: fake, user: {}}]
"""
# Launches the jobs and manages them. Its children are forked after the clients are imported, which takes seconds; a child
# begins with nothing else than the database.
PROGRAM = """
import faulthandler, json, os, pathlib, random, signal, sys, time
import google.cloud.aiplatform_v1, google.cloud.tpu_v2, kubernetes, gcsfs
from capibara.jobs import systems
from capibara.jobs.managing import spec_file
from capibara.jobs.managing import breaker, manager, records
from capibara.jobs.managing.lifecycle import Rules
from capibara.jobs.spec import Attempt
from capibara.jobs.systems import gce, gke, vertex

LONGEST_S = 500.0  # then a manager says where it hangs
path, texts, kills, seed = pathlib.Path(sys.argv[1]), json.loads(pathlib.Path(sys.argv[2]).read_text()), *map(int, sys.argv[3:])
gce.CALL_S = gke.CALL_S = vertex.CALL_S = 1.5
breaker.FIRST_S, breaker.LONGEST_S = 0.05, 0.3
rules = Rules(settle_s=4.0, vanish_s=1.0, hung_s=600.0, start_s=600.0, well_s=60.0, first_s=0.05, longest_s=0.2)

def manage():
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    opened = records.Records(path, say=lambda line: None)
    for name, text in texts.items():
        launch = os.urandom(4).hex()
        if opened.find(name) is None:
            opened.add(records.Record(name=name, text=text, attempt=Attempt(launch=launch), launched_s=time.time()))
    managed = manager.Manager(opened, rules=rules, times=manager.Times(poll_s=0.05, reports_s=0.2), say=lambda line: None)
    with managed:
        managed.run(lambda found: all(one.state.is_final for one in opened.all()))
    os._exit(0)

def forked():
    pid = os.fork()
    if pid == 0:
        manage()
    return pid

chance = random.Random(seed)
for number in range(kills):
    pid = forked()
    time.sleep(chance.uniform(0.0, 0.8))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it had ended before it was killed"
    print("killed", number + 1, flush=True)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(forked(), 0)[1]))
"""


@contextlib.contextmanager
def fakes(folder, chaos):
    """The three services as processes; yields the environment in which the clients reach them."""
    processes = {}
    try:
        for name, (script, *flags) in FAKES.items():
            command = [
                sys.executable,
                SYSTEMS / script,
                f"--port-file={folder / name}",
                f"--journal={folder / name}.jsonl",
            ]
            command += [*flags, "--seed=7", f"--chaos={chaos}"]
            processes[name] = subprocess.Popen(command, cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
        end_s = time.monotonic() + 60
        while not all((folder / name).exists() for name in FAKES):
            assert time.monotonic() < end_s and all(one.poll() is None for one in processes.values())
            time.sleep(0.05)
        (folder / "kubeconfig").write_text(KUBECONFIG % (folder / "gke").read_text())
        yield {
            "CAPIBARA_TPU_ENDPOINT": f"127.0.0.1:{(folder / 'gce').read_text()}",
            "CAPIBARA_VERTEX_ENDPOINT": f"http://127.0.0.1:{(folder / 'vertex').read_text()}",
            "KUBECONFIG": str(folder / "kubeconfig"),
        }
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def journal(folder, name):
    """What has taken effect on a system, as it wrote it down itself."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(line):
    labels = line["labels"]
    return labels["capibara-job"], labels["capibara-launch"], int(labels["capibara-attempt"])


class Hosts(threading.Thread):
    """The hosts of the TPU VMs: each reports that its run has succeeded, some time after its queued resource was made."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.ended, self.reported, self.chance = folder, threading.Event(), {}, random.Random(3)

    def run(self):
        while not self.ended.wait(0.1):
            for line in journal(self.folder, "gce"):
                if line["op"] == "create":
                    due_s = self.reported.setdefault(key_of(line), time.time() + self.chance.uniform(0.5, 4.0))
                    if due_s and time.time() >= due_s:
                        self.report(*key_of(line))
                        self.reported[key_of(line)] = 0.0

    @staticmethod
    def report(name, launch, attempt):
        path = stores.folder_of(f"gs://bucket/jobs/{name}/reports/{launch}-{attempt}/host.json")
        values = {"host": "host", "beats": 1, "started_s": 1.0, "code": 0, "message": ""}
        store = stores.of(path)
        store.make_folder(path.parent)
        store.write_atomic(path, json.dumps(values).encode())


def texts(count):
    """Job -> the content of its own file, on the three systems in turn."""
    from capibara.jobs.backends.gce import Gce
    from capibara.jobs.backends.gke import Gke
    from capibara.jobs.backends.vertex import Vertex
    from capibara.jobs.managing import spec_file
    from capibara.jobs.spec import Bundle, JobSpec
    from capibara.planner.hardware import slices

    places = [
        Gce(project="my-project", zone="us-west4-a"),
        Gke(),
        Vertex(project="my-project", region="us-west1"),
    ]
    found = {}
    for number in range(count):
        backend, name = places[number % 3], f"job-{number}"
        bundle = Bundle(url=f"gs://bucket/jobs/{name}/0123456789abcdef", files={})
        spec = JobSpec(name=name, slice_=slices.parse("v5e-8"), bundle=bundle, image="r/i:1", restarts=30)
        spec_file.write(backend, spec_file.signed(backend, spec))
        found[name] = spec_file.text_of(backend, spec)
    return found


def state_of(folder, hosts):
    """What the manager and the systems have, for a run that did not end."""
    lines = [str(one) for one in Records(folder / "jobs.sqlite").all()]
    lines += [f"{system}: {line}" for system in FAKES for line in journal(folder, system)[-8:]]
    return "\n".join(["", *lines, f"hosts alive: {hosts.is_alive()}, {hosts.reported}"])


def assert_none_twice_and_none_lost(folder, names):
    """By what the systems themselves have written down."""
    created = [(system, key_of(line)) for system in FAKES for line in journal(folder, system) if line["op"] == "create"
               if line.get("kind") != "Service"]  # fmt: skip
    twice = [key for key, count in collections.Counter(created).items() if count > 1]
    assert not twice, twice
    assert {name for _, (name, _, _) in created} == set(names)
    launches = collections.defaultdict(set)
    for _, (name, launch, _) in created:
        launches[name].add(launch)
    assert all(len(found) == 1 for found in launches.values())
    for system in ("gce", "gke"):  # and never two attempts of one job at once
        there = set()
        for line in journal(folder, system):
            name = line["labels"].get("capibara-job")
            if line.get("kind") == "Service" or name is None:
                continue
            if line["op"] == "create":
                assert name not in there, name
                there.add(name)
            elif line["op"] in ("delete", "gone"):
                there.discard(name)
    return len(created)


@pytest.mark.fault(49, 50)
@pytest.mark.parametrize(
    ("jobs", "kills", "chaos"),
    [(3, 2, 0.15), *(pytest.param(*most, 0.15, marks=pytest.mark.heavy) for most in ((9, 6), (100, 50)))],
    ids=["3 jobs, 2 kills", "9 jobs, 6 kills", "100 jobs, 50 kills"],
)
def test_a_manager_that_is_killed_launches_no_job_twice_and_loses_none(tmp_path, gs, jobs, kills, chaos):
    names = texts(jobs)
    (tmp_path / "texts").write_text(json.dumps(names))
    hosts = Hosts(tmp_path)
    hosts.start()
    with fakes(tmp_path, chaos) as environment:
        command = [sys.executable, "-c", PROGRAM, tmp_path / "jobs.sqlite", tmp_path / "texts", str(kills), "5"]
        environment = {**os.environ, **environment, "PYTHONPATH": str(CHECKOUT)}
        done = subprocess.run(command, env=environment, cwd=CHECKOUT, capture_output=True, text=True, timeout=570)
        assert done.returncode == 0, f"{done.stderr[-6000:]}{state_of(tmp_path, hosts)}"
    hosts.ended.set()
    assert done.stdout.splitlines() == [f"killed {number + 1}" for number in range(kills)]
    records = Records(tmp_path / "jobs.sqlite")
    states = {one.name: (one.state, one.reason) for one in records.all()}
    assert states == {name: (State.SUCCEEDED, "") for name in names}
    attempts = assert_none_twice_and_none_lost(tmp_path, names)
    assert attempts >= jobs and reports.read(f"gs://bucket/jobs/job-0/reports/{records.find('job-0').attempt.launch}-0")
    print(f"{jobs} jobs, {attempts} attempts, {kills} kills")
