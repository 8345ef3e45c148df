"""`capibara launch ssh` trains on two hosts: two servers of OpenSSH on loopback, whose processes JAX connects."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

import numpy as np
import pytest

from capibara.cli import launch
from capibara.jobs.local import free_address
from capibara.monitoring.metrics_file import loggers
from capibara.multihost import exits

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "jobs" / "systems"))
from ssh_hosts import MISSING, SSHD, Hosts  # noqa: E402

hosts = sys.modules["of_hosts_conftest"]
pytestmark = pytest.mark.skipif(SSHD is None, reason=MISSING)

SMALL = """
include "runs/pretrain.gin"
include "tasks/stdlib.gin"
MODEL_DIR = "runs/small"
TRAIN_STEPS = 3
BATCH_SIZE = 4
LENGTH = 64
LEARNING_RATE = 1e-2
DecoderConfig.vocab_size = 384
DecoderConfig.embed_dim = 32
DecoderConfig.num_layers = 1
DecoderConfig.num_heads = 2
DecoderConfig.mlp_dim = 64
Trainer.log_every = 1
Evaluation.every = 0
"""
# Bundled with the Gin files, as a user's own code is. Steps that take as long as a real one's.
SLOW = """
import time
from capibara.config import configurable
from capibara.training.base.callbacks import Callback

@configurable
class Slow(Callback):
    def on_step(self, step, metrics):
        time.sleep(0.3)
"""
STEPS = 24
LONGEST_S = 300.0


class Site:
    """Two hosts, a disk that they share with the launcher, and a database of jobs."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "hosts").mkdir()
        self.hosts = Hosts(folder / "hosts")
        (folder / "small.gin").write_text(SMALL)
        (folder / "slow.py").write_text(SLOW)
        (folder / "slow.gin").write_text(
            f"import slow\nMonitoring.more = (@Slow(),)\nTRAIN_STEPS = {STEPS}\nCheckpointing.every = 4\n"
        )

    def launch(self, *arguments):
        """`capibara launch ssh`; returns its exit code."""
        plain = hosts.plain_environment()
        passed = ["JAX_PLATFORMS", "XLA_FLAGS", *(name for name in plain if name.startswith("JAX_COMPILATION_CACHE"))]
        flags = [
            "--slice=2xcpu-1",
            f"--storage={self.folder}/disk",
            "--hosts=h0,h1",
            f"--config_file={self.hosts.client}",
            f"--folder={self.folder}/jobs",
            f"--python={sys.executable}",
            "--coordinator=127.0.0.1",
            f"--port_of_coordinator={free_address().rpartition(':')[2]}",
            *(f"--env={name}={plain[name].strip()}" for name in passed),
        ]
        return exits.run_verb(launch.main, ["ssh", *arguments, *flags, "--poll=0.3"])

    def log(self, job, index, attempt="now"):
        file = self.folder / "jobs" / job / f"h{index}" / attempt / "log"
        return file.read_text() if file.exists() else ""

    def losses(self, run):
        """Step -> loss of a run."""
        folder = self.folder / "disk" / "runs" / run
        if not (folder / "metrics.jsonl").exists():
            return {}
        return {line["step"]: line["loss"] for line in loggers.read_metrics(str(folder)) if line["kind"] == "train"}

    def close(self):
        for path in self.folder.glob("jobs/*/*/now/process"):
            if not path.with_name("code").exists():
                os.killpg(int(path.read_text().split()[0]), signal.SIGKILL)
        self.hosts.stop()


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPIBARA_STATE", str(tmp_path / "state" / "jobs.sqlite"))
    made = Site(tmp_path)
    yield made
    made.close()


def test_two_hosts_train_as_one(site, capsys):
    assert site.launch("small.gin") == 0, site.log("small", 0)[-3000:]
    assert " job small is succeeded" in capsys.readouterr().err
    assert "joined 2 processes on 1 host: 2 devices" in site.log("small", 0)
    assert sorted(site.losses("small")) == [1, 2, 3]
    assert exits.run_verb(launch.main, ["logs", "small"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said.index("==> h1 <==") < said.index("==> h0 <==") and "finished at step 3" in "\n".join(said[-40:])


@pytest.mark.heavy  # a minute; the one above is in the short suite
def test_a_run_resumes_when_a_host_has_lost_its_processes(site, capsys):
    assert site.launch("small.gin", "--gin_file=slow.gin", "--detach") == 0
    until_s = time.monotonic() + LONGEST_S
    while max(site.losses("small"), default=0) < STEPS // 2:
        assert time.monotonic() < until_s, site.log("small", 0)[-3000:]
        time.sleep(0.1)
    lost = site.folder / "jobs" / "small" / "h1" / "now" / "process"
    os.killpg(int(lost.read_text().split()[0]), signal.SIGKILL)
    assert exits.run_verb(launch.main, ["manage", "--poll=0.3"]) == 0, site.log("small", 0)[-3000:]
    err = capsys.readouterr().err
    assert "h1: the job was killed" in err and " job small is succeeded (attempt 2)" in err
    assert "resuming from step " in site.log("small", 0)

    whole = ("--gin.MODEL_DIR='runs/whole'", "--name=whole")
    assert site.launch("small.gin", "--gin_file=slow.gin", *whole) == 0, site.log("whole", 0)[-3000:]
    found, wanted = site.losses("small"), site.losses("whole")
    assert found.keys() == wanted.keys() == set(range(1, STEPS + 1))
    np.testing.assert_allclose([found[step] for step in wanted], list(wanted.values()), rtol=1e-6)
