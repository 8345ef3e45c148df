"""Jobs of Slurm, by stand-ins for its commands that run them as processes of this machine."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from capibara.core.types import UserError
from capibara.jobs import backends, systems
from capibara.jobs.managing import recovery
from capibara.jobs.managing.records import State
from capibara.jobs.secrets import Secret, Source
from capibara.jobs.spec import Attempt
from capibara.jobs.systems.slurm import SlurmCluster
from capibara.jobs.systems.system import Busy, Denied, Exists, Phase, Resource

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import fake_slurm  # noqa: E402
from job_specs import job  # noqa: E402
from managed import Managed, until  # noqa: E402

# What `python` does on the nodes: it runs until SIGTERM, saves, and ends as a run does that was stopped.
UNTIL_STOPPED = "trap 'echo saved; exit 143' TERM; echo began; while :; do sleep 0.05; done"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The folder of the stand-ins, which are in PATH; the current folder is another one."""
    folder, work = tmp_path / "slurm", tmp_path / "work"
    fake_slurm.install(folder)
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield folder
    (folder / "slow-sbatch").unlink(missing_ok=True)
    with fake_slurm.jobs(folder) as known:
        numbers = [*known]
    for number in numbers:
        fake_slurm.end(folder, number, "CANCELLED")


def backend(tmp_path, does="exit 0", **fields):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{does}\n")
    python.chmod(0o755)
    return backends.find("slurm")(python=str(python), **fields)


def system(tmp_path, does="exit 0", *, call_s=30.0, **fields):
    return SlurmCluster(backend(tmp_path, does, **fields), call_s=call_s)


def spec(number=0, *, launch="a1", slice_="cpu-1", **fields):
    return job(slice_, image=None, attempt=Attempt(launch=launch, number=number), **fields)


def is_slow(command, call):
    """This command does not answer, and no other one, whatever else the machine has to do; `call` takes the seconds."""
    for call_s in (0.3, 1.0, 3.0, 10.0):
        with pytest.raises(Busy) as raised:
            call(call_s)
        if str(raised.value) == f"{command} has not answered after {call_s:g} s":
            return
    raise raised.value


def in_phase(one, phase, number=0):
    """The resource of an attempt, once it is in a phase."""
    return until(
        lambda: next(
            (found for found in one.resources() if (found.attempt.number, found.phase) == (number, phase)), None
        )
    )


def test_a_job_is_submitted_runs_and_its_log_is_read(tmp_path, cluster):
    one = systems.connect(backend(tmp_path, 'echo "host $SLURM_PROCID"; exit 0'))
    one.submit(spec(3, slice_="2xcpu-1", labels={"team": "a"}))
    found = in_phase(one, Phase.SUCCEEDED, 3)
    assert found.job == "run" and found.attempt == Attempt(launch="a1", number=3) and found.labels["team"] == "a"
    assert abs(found.created_s - time.time()) < 30 and found.reason == "COMPLETED" and found.id == "1"
    assert sorted(one.log(spec(), found)) == ["host 0", "host 1"]
    assert (tmp_path / "work" / "run-1.log").exists()
    fake_slurm.purge(cluster)
    os.chdir("/")
    assert sorted(one.log(spec(), found)) == ["host 0", "host 1"]  # in the folder that the accounting knows
    (cluster / "no-accounting").touch()
    assert [*one.log(spec(), found)] == ["there is no log yet: /run-1.log does not exist"]
    one.close()


def test_the_log_ends_with_the_last_thousand_lines(tmp_path, cluster):
    one = system(tmp_path, "seq 1 5000; printf 'no end \\377'")
    one.submit(spec())
    lines = [*one.log(spec(), in_phase(one, Phase.SUCCEEDED))]
    assert len(lines) == 1000 and lines[0] == "4002" and lines[-1] == "no end \N{REPLACEMENT CHARACTER}"


def test_a_job_without_a_log_says_where_it_will_be(tmp_path, cluster):
    (cluster / "hold").write_text("Resources")
    one = system(tmp_path)
    one.submit(spec())
    (line,) = one.log(spec(), in_phase(one, Phase.WAITING))
    assert line == f"there is no log yet: {tmp_path / 'work' / 'run-1.log'} does not exist"


def test_an_attempt_is_submitted_once(tmp_path, cluster):
    one = system(tmp_path)
    one.submit(spec())
    in_phase(one, Phase.SUCCEEDED)
    with pytest.raises(Exists, match=r"job 1 \(run\)"):
        one.submit(spec())
    fake_slurm.purge(cluster)
    with pytest.raises(Exists):  # by the accounting
        one.submit(spec())
    one.submit(spec(1))
    one.submit(spec(launch="b2", name="another"))
    assert len(fake_slurm.calls(cluster, "sbatch")) == 3


