"""`capibara launch local` of which one process is killed, again and again: the run ends as one that nothing has disturbed."""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import time

import pytest

from capibara.checkpoints import manifest, step_folders
from capibara.jobs import guard
from capibara.jobs.local import PERMIT
from capibara.monitoring.metrics_file import loggers

FLAGS = ("--gin_file=tiny.gin", "--emulate=1", "--gin.Checkpointing.every=3")
WITHIN_S = 300.0  # for new steps after a kill


class Launched:
    """A run of several processes on loopback, from the command line."""

    def __init__(self, shell, name: str, processes: int, steps: int, restarts: int):
        self.folder, self.count, self._steps = shell.folder / name, processes, steps
        flags = (*FLAGS, f"--gin.MODEL_DIR={name}", f"--gin.TRAIN_STEPS={steps}")
        start = ("local", f"--processes={processes}", f"--restarts={restarts}", "--", "train", *flags)
        self._launcher = shell.start("launch", *start)

    def newest_step(self) -> int:
        """The newest that is logged; 0: none."""
        file = self.folder / "metrics.jsonl"
        records = loggers.all_records(str(file)) if file.exists() else []
        return max((record["step"] for record in records if record["kind"] == "train"), default=0)

    def workers(self) -> dict[int, int]:
        """Index -> process id."""
        pid, found = self._launcher.pid, {}
        for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            variables = pathlib.Path(f"/proc/{child}/environ").read_text()
            if re.search(rf"(?:^|\0){PERMIT}=", variables):
                index = re.search(r"(?:^|\0)JAX_PROCESS_ID=(\d+)\0", variables)  # one process alone has none
                found[int(index[1]) if index else 0] = int(child)
        return found

    def kill(self, index: int, after: int) -> None:
        """kill -9 of a worker so many new steps later; returns when its peers have ended, too."""
        from_step, end_s = self.newest_step() + after, time.monotonic() + WITHIN_S
        while (step := self.newest_step()) < from_step:
            assert self._launcher.poll() is None and time.monotonic() < end_s, self._launcher.communicate(timeout=60)
            time.sleep(0.02)
        workers = self.workers()
        assert sorted(workers) == [*range(self.count)] and step < self._steps
        os.kill(workers[index], signal.SIGKILL)
        while any(guard.stat_of(pid) is not None for pid in workers.values()):
            assert time.monotonic() < end_s
            time.sleep(0.02)

    def end(self) -> tuple[str, str]:
        """What it has said; it ends well, and so does what it has started."""
        workers = self.workers()
        out, err = self._launcher.communicate(timeout=WITHIN_S)
        assert self._launcher.returncode == 0, err[-3000:]
        assert not [pid for pid in workers.values() if guard.stat_of(pid) is not None]
        return out, err

    def learned(self) -> tuple[list[tuple[int, float]], dict[str, str]]:
        """The losses, and the hash of each file of the last checkpoint."""
        losses = [
            (line["step"], line["loss"]) for line in loggers.read_metrics(str(self.folder)) if line["kind"] == "train"
        ]
        last = manifest.verify(step_folders.folder_of(str(self.folder)) / str(self._steps))
        return losses, {file.path: file.xxh128 for file in last.files if file.path != manifest.RUN}


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("processes", "kills"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.heavy),
        pytest.param(4, 5, marks=[pytest.mark.heavy, pytest.mark.fault(29, 36)]),
    ],
)
def test_workers_are_killed_and_the_run_learns_as_one_that_is_not_disturbed(shell, processes, kills):
    """Bit for bit; of four processes each is killed, and the first one coordinates."""
    steps, chance = 18 * kills + 6, random.Random(processes)
    run = Launched(shell, f"killed{processes}", processes, steps, restarts=kills + 1)
    for index in (1, 0, 3, 2, 1)[:kills] if processes > 1 else (0,):  # after two saves at least, so that one is whole
        run.kill(index, after=7 + chance.randrange(8))
    out, err = run.end()
    assert [f"; restart {number} of {kills + 1} in " in err for number in (kills, kills + 1)] == [True, False], err
    resumed = [int(step) for step in re.findall(r"resuming from step (\d+)", out)]
    assert len(resumed) == kills and resumed == sorted(set(resumed))
    whole = Launched(shell, f"whole{processes}", processes, steps, restarts=0)
    whole.end()
    (found, files), (wanted, expected) = run.learned(), whole.learned()
    assert [step for step, _ in wanted] == [*range(1, steps + 1)]
    assert found == wanted and files == expected
