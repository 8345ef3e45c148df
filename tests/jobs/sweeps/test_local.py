"""Trials in processes of this machine: they end with the sweep, and what they say is kept."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from capibara.jobs.sweeps import local, logged
from capibara.jobs.sweeps.launcher import Progress
from capibara.jobs.sweeps.local import LocalLauncher
from capibara.jobs.sweeps.trial import Trial


class Script(LocalLauncher):
    """Each trial runs a script in which FOLDER is its run folder."""

    def __init__(self, folder, code, **options):
        super().__init__(folder, (), **options)
        self._code = code

    def command(self, trial):
        os.makedirs(trial.model_dir, exist_ok=True)
        return [sys.executable, "-S", "-c", f"FOLDER = {trial.model_dir!r}\n{self._code}"]


def trial_of(folder, number=0, **bindings):
    return Trial(number=number, bindings=bindings, model_dir=f"{folder}/trials/{number:03d}")


def ended(launcher, trial):
    until_s = time.monotonic() + 60
    while (status := launcher.state(trial)).progress is Progress.RUNNING:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return status


def there(path):
    until_s = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)


WAITS = """
import os, signal, time
def stop(*_):
    open(FOLDER + "/saved", "w").close()
    os._exit(143)
signal.signal(signal.SIGTERM, stop)
open(FOLDER + "/ready", "w").close()
for _ in range(1200): time.sleep(0.05)
"""


def test_how_a_trial_ends(tmp_path):
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(int(FOLDER[-1]))"
    first, second = trial_of(tmp_path, 0), trial_of(tmp_path, 3)
    with Script(str(tmp_path), code) as launcher:
        assert launcher.state(first).progress is Progress.FAILED  # it was not started
        for trial in (first, second, second):
            launcher.start(trial)
        assert ended(launcher, first).progress is Progress.SUCCEEDED
        status = ended(launcher, second)
        launcher.start(second)  # it has ended, and stays so
        assert launcher.state(second) == status and status.progress is Progress.FAILED
    log = tmp_path / "trials" / "003.log"
    assert sorted(log.read_text().splitlines()) == ["one", "two"]
    assert status.reason.startswith(f"exit code 3, see {log}: ")


def test_a_trial_that_is_stopped_saves_first(tmp_path):
    trial = trial_of(tmp_path)
    with Script(str(tmp_path), WAITS) as launcher:
        launcher.stop(trial)  # it is not there
        launcher.start(trial)
        there(tmp_path / "trials/000/ready")
        assert launcher.state(trial).progress is Progress.RUNNING
        launcher.stop(trial)
        assert ended(launcher, trial).progress is Progress.FAILED
    assert (tmp_path / "trials/000/saved").exists()


def test_all_trials_end_with_the_launcher(tmp_path):
    with pytest.raises(KeyboardInterrupt), Script(str(tmp_path), WAITS) as launcher:
        for number in range(2):
            launcher.start(trial_of(tmp_path, number))
            there(tmp_path / f"trials/00{number}/ready")
        raise KeyboardInterrupt
    assert (tmp_path / "trials/000/saved").exists() and (tmp_path / "trials/001/saved").exists()


def test_a_trial_waits_for_an_earlier_process_that_still_saves(tmp_path):
    """That of a sweep that was killed, whose run folder it is until it has ended."""
    trial, mark = trial_of(tmp_path), tmp_path / "trials/000"
    mark.mkdir(parents=True)
    # Its child has the log, too, and ends later than itself.
    saves = f"import os, time\nprint('saves', flush=True)\nif os.fork(): os._exit(0)\nwhile not os.path.exists({str(mark / 'go')!r}): time.sleep(0.01)\nprint('saved', flush=True)"
    command = [sys.executable, logged.__file__, str(tmp_path / "trials/000.log"), sys.executable, "-S", "-c", saves]
    subprocess.run(command, check=True)
    with Script(str(tmp_path), "print('resumes')") as launcher:
        launcher.start(trial)
        there(mark)
        assert launcher.state(trial).progress is Progress.RUNNING
        (mark / "go").touch()
        assert ended(launcher, trial).progress is Progress.SUCCEEDED
    assert (tmp_path / "trials/000.log").read_text().split() == ["saves", "saved", "resumes"]


def test_a_trial_is_a_run_of_train(tmp_path):
    trial = trial_of(tmp_path, LEARNING_RATE="0.001")
    with LocalLauncher(str(tmp_path), ["--gin_file=none.gin"], flags=["--restarts=0"]) as launcher:
        command = launcher.command(trial)
        launcher.start(trial)
        status = ended(launcher, trial)
    assert command[1:4] == ["-m", "capibara.launch", "local"] and "--restarts=0" in command
    assert command[command.index("--") :] == [
        "--", "train", "--gin_file=none.gin", "--gin_bindings=LEARNING_RATE = 0.001",
        f'--gin_bindings=Trainer.model_dir = "{tmp_path}/trials/000"',
    ]  # fmt: skip
    assert "exit code 2, see " in status.reason and "error: no Gin file none.gin in " in status.reason


def test_logs_of_a_sweep_in_a_bucket_are_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = pathlib.Path(local.logs_of("gs://bucket/sweeps/a"))
    assert found.is_relative_to(tmp_path) and found.is_dir()
    assert local.logs_of("gs://bucket/sweeps/b") != str(found)