def test_two_attempts_of_a_job_do_not_run_at_the_same_time(tmp_path, cluster):
    one = system(tmp_path, UNTIL_STOPPED)
    one.submit(spec())
    with pytest.raises(Exists):
        one.submit(spec(1))
    fake_slurm.end(cluster, "1", "NODE_FAIL")
    one.submit(spec(1))


def test_a_job_is_submitted_once_when_the_launcher_is_killed_meanwhile(tmp_path, cluster):
    (cluster / "slow-sbatch").touch()
    one = system(tmp_path, call_s=0.3)
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; import test_slurm, pathlib\n"
        "test_slurm.system(pathlib.Path('..')).submit(test_slurm.spec())"
    )
    paths = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, "-c", program, *paths], env=environment) as process:
        until(lambda: fake_slurm.calls(cluster, "sbatch"), 60)
        process.send_signal(signal.SIGKILL)
    with pytest.raises(Busy, match="another sbatch of this user has not ended"):
        one.submit(spec())
    (cluster / "slow-sbatch").unlink()
    with pytest.raises(Exists):
        system(tmp_path).submit(spec())
    assert len(fake_slurm.calls(cluster, "sbatch")) == 1


def test_an_sbatch_that_takes_too_long_still_runs_and_is_not_repeated(tmp_path, cluster):
    (cluster / "slow-sbatch").touch()
    is_slow("sbatch", lambda call_s: system(tmp_path, call_s=call_s).submit(spec()))
    (cluster / "slow-sbatch").unlink()
    with pytest.raises(Exists):
        system(tmp_path).submit(spec())
    assert len(fake_slurm.calls(cluster, "sbatch")) == 1


PHASES = [
    ("PENDING", "QOSMaxJobsPerUserLimit", Phase.WAITING),
    ("PENDING", "AssocGrpGRESMinutes", Phase.WAITING),
    ("PENDING", "Resources", Phase.WAITING),
    ("CONFIGURING", "None", Phase.WAITING),
    ("SUSPENDED", "None", Phase.WAITING),
    ("REQUEUED", "None", Phase.WAITING),
    ("A_STATE_OF_A_LATER_SLURM", "None", Phase.WAITING),
    ("RUNNING", "None", Phase.RUNNING),
    ("STOPPED", "None", Phase.RUNNING),
    ("COMPLETING", "None", Phase.DELETING),
    ("COMPLETED", "None", Phase.SUCCEEDED),
    ("PREEMPTED", "None", Phase.PREEMPTED),
    ("NODE_FAIL", "NodeDown", Phase.PREEMPTED),
    ("CANCELLED", "None", Phase.CANCELLED),
    ("FAILED", "NonZeroExitCode", Phase.FAILED),
    ("TIMEOUT", "TimeLimit", Phase.FAILED),
    ("OUT_OF_MEMORY", "OutOfMemory", Phase.FAILED),
    ("BOOT_FAIL", "None", Phase.FAILED),
    ("DEADLINE", "DeadLine", Phase.FAILED),
]


def comment(name):
    return f"capibara-job={name},capibara-launch=a1,capibara-attempt=0"


def test_the_phases_of_the_states(tmp_path, cluster):
    for index, (state, reason, _) in enumerate(PHASES):
        fake_slurm.add(cluster, comment(f"run{index}"), state, reason)
    found = system(tmp_path).resources()
    assert [one.phase for one in found] == [phase for _, _, phase in PHASES]
    assert [one.reason for one in found] == [
        state if reason == "None" else f"{state}: {reason}" for state, reason, _ in PHASES
    ]
    assert not any(one.is_denied for one in found)


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("InvalidAccount", "name an --account of yours"),
        ("QOSNotAllowed", "name a --qos of your account"),
        ("PartitionTimeLimit", "lower --minutes"),
        ("AssocMaxGRESPerJob", "take a smaller --slice"),
        ("QOSMaxNodePerJobLimit", "take a smaller --slice"),
        ("QOSMinGRES", "take a larger --slice"),
    ],
)
def test_a_job_that_would_wait_for_ever_is_denied(tmp_path, cluster, reason, fix):
    fake_slurm.add(cluster, comment("run"), "PENDING", reason)
    (found,) = system(tmp_path).resources()
    assert found.is_denied and found.phase is Phase.WAITING and found.reason.startswith(f"PENDING: {reason}: {fix}")


def test_what_only_the_accounting_has_is_listed_if_it_has_ended(tmp_path, cluster):
    one = system(tmp_path)
    for state in ("CANCELLED", "COMPLETED", "PREEMPTED", "PENDING"):  # the last one as if the controller had lost it
        fake_slurm.add(cluster, comment("run"), state, is_purged=True)
    assert [found.phase for found in one.resources()] == [Phase.CANCELLED, Phase.SUCCEEDED, Phase.PREEMPTED]
    assert one.resources()[0].reason.startswith("CANCELLED by ")
    (cluster / "no-accounting").touch()
    assert one.resources() == []
    (cluster / "no-accounting").unlink()
    (cluster / "fail-sacct").write_text("sacct: error: Problem talking to the database: Connection refused")
    with pytest.raises(Busy, match="sacct: Problem talking to the database"):
        one.resources()


