"""The scripts that back ends write, run: by bash, with stand-ins for gcloud, srun and scontrol."""

import dataclasses
import hashlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from capibara.core.types import UserError
from capibara.jobs import backends, bundle
from capibara.jobs.secrets import Secret, Source
from capibara.jobs.spec import Attempt, Bundle

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from job_specs import WHEEL, job  # noqa: E402


def command(folder, name, script):
    """A program in a folder of PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def environment(tmp_path, **more):
    path = f"{tmp_path / 'bin'}:{os.path.dirname(sys.executable)}:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(tmp_path), "OUT": str(tmp_path), **more}


def text_of(where, spec, **fields):
    if where == "slurm":
        return backends.find(where)(**fields).render(spec).text()
    (document,) = backends.find(where)(project="my-project", zone="us-west4-a", **fields).render(spec).documents
    return document["queuedResource"]["tpu"]["nodeSpec"][0]["node"]["metadata"]["startup-script"]


@pytest.fixture
def bucket(tmp_path):
    """A folder that gcloud's stand-in copies from, with a wheel whose `launch` says how it was called."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("capibara/__init__.py", "")
        said = "import os, sys\nprint('launched', sys.argv[1:], 'A =', os.environ.get('A'))\n"
        wheel.writestr("capibara/launch.py", said)
        info = "capibara_tpu-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: capibara-tpu\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    files = {WHEEL: hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()}
    (folder / bundle.SUMS).write_bytes(bundle.sums(files))
    # gcloud storage cp gs://bucket/jobs/run/HASH/NAME ... TARGET
    copy = f'echo "$@" >> "$OUT/gcloud"; target="${{@: -1}}"; for url in "${{@:3:$#-3}}"; do cp "{folder}/${{url##*/}}" "$target"; done'
    command(tmp_path / "bin", "gcloud", copy)
    return Bundle(url="gs://bucket/jobs/run/0123456789abcdef", files=files)


def boot(script, tmp_path):
    more = {"CAPIBARA_HOME": str(tmp_path / "home"), "CAPIBARA_LOG": str(tmp_path / "log")}
    return subprocess.run(
        ["bash"], input=script, env=environment(tmp_path, **more), capture_output=True, text=True, timeout=300
    )


def test_a_tpu_vm_installs_the_wheel_once_and_runs_the_job_at_each_start(bucket, tmp_path):
    spec = job(wheel=True, bundle=bucket, environment={"A": 'it\'s $HOME "x"'})
    script = text_of("gce", spec)
    for start in range(2):
        ended = boot(script, tmp_path)
        assert ended.returncode == 0, ended.stdout
        (line,) = [line for line in ended.stdout.splitlines() if line.startswith("launched")]
        assert (
            "'staged', '--url=gs://bucket/jobs/run/0123456789abcdef'" in line
            and "'train', '--gin_file=run.gin']" in line
        )
        assert line.endswith('A = it\'s $HOME "x"')
        assert (tmp_path / "log").read_text().count("launched") == start + 1
    assert len((tmp_path / "gcloud").read_text().splitlines()) == 1


@pytest.mark.parametrize("changed", [WHEEL, bundle.SUMS])
def test_a_tpu_vm_installs_nothing_that_was_changed_in_the_bucket(bucket, tmp_path, changed):
    file = tmp_path / "bucket" / changed
    file.write_bytes(file.read_bytes() + b"x")
    ended = boot(text_of("gce", job(wheel=True, bundle=bucket)), tmp_path)
    assert ended.returncode != 0 and "launched" not in ended.stdout
    assert "FAILED" in ended.stdout or "WARNING" in ended.stdout
    assert not [*(tmp_path / "home").glob("*/venv")]


def test_a_tpu_vm_with_an_image_passes_the_environment_into_it(tmp_path):
    command(tmp_path / "bin", "gcloud", 'echo "gcloud $@"')
    command(tmp_path / "bin", "docker", 'echo "docker $@"')
    ended = boot(text_of("gce", job(image="eu-docker.pkg.dev/p/i/capibara:1", environment={"A": "b c"})), tmp_path)
    lines = ended.stdout.splitlines()
    assert lines[:2] == [
        "gcloud auth configure-docker --quiet eu-docker.pkg.dev",
        "docker pull eu-docker.pkg.dev/p/i/capibara:1",
    ]
    assert (
        " --stop-timeout=330 --env=A=b c eu-docker.pkg.dev/p/i/capibara:1 python -m capibara.launch staged" in lines[2]
    )
    assert lines[2].endswith("-- train --gin_file=run.gin")
    ended = boot(text_of("gce", job(image="somebody/capibara:1")), tmp_path)
    assert ended.stdout.startswith("docker pull somebody")  # no registry of Google's


