"""The start-up script of a queued resource, as its TPU VMs run it: each has a metadata server, a name and a disk of its own.

The script is that of the request that `capibara launch gce --stage` prints. It installs a wheel of this checkout from the
bucket and trains there. Faked are the chips, the hosts' names (see SITE) and the program gcloud.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from capibara.cli import launch
from capibara.jobs import reports
from capibara.monitoring.metrics_file import loggers

hosts = sys.modules["of_hosts_conftest"]
HERE = pathlib.Path(__file__).resolve().parent
PLACE = ("--project=my-project", "--zone=us-west4-a", "--storage=gs://bucket", "--env=JAX_PLATFORMS=cpu")

# What every Python of a VM does first: its host has a name, and chips on its bus.
SITE = """
import os, socket
import fake_tpu_vm
socket.gethostname = lambda: os.environ["FAKE_NAME"]
"""

GCLOUD = """#!{python}
import os, sys, urllib.parse, urllib.request
assert sys.argv[1:3] == ["storage", "cp"], sys.argv
with open(os.environ["HOME"] + "/gcloud", "a") as log:
    print(*sys.argv[3:], file=log)
for url in sys.argv[3:-1]:
    bucket, _, name = url.removeprefix("gs://").partition("/")
    where = f"{{os.environ['STORAGE_EMULATOR_HOST']}}/storage/v1/b/{{bucket}}/o/{{urllib.parse.quote(name, safe='')}}?alt=media"
    urllib.request.urlretrieve(where, os.path.join(sys.argv[-1], os.path.basename(name)))
"""

# Bundled with the Gin files, as a user's own code is. Steps that take as long as a real one's.
SLOW = """
import time
from capibara.config import configurable
from capibara.training.base.callbacks import Callback

@configurable
class Slow(Callback):
    def on_step(self, step, metrics):
        time.sleep(0.5)
"""

SMALL = """
include "runs/pretrain.gin"
include "tasks/stdlib.gin"
MODEL_DIR = "runs/small"
TRAIN_STEPS = 4
BATCH_SIZE = 8
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

# Of the quickstart: without its evaluations and its samples, small, and at a rate at which rounding stays as small.
QUICK = ("Trainer.log_every=1", "Evaluation.every=0", "Evaluation.unigram_batches=0", "SampleText.prompts=()")
STEPS = 20
QUICK += (f"TRAIN_STEPS={STEPS}", "LENGTH=64", "LEARNING_RATE=1e-3", "DecoderConfig.num_layers=1")