def test_other_jobs_are_not_listed(tmp_path, cluster):
    for other in ("(null)", "a|b=c", "of=another", "a line\nof two"):
        fake_slurm.add(cluster, other, "RUNNING")
    assert system(tmp_path).resources() == []


def test_a_job_that_is_cancelled_saves_and_does_not_come_back(tmp_path, cluster):
    one = system(tmp_path, UNTIL_STOPPED)
    one.submit(spec(restarts=5))
    found = in_phase(one, Phase.RUNNING)
    until(lambda: "began" in one.log(spec(), found))
    one.delete(found)
    ended = in_phase(one, Phase.CANCELLED)
    assert ended.reason == "CANCELLED" and "saved" in one.log(spec(), found)
    assert len(fake_slurm.calls(cluster, "scontrol requeue")) == 1  # which the script tries after exit code 143
    one.delete(ended)
    fake_slurm.purge(cluster)
    one.delete(ended)
    one.delete(Resource(id="99", labels={}, phase=Phase.RUNNING))
    assert [one.phase for one in one.resources()] == [Phase.CANCELLED]


def test_a_waiting_job_is_cancelled(tmp_path, cluster):
    (cluster / "hold").write_text("Resources")
    one = system(tmp_path)
    one.submit(spec())
    one.delete(in_phase(one, Phase.WAITING))
    assert in_phase(one, Phase.CANCELLED).reason.startswith("CANCELLED")


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (f"{FAILED}Socket timed out on send/recv operation", Busy, "Socket timed out"),
        (f"{FAILED}Unable to contact slurm controller (connect failure)", Busy, "Unable to contact"),
        (f"{FAILED}Slurm temporarily unable to accept job", Busy, "temporarily"),
        (f"{FAILED}Invalid account or account/partition combination specified", Denied, "name an --account"),
        (f"{FAILED}Invalid qos specification", Denied, "name a --qos"),
        (f"{FAILED}Access/permission denied", Denied, "ask the cluster's administrators for access"),
        (f"{FAILED}User's group not permitted to use this partition", Denied, "name another --partition"),
        (
            f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{FAILED}Job violates accounting/QOS policy (job submit limit)",
            Denied,
            r"sbatch: QOSMaxSubmitJobPerUserLimit; .*submit limit\): wait for your other jobs to end, ask for less",
        ),
        (
            f"{FAILED}Invalid partition name specified",
            UserError,
            "Invalid partition name specified: name a --partition that sinfo lists",
        ),
        (f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)", UserError, ": lower --minutes"),
        (
            f"{FAILED}Requested node configuration is not available",
            UserError,
            ": change --slice, --cpus or --partition",
        ),
        ("sbatch: fatal: Could not establish a configuration source", UserError, "run this on a login node"),
        ("", UserError, "it has failed without a message"),
    ],
)
def test_what_sbatch_says_when_it_fails(tmp_path, cluster, said, kind, message):
    (cluster / "fail-sbatch").write_text(said)
    with pytest.raises(kind, match=message) as raised:
        system(tmp_path).submit(spec())
    assert type(raised.value) is kind and "\n" not in str(raised.value)


@pytest.mark.parametrize("command", ["squeue", "sacct"])
def test_a_list_of_which_a_part_is_missing_hides_no_job(tmp_path, cluster, command):
    fake_slurm.add(cluster, comment("run"), "COMPLETED")
    (cluster / f"half-{command}").touch()
    with pytest.raises(Busy, match=f"{command} has sent a part of its answer only"):
        system(tmp_path).resources()


@pytest.mark.parametrize("command", ["squeue", "scancel", "scontrol"])
def test_a_command_that_fails_or_does_not_answer_is_tried_again_later(tmp_path, cluster, command):
    resource = Resource(id="1", labels={}, phase=Phase.RUNNING)

    def call(call_s=30.0):
        one = system(tmp_path, call_s=call_s)
        calls = {"scancel": lambda: one.delete(resource), "scontrol": lambda: one.log(spec(), resource)}
        calls.get(command, one.resources)()

    (cluster / f"fail-{command}").write_text(f"{command}: error: something that nobody knows")
    with pytest.raises(Busy, match=f"{command}: something that nobody knows"):
        call()
    (cluster / f"fail-{command}").unlink()
    (cluster / f"slow-{command}").touch()
    is_slow(command, call)


def test_a_machine_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not on this machine: run this on a login node"):
        systems.connect(backend(tmp_path))
    with pytest.raises(UserError, match="squeue is not on this machine"):
        system(tmp_path).submit(spec())