def slurm(tmp_path, step, *, restarts=2, spec=None, **more):
    """A job's script as a process; `step` is what srun's stand-in does, in bash."""
    command(tmp_path / "bin", "srun", step)
    command(tmp_path / "bin", "scontrol", 'echo "$@" >> "$OUT/scontrol"')
    command(tmp_path / "bin", "scancel", '[ "$*" = "--signal=TERM 77" ] && kill -USR1 "$(cat $OUT/began)"')
    script = tmp_path / "job.sh"
    script.write_text(text_of("slurm", spec or job("2xh100-8", image=None, restarts=restarts)))
    own = environment(tmp_path, SLURM_JOB_ID="77", **more)
    return subprocess.Popen(["bash", str(script)], env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def requeued(tmp_path):
    file = tmp_path / "scontrol"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    ("code", "restarts", "count", "again"),
    [
        (0, 2, "0", False),
        (1, 2, "0", False),
        (2, 2, "0", False),
        (75, 2, "0", True),
        (143, 2, "1", True),
        (75, 2, "2", False),
    ],
)
def test_a_job_is_put_back_into_the_queue_where_another_start_helps(tmp_path, code, restarts, count, again):
    process = slurm(tmp_path, f"exit {code}", restarts=restarts, SLURM_RESTART_COUNT=count)
    process.communicate(timeout=60)
    assert process.returncode == code and requeued(tmp_path) == ("requeue 77\n" if again else "")


def test_the_end_of_a_jobs_time_is_passed_to_the_step_which_has_time_to_save(tmp_path):
    # srun kills the step when it gets the signal itself; USR1 stands for what scancel sends to the step.
    step = 'trap "exit 137" TERM; trap "sleep 0.5; echo saved >> $OUT/saved; exit 143" USR1\n'
    step += "echo $$ > $OUT/began; while :; do sleep 0.1; done"
    process = slurm(tmp_path, step)
    while not ((tmp_path / "began").exists() and (tmp_path / "began").read_text()):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (tmp_path / "saved").read_text() == "saved\n" and requeued(tmp_path) == "requeue 77\n"


def test_the_exit_code_of_a_step_does_not_depend_on_wait(tmp_path):
    # Bash 5.2 returns -1 from `wait`, once in some hundred times, if a signal comes as the process ends.
    (tmp_path / "wait").write_text('wait() { builtin wait "$@"; return -1; }')
    process = slurm(tmp_path, "exit 7", BASH_ENV=str(tmp_path / "wait"))
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_a_job_with_a_budget_is_not_put_back(tmp_path):
    spec = job("2xh100-8", image=None, budget_usd=172.8)
    process = slurm(tmp_path, "exit 75", spec=spec)
    process.communicate(timeout=60)
    text = (tmp_path / "job.sh").read_text()
    assert "#SBATCH --time=60\n" in text and "#SBATCH --no-requeue" in text and requeued(tmp_path) == ""
    spent = dataclasses.replace(spec, attempt=Attempt(spent_s=3590))
    with pytest.raises(UserError, match="--budget_usd=172.8 leaves 1 min, which must be longer than 390 s"):
        text_of("slurm", spent)


@pytest.mark.parametrize("grace_s", [0, 30, 300, 3000])
@pytest.mark.parametrize("spent_s", [0, 1800, 3300, 3599])
def test_a_start_is_longer_than_its_signals_lead(grace_s, spent_s):
    """Of each time that is submitted, something is left to train, though Slurm sends its signal up to a minute early."""
    spec = job("2xh100-8", image=None, budget_usd=172.8, grace_s=grace_s, attempt=Attempt(spent_s=spent_s))  # an hour
    for minutes in (None, 1, 2, 5, 6, 7, 30, 51, 52, 600):
        try:
            text = text_of("slurm", spec, minutes=minutes)
        except UserError as error:
            left_s = min(60 * (minutes or 600), 3600 - spent_s)
            assert left_s // 60 * 60 <= grace_s + 30 + 60 and "must be longer than" in str(error)
            continue
        time_min, lead_s = re.search(r"--time=(\d+)\n", text), re.search(r"--signal=B:TERM@(\d+)\n", text)
        assert 60 * int(time_min[1]) - int(lead_s[1]) - 60 > 0


@pytest.mark.parametrize(("minutes", "shorter"), [(30, 30), (600, 60)])
def test_a_job_with_a_budget_has_the_shorter_of_its_two_times(minutes, shorter):
    spec = job("2xh100-8", image=None, budget_usd=172.8)  # an hour
    assert f"#SBATCH --time={shorter}\n" in text_of("slurm", spec, minutes=minutes)


def test_each_node_has_one_process_with_all_its_chips_and_what_the_launcher_inherits(tmp_path):
    secret = Secret(variable="HF_TOKEN", source=Source.ENVIRONMENT, name="MY_TOKEN")
    spec = job("2xh100-8", image=None, environment={"A": "b c"}, secrets=(secret,))
    step = 'echo "$JAX_LOCAL_DEVICE_IDS $A $HF_TOKEN $@"'
    process = slurm(tmp_path, step, spec=spec, MY_TOKEN="value of the token")
    said, _ = process.communicate(timeout=60)
    assert said.startswith(
        "0,1,2,3,4,5,6,7 b c value of the token --kill-on-bad-exit=0 python -m capibara.launch staged"
    )
    assert "value of the token" not in (tmp_path / "job.sh").read_text()
    process = slurm(tmp_path, step, spec=spec)
    said, error = process.communicate(timeout=60)
    assert process.returncode != 0 and said == "" and "MY_TOKEN: must be set where sbatch is called" in error