class Slice(hosts.Gce):
    """TPU VMs of a queued resource, which start, and start again, with its script."""

    def __init__(self, folder: pathlib.Path, count: int, bucket: dict[str, str]):
        self._bucket, self._values = bucket, [{} for _ in range(count)]
        self._started: list[subprocess.Popen] = []
        folder.mkdir()
        super().__init__(folder, count)
        commands, site = folder / "bin", folder / "site"
        for made in (commands, site, *map(self.home, range(count))):
            made.mkdir()
        (commands / "gcloud").write_text(GCLOUD.format(python=sys.executable))
        for minor in (11, 12, 13):  # an image has one of them: here that whose packages are installed
            found = sys.executable if sys.version_info[1] == minor else "false"
            (commands / f"python3.{minor}").write_text(f'#!/bin/sh\nexec {found} "$@"\n')
        for command in commands.iterdir():
            command.chmod(0o755)
        shutil.copy(HERE / "fake_tpu_vm.py", site)
        (site / "sitecustomize.py").write_text(SITE)

    def attributes(self, index: int) -> dict[str, str]:
        self._values[index].update(super().attributes(index), **{"maintenance-event": "NONE", "preempted": "FALSE"})
        return self._values[index]

    def announce(self, index: int, event: str) -> None:
        """What the metadata server of a VM says of its maintenance from now on."""
        self._values[index]["maintenance-event"] = event

    def home(self, index: int) -> pathlib.Path:
        """The disk of a VM."""
        return self.folder / f"vm{index}"

    def log(self, index: int) -> str:
        """The job's, on the disk of a VM."""
        file = self.home(index) / "log"
        return file.read_text() if file.exists() else ""

    def environment(self, index: int) -> dict[str, str]:
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        plain, home = hosts.plain_environment(), self.home(index)
        return {
            **super().environment(index),
            **self._bucket,
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(home),
            "CAPIBARA_HOME": str(home / "opt"),
            "CAPIBARA_LOG": str(home / "log"),
            "FAKE_NAME": f"t1v-n-0123abcd-w-{index}",
            "XLA_FLAGS": f"{plain['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
            # pip installs the wheel; what that depends on is installed here.
            "PYTHONPATH": f"{self.folder / 'site'}:{packages}",
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_COMPILE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def boot(self, script: pathlib.Path) -> list[subprocess.Popen]:
        """All of them start -> their processes, whose output is in the logs."""
        self._started += [
            subprocess.Popen(
                ["bash", str(script)],
                cwd="/",
                env={**hosts.plain_environment(), **self.environment(index)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for index in range(self.count)
        ]
        return self._started[-self.count :]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        super().close()

    def end(self, started: list[subprocess.Popen]) -> None:
        """Waits until the job has ended, which it must do well."""
        codes = [done.code for done in hosts.ends(started, 600)]
        assert codes == [0] * self.count, [self.log(index)[-3000:] for index in range(self.count)]

    def package(self, index: int) -> pathlib.Path:
        """Where the capibara lies that a VM's job imports."""
        (python,) = self.home(index).glob("opt/files-*/venv/bin/python")
        mine = {**hosts.plain_environment(), **self.environment(index)}
        command = [python, "-c", "import capibara; print(capibara.__file__)"]
        return pathlib.Path(
            subprocess.run(command, cwd="/", env=mine, check=True, capture_output=True, text=True).stdout
        )


@pytest.fixture
def vms(gs, shell):
    """count -> the VMs of a slice, with four chips each."""
    with contextlib.ExitStack() as stack:

        def make(count):
            made = Slice(shell.folder / f"slice{count}", count, gs.environment)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=hosts.CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def staged(gs, wheel, shell, monkeypatch, capsys):
    """(Gin files and flags) -> the start-up script of a queued resource, whose files are in the bucket."""

    def make(*arguments):
        monkeypatch.chdir(shell.folder)
        assert launch.main(["gce", *arguments, *PLACE, f"--wheel={wheel}", "--stage"]) == 0
        (node,) = json.loads(capsys.readouterr().out)["queuedResource"]["tpu"]["nodeSpec"]
        file = shell.folder / "startup.sh"
        file.write_text(node["node"]["metadata"]["startup-script"])
        return file

    return make


@pytest.fixture
def alone(shell, nursery):
    """(devices, flags) -> the losses of a run in one process that nothing interrupts."""

    def run(devices, *flags):
        environment = {**hosts.plain_environment(), "TPU_SKIP_MDS_QUERY": "1"}
        folder = shell.folder / f"alone{devices}"
        asked = [*flags, f"--emulate={devices}", f"--gin.MODEL_DIR='{folder}'"]
        [done] = hosts.ends([nursery.start("train", asked, shell.folder, environment)])
        assert done.code == 0, done.err
        return losses(str(folder))

    return run


def losses(run: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in loggers.read_metrics(run) if line["kind"] == "train"}


def assert_same(found: dict[int, float], wanted: dict[int, float], steps: int) -> None:
    assert found.keys() == wanted.keys() == set(range(1, steps + 1))
    np.testing.assert_allclose([found[step] for step in wanted], list(wanted.values()), rtol=1e-5)


def assert_succeeded(job: str, count: int) -> None:
    """By what the hosts have reported."""
    found = reports.read(f"gs://bucket/jobs/{job}/reports/0-0")
    assert sorted(found) == [f"t1v-n-0123abcd-w-{index}" for index in range(count)]
    assert reports.outcome(found, count) == reports.Outcome(code=0)


def until(slice_: Slice, started: list[subprocess.Popen], pattern: str) -> list[str]:
    """Waits for a pattern in the log of the first VM; returns what its group has matched, each time."""
    end_s = time.monotonic() + 300
    while not (found := re.findall(pattern, slice_.log(0))):
        assert time.monotonic() < end_s and all(one.poll() is None for one in started), slice_.log(0)[-3000:]
        time.sleep(0.05)
    return found


def test_a_vm_installs_the_wheel_and_trains(vms, staged, shell):
    """Of a slice of one host, which joins nobody."""
    (shell.folder / "small.gin").write_text(SMALL)
    script, slice_ = staged("small.gin", "--slice=v4-8", "--gin.TRAIN_STEPS=2"), vms(1)
    slice_.end(slice_.boot(script))
    assert slice_.package(0).is_relative_to(slice_.home(0))
    assert_succeeded("small", 1)
    assert sorted(losses("gs://bucket/runs/small")) == [1, 2]


@pytest.mark.heavy
def test_two_vms_install_the_wheel_and_train_as_one_machine(vms, staged, shell, alone):
    (shell.folder / "small.gin").write_text(SMALL)
    script, slice_ = staged("small.gin", "--slice=v4-16"), vms(2)
    slice_.end(slice_.boot(script))
    assert "joined 2 processes on 2 hosts: 8 devices" in slice_.log(0)
    assert all("agent-worker-number" in server.asked for server in slice_.servers)
    assert all(slice_.package(index).is_relative_to(slice_.home(index)) for index in range(2))
    assert_succeeded("small", 2)
    assert_same(losses("gs://bucket/runs/small"), alone(8, "--gin_file=small.gin", "--gin.Plan.slice='v4-16'"), 4)


@pytest.mark.heavy  # minutes; the one above is in the short suite
@pytest.mark.fault(4, 50)
def test_four_vms_train_the_quickstart_through_maintenance_and_a_restart(vms, staged, shell, alone):
    """Maintenance of one of them is announced, and later all are stopped and started again."""
    (shell.folder / "slow.py").write_text(SLOW)
    (shell.folder / "slow.gin").write_text("import slow\nMonitoring.more = (@Slow(),)\n")
    files = ("--gin_file=quickstart.gin", "--gin_file=slow.gin", "--gin.Plan.slice='v5e-16'")
    flags = [f"--gin.{setting}" for setting in QUICK]
    script, slice_ = staged("quickstart.gin", "--gin_file=slow.gin", "--slice=v5e-16", *flags), vms(4)
    started = slice_.boot(script)
    until(slice_, started, r"step +3/")
    slice_.announce(2, "TERMINATE_ON_HOST_MAINTENANCE")
    (first,) = map(int, until(slice_, started, r"resuming from step (\d+)"))
    assert 3 <= first < STEPS and "maintenance of this host is announced" in slice_.log(2)
    until(slice_, started, rf"step +{first + 2}/")
    for one in started:
        one.send_signal(signal.SIGTERM)
    assert [done.code for done in hosts.ends(started)] == [128 + signal.SIGTERM] * 4
    assert all(not report.is_final for report in reports.read("gs://bucket/jobs/quickstart/reports/0-0").values())

    slice_.announce(2, "NONE")
    slice_.end(slice_.boot(script))
    steps = [int(step) for step in re.findall(r"resuming from step (\d+)", slice_.log(0))]
    assert steps[0] == first and len(steps) == 2 and first + 2 <= steps[1] < STEPS
    assert slice_.log(0).count("joined 4 processes on 4 hosts: 16 devices") == 3
    # Nothing is installed twice.
    assert [(slice_.home(index) / "gcloud").read_text().count("\n") for index in range(4)] == [1] * 4
    assert_succeeded("quickstart", 4)
    assert_same(losses("gs://bucket/runs/quickstart"), alone(16, *files, *flags), STEPS)