def test_variables_of_the_user_do_not_change_what_is_submitted_and_listed(tmp_path, cluster, monkeypatch):
    theirs = {
        "SBATCH_JOB_NAME": "theirs", "SBATCH_OUTPUT": "/dev/null", "SBATCH_EXPORT": "NONE", "SBATCH_WAIT": "1",
        "SBATCH_SIGNAL": "USR1", "SBATCH_PARTITION": "theirs", "SBATCH_ACCOUNT": "theirs", "SQUEUE_STATES": "RUNNING",
        "SLURM_TIME_FORMAT": "relative", "JAX_PLATFORMS": "cpu", "SLURM_CPUS_PER_TASK": "3", "OF_THE_USER": "kept",
    }  # fmt: skip
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    one = system(tmp_path, 'echo "${JAX_PLATFORMS-no} ${SLURM_CPUS_PER_TASK-no} $OF_THE_USER"', partition="ours")
    one.submit(spec())
    assert [*one.log(spec(), in_phase(one, Phase.SUCCEEDED))] == ["no no kept"]
    with fake_slurm.jobs(cluster) as known:
        options = known["1"]["options"]
    assert options["job-name"] == "run" and options["partition"] == "ours" and "export" not in options
    assert options["account"] == "theirs"  # their default, where the job names none


def test_a_folder_without_rights_for_the_lock(tmp_path, cluster, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(cluster / "sbatch"))
    with pytest.raises(UserError, match="cannot be written .*: set XDG_STATE_HOME to another folder"):
        system(tmp_path).submit(spec())


def test_a_secret_that_is_not_set_is_found_before_the_job_is_submitted(tmp_path, cluster, monkeypatch):
    one = system(tmp_path, 'echo "${#TOKEN} characters"')
    wanted = spec(secrets=(Secret(variable="TOKEN", source=Source.ENVIRONMENT, name="MY_TOKEN"),))
    with pytest.raises(UserError, match="--secret=TOKEN=env:MY_TOKEN: MY_TOKEN is not set here: export it"):
        one.submit(wanted)
    monkeypatch.setenv("MY_TOKEN", "s3cr3t")
    one.submit(wanted)
    assert [*one.log(wanted, in_phase(one, Phase.SUCCEEDED))] == ["6 characters"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]


def test_a_managed_job_survives_storms_preemption_and_the_loss_of_its_database(tmp_path, cluster):
    place = backend(tmp_path, "until [ -e end ]; do sleep 0.05; done")
    with Managed(tmp_path, place, spec()) as one:
        (cluster / "storm").write_text("2")
        one.comes_to(State.RUNNING)
        fake_slurm.end(cluster, "1", "PREEMPTED")
        one.comes_to(State.RUNNING, 1)
        (cluster / "hold").write_text("Resources")
        fake_slurm.preempt(cluster, "2")  # to which Slurm gives other nodes itself
        one.comes_to(State.WAITING, 1)
        (cluster / "hold").unlink()
        one.comes_to(State.RUNNING, 1)
        fake_slurm.end(cluster, "2", "NODE_FAIL")
        one.comes_to(State.RUNNING, 2)
        one.lose()
        (cluster / "storm").write_text("1")
        with pytest.raises(Busy, match="Socket timed out"):
            recovery.recover(one.records, place, SlurmCluster(place), str(tmp_path))
        (found,) = recovery.recover(one.records, place, SlurmCluster(place), str(tmp_path))
        assert (found.attempt.number, found.attempt.failures) == (2, 0)
        (tmp_path / "work" / "end").touch()
        with one:
            assert one.ends().state is State.SUCCEEDED
    assert len(fake_slurm.calls(cluster, "sbatch")) == 3


def test_a_managed_job_that_slurm_will_never_start_ends_with_what_to_ask_for(tmp_path, cluster):
    (cluster / "hold").write_text("QOSMaxNodePerJobLimit")
    with Managed(tmp_path, backend(tmp_path), spec()) as one:
        record = one.ends()
    assert record.state is State.FAILED and "QOSMaxNodePerJobLimit: take a smaller --slice" in record.reason
    assert len(fake_slurm.calls(cluster, "sbatch")) == len(fake_slurm.calls(cluster, "scancel")) == 1


@pytest.mark.parametrize("by_capibara", [True, False])
def test_a_managed_job_that_is_cancelled_stays_so(tmp_path, cluster, by_capibara):
    with Managed(tmp_path, backend(tmp_path, UNTIL_STOPPED), spec()) as one:
        one.comes_to(State.RUNNING)
        if by_capibara:
            one.records.cancel("run")
        else:
            subprocess.run(["scancel", "1"], check=True)
        record = one.ends()
    assert record.state is State.CANCELLED and len(fake_slurm.calls(cluster, "sbatch")) == 1
