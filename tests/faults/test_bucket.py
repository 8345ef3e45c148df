"""A bucket that is busy, stops in the middle of an answer, takes its permission back, or has two writers."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import secrets
import subprocess
import sys

import pytest
from etils import epath

from capibara.checkpoints.lease import Lease
from capibara.core.types import UserError

HERE = pathlib.Path(__file__).parent
BUCKET = HERE.parent / "checkpoints" / "bucket.py"


@pytest.fixture
def program(bucket_server):
    """(arguments of python) -> how it ended, with gs:// on the server."""
    environment = {**os.environ, **bucket_server.environment, "PYTHONPATH": str(HERE.parents[1])}

    def run(*command, cwd=None):
        options = {"env": environment, "cwd": cwd, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run([sys.executable, *map(str, command)], **options)

    return run


def assert_one_line(done, code, *words):
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), done.stderr


@pytest.mark.heavy  # for the pauses between the tries; tests/storage/test_versions.py has the short ones
@pytest.mark.fault(66)
def test_checkpoints_survive_a_bucket_that_is_busy_or_stops_half_way(program, bucket_server, flaky):
    """Saved three times and read back, all bits compared (bucket.py)."""
    faults = [
        flaky.times(1, 429, "POST", "/b/bucket/o"),
        flaky.times(1, 503, "PUT", ""),
        flaky.times(1, 503, "GET", "manifest.json"),
        flaky.times(1, 429, "GET", "run.json"),
        flaky.times(2, "cut", "GET", "params.layer.kernel/"),
        flaky.times(1, "lost", "POST", "lease.json"),
    ]
    with bucket_server.failing(*faults):
        done = program(BUCKET, "gs://bucket/flaky", "save")
    assert done.returncode == 0, done.stderr[-3000:]
    statuses = [status for _, _, status in bucket_server.asked]
    assert {429, 503, 412}.issubset(statuses), statuses


@pytest.mark.fault(66)
def test_a_bucket_without_permission_is_one_line(program, bucket_server):
    with bucket_server.failing(lambda method, path: 403 if "/b/bucket" in path else None):
        done = program("-m", "capibara", "convert", "list", "gs://bucket/denied")
    assert_one_line(done, 2, "permission denied in gs://bucket (Forbidden: ", "roles/storage.objectUser")


@pytest.mark.fault(66)
def test_of_two_runs_that_begin_at_once_exactly_one_writes(gs):
    folder = epath.Path(f"gs://bucket/{secrets.token_hex(4)}/checkpoints")

    def begin(_):
        try:
            return Lease(folder)
        except UserError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(begin, range(2)), key=lambda one: isinstance(one, str))
    assert isinstance(found[0], Lease) and f"{folder} is being written by process {os.getpid()}" in found[1]
    found[0].release()


@pytest.mark.heavy
@pytest.mark.fault(66)
def test_a_bucket_that_never_answers_is_one_line(program, bucket_server):
    with bucket_server.failing(lambda method, path: 503 if "/b/bucket" in path else None):
        done = program("-m", "capibara", "convert", "list", "gs://bucket/busy")
    assert_one_line(done, 75, "a bucket does not answer after several tries")


@pytest.mark.heavy
@pytest.mark.fault(66)
def test_a_run_that_loses_its_permission_ends_with_one_line(program, bucket_server, shell):
    train = ("-m", "capibara", "train", "--gin_file=tiny.gin", "--emulate=2", "--gin.Checkpointing.every=2")
    train = (*train, "--gin.MODEL_DIR='gs://bucket/closing'", "--gin.TRAIN_STEPS=4")
    seen = []

    def closed(method, path):
        seen.append("checkpoints/4/" in path or "checkpoints%2F4%2F" in path)
        return 403 if any(seen) else None

    with bucket_server.failing(closed):
        done = program(*train, cwd=shell.folder)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and "Forbidden" in line  # tensorboardX's end is heard besides
