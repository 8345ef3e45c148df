"""Runs of several processes whose folder is a bucket: killed, resumed, refused, and without permission for a while."""

from __future__ import annotations

import json
import pathlib
import sys
import time
import urllib.request
from urllib.parse import quote, unquote

import numpy as np
import pytest

hosts = sys.modules["of_hosts_conftest"]
METRICS = "metrics.jsonl"
TRAIN = ("--gin_file=tiny.gin", "--gin.Checkpointing.every=2")


class Bucket:
    """What lies in gs://bucket, and processes that train there."""

    def __init__(self, server, cluster, folder: pathlib.Path):
        self.server, self._cluster, self._folder = server, cluster, folder

    def start(self, count: int, run: str, *flags: str, steps: int = 100_000):
        """The processes of a run of four devices in all."""
        where = run if run.startswith("/") else f"gs://bucket/{run}"
        asked = (*TRAIN, f"--emulate={4 // count}", f"--gin.MODEL_DIR='{where}'", f"--gin.TRAIN_STEPS={steps}")
        if count == 1:
            nursery, environment = self._cluster("flags", 1).nursery, hosts.plain_environment()
            environment |= {"TPU_SKIP_MDS_QUERY": "1", **self.server.environment}
            return [nursery.start("train", [*asked, *flags], self._folder, environment)]
        joined = self._cluster("flags", count)
        return [joined.start(index, "train", *asked, *flags, **self.server.environment) for index in range(count)]

    def train(self, count: int, run: str, steps: int, *flags: str):
        """Their ends, which must be good."""
        done = hosts.ends(self.start(count, run, *flags, steps=steps))
        assert [one.code for one in done] == [0] * count, [one.err[-3000:] for one in done]
        return done

    def names(self, run: str) -> list[str]:
        """All files of a run."""
        with urllib.request.urlopen(f"http://{self.server.emulator}/storage/v1/b/bucket/o?prefix={run}/") as answer:
            return [one["name"][len(run) + 1 :] for one in json.load(answer).get("items", ())]

    def read(self, run: str, name: str) -> bytes:
        """A file's content."""
        where = f"http://{self.server.emulator}/storage/v1/b/bucket/o/{quote(f'{run}/{name}', safe='')}?alt=media"
        with urllib.request.urlopen(where) as answer:
            return answer.read()

    def steps(self, run: str) -> list[int]:
        """Those that are committed."""
        parts = [name.split("/") for name in self.names(run)]
        return sorted(int(part[1]) for part in parts if part[0] == "checkpoints" and part[2:] == ["manifest.json"])

    def holder(self, run: str) -> dict | None:
        """Who has the lease."""
        name = "checkpoints/lease.json"
        return json.loads(self.read(run, name)) if name in self.names(run) else None

    def await_step(self, run: str, step: int, processes) -> None:
        """Until the run has committed it."""
        end_s = time.monotonic() + 120
        while not [one for one in self.steps(run) if one >= step]:
            assert time.monotonic() < end_s and all(one.poll() is None for one in processes), hosts.ends(processes, 5)
            time.sleep(0.1)

    def assert_learned_as_one(self, run: str, steps: int) -> None:
        """The losses of a run in parts are those of one process on a disk, which nothing interrupts."""
        whole = self._folder / f"{run}_whole"
        self.train(1, str(whole), steps, "--gin.Checkpointing.every=0")
        found, wanted = (_losses(text) for text in (self.read(run, METRICS), (whole / METRICS).read_bytes()))
        assert found.keys() == wanted.keys() == set(range(1, steps + 1))
        np.testing.assert_allclose([found[step] for step in wanted], list(wanted.values()), rtol=1e-5)


def _losses(metrics: bytes) -> dict[int, float]:
    lines = map(json.loads, metrics.splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@pytest.fixture
def bucket(bucket_server, cluster, shell):
    return Bucket(bucket_server, cluster, shell.folder)


def assert_one_line(done, code: int, *words: str) -> None:
    assert done.code == code, (done.code, done.err[-3000:])
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), done.err[-3000:]
    assert "Traceback" not in done.err, done.err[-3000:]


@pytest.mark.heavy
@pytest.mark.fault(28, 33, 66)
def test_one_of_two_is_killed_and_two_and_then_one_resume(bucket):
    """2 -> 2 -> 1 processes against one from beginning to end; meanwhile nobody else may write there."""
    processes = bucket.start(2, "killed")
    bucket.await_step("killed", 4, processes)
    holder = bucket.holder("killed")
    for third in hosts.ends(bucket.start(1, "killed") + bucket.start(2, "killed")):
        assert_one_line(third, 2, "gs://bucket/killed/checkpoints is being written by process", str(holder["pid"]))
    assert bucket.holder("killed")["nonce"] == holder["nonce"]
    processes[1].kill()
    left, _ = hosts.ends(processes)
    assert_one_line(left, 75, "process 1 on ", " is gone: start the command again on every host")
    assert (step := bucket.steps("killed")[-1]) >= 4
    for count, steps in ((2, step + 2), (1, step + 4)):
        done = bucket.train(count, "killed", steps)
        assert f"resuming from step {steps - 2};" in done[0].out and "corrupted" not in done[0].err
        assert bucket.holder("killed") is None
    bucket.assert_learned_as_one("killed", step + 4)


@pytest.mark.fault(66)
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.heavy), 1])
def test_permission_that_is_lost_in_the_middle_ends_all_with_one_line(bucket, count):
    """And nothing that was saved is lost."""
    run = f"closing{count}"
    processes = bucket.start(count, run)
    bucket.await_step(run, 2, processes)
    with bucket.server.failing(lambda method, path: 403 if "/b/bucket" in unquote(path) else None):
        done = hosts.ends(processes)
    for one in done:
        assert_one_line(one, 2, "permission denied in gs://bucket (", "roles/storage.objectUser")
    assert bucket.steps(run)


@pytest.mark.heavy
@pytest.mark.fault(66)
def test_permission_that_is_lost_at_any_request_is_what_is_told(bucket):
    """From the first to the last request of a run; whatever asks then, it blames no file."""
    asked = bucket.server.asked
    before = len(asked)
    assert bucket.train(1, "sweep", 4)
    for number, first in enumerate(np.linspace(0, 0.9 * (len(asked) - before), 12).astype(int)):
        start = len(asked) + first
        with bucket.server.failing(lambda method, path, start=start: 403 if len(asked) >= start else None):
            [done] = hosts.ends(bucket.start(1, f"sweep{number}", steps=4))
        assert_one_line(done, 2, "permission denied in ", "roles/storage.objectUser")


@pytest.mark.heavy
@pytest.mark.fault(66)
@pytest.mark.parametrize("count", [2, 1])
def test_a_run_resumes_when_the_permission_is_back(bucket, count):
    run = f"closed{count}"
    processes = bucket.start(count, run)
    bucket.await_step(run, 4, processes)
    with bucket.server.failing(lambda method, path: 403 if "/b/bucket" in unquote(path) else None):
        hosts.ends(processes)
    step = bucket.steps(run)[-1]
    done = bucket.train(count, run, step + 2)
    assert f"resuming from step {step};" in done[0].out and "corrupted" not in done[0].err
    bucket.assert_learned_as_one(run, step + 2)
