"""Jobs on hosts that OpenSSH reaches: its own server on loopback, twice, with keys of its own."""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from capibara.core.types import UserError
from capibara.jobs import systems
from capibara.jobs.managing import recovery
from capibara.jobs.managing.records import State
from capibara.jobs.secrets import Secret, Source
from capibara.jobs.spec import Attempt
from capibara.jobs.systems.system import Busy, Denied, Exists, Phase

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from job_specs import job  # noqa: E402
from managed import Managed, until  # noqa: E402
from ssh_hosts import MISSING, SSHD, Hosts, Pair, is_alive, key  # noqa: E402

pytestmark = pytest.mark.skipif(SSHD is None, reason=MISSING)

UNTIL_STOPPED = "trap 'echo saved; exit 143' TERM; while :; do sleep 0.05; done"
UNTIL_KILLED = "trap '' TERM; touch ready-$JAX_PROCESS_ID; while :; do sleep 0.05; done"
VALUE = 's3cr3t of\nthe "test" $HOME \' \\'
TOKEN = Secret(variable="TOKEN", source=Source.ENVIRONMENT, name="MY_TOKEN")


@pytest.fixture(scope="module")
def connected(tmp_path_factory):
    """Hosts of all tests, with connections that stay open: each new one takes half a second."""
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    with tempfile.TemporaryDirectory() as folder, hosts.connected(folder):
        yield hosts
    hosts.stop()


@pytest.fixture
def pair(connected, tmp_path):
    found = Pair(connected, tmp_path)
    yield found
    found.close()


@pytest.fixture
def alone(tmp_path):
    """Hosts of one test, with a new connection for each call."""
    (tmp_path / "hosts").mkdir()
    hosts = Hosts(tmp_path / "hosts")
    found = Pair(hosts, tmp_path)
    yield found
    found.close()
    hosts.stop()


def spec(number=0, *, slice_="2xcpu-1", **fields):
    return job(slice_, image=None, attempt=Attempt(launch="a1", number=number), **fields)


def in_phase(one, phase):
    """The resource, once it is in a phase."""
    return until(lambda: next((found for found in one.resources() if found.phase is phase), None))


def test_a_job_runs_on_two_hosts_and_its_log_is_read(alone):
    one = systems.connect(alone.backend(folder="~/.capibara/jobs"))
    assert one.resources() == []
    one.submit(spec(3, labels={"team": "a"}, environment={"A": "b  'c'"}))
    found = in_phase(one, Phase.SUCCEEDED)
    assert found.job == "run" and found.attempt == Attempt(launch="a1", number=3) and found.labels["team"] == "a"
    assert (alone.hosts.folder / ".capibara" / "jobs" / "run" / "h1" / "now" / "code").read_text() == "0\n"
    assert found.id == "run/a1-3" and abs(found.created_s - time.time()) < 60 and found.reason == ""
    for index in range(2):
        (line,) = alone.ran(index)
        assert line.startswith(f"{index}/2 127.0.0.1:8476 A=b  'c' ")
    lines = [*one.log(spec(3), found)]
    assert [line[:20] for line in lines] == ["==> h1 <==", "began 1 -m capibara.", "==> h0 <==", "began 0 -m capibara."]
    assert "capibara.launch staged --url=" in lines[3] and lines[3].endswith("-- train --gin_file=run.gin")
    one.delete(found)
    assert one.resources() == []
    assert [*one.log(spec(3), found)] == lines  # it is kept until the next attempt has ended
    one.delete(found)
    one.close()


def test_the_log_ends_with_the_last_thousand_lines(pair):
    pair.does("seq 1 3000; printf 'no end \\377'")
    pair.hosts.all[0].rc.write_text("printf 'Welcome to h0'")  # as a .bashrc may
    one = pair.system("h0")
    one.submit(spec(slice_="cpu-1"))
    found = in_phase(one, Phase.SUCCEEDED)
    lines = [*one.log(spec(), found)]
    assert len(lines) == 1000 and lines[0] == "2002" and lines[-1] == "no end \N{REPLACEMENT CHARACTER}"
    shutil.rmtree(pair.jobs / "run")
    (line,) = one.log(spec(), found)
    assert line == f"h0 has no log of this attempt in {pair.jobs}/run"


def test_an_attempt_starts_once(pair):
    pair.does(UNTIL_STOPPED)
    one = pair.system()

    def submit(_):
        with contextlib.suppress(Exists):
            one.submit(spec())
            return True

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert any(pool.map(submit, range(4)))
    in_phase(one, Phase.RUNNING)
    with pytest.raises(Exists):
        one.submit(spec())
    pair.send(signal.SIGKILL)
    in_phase(one, Phase.PREEMPTED)
    with pytest.raises(Exists):
        one.submit(spec())
    assert len(pair.ran(0)) == len(pair.ran(1)) == 1


def start_alone(pair, index, number=0):
    """An attempt on one host, as if its manager was killed in the middle of a submit; returns the exit code."""
    script = pair.backend().render(spec(number)).script
    return subprocess.run(["bash", "-s", str(index)], input=script.encode(), stdout=subprocess.DEVNULL).returncode


def test_a_submit_that_reached_one_host_is_completed_by_the_next(pair):
    pair.does(UNTIL_STOPPED)
    one = pair.system()
    start_alone(pair, 0)
    found = in_phase(one, Phase.WAITING)
    assert found.is_partial and found.reason == "not started on h1"
    one.submit(spec())
    in_phase(one, Phase.RUNNING)
    assert len(pair.ran(0)) == 1 and until(lambda: len(pair.ran(1)) == 1)


def test_another_attempt_waits_for_the_end_of_the_one_before(pair):
    pair.does(UNTIL_STOPPED)
    one = pair.system()
    one.submit(spec(0))
    with pytest.raises(Exists):
        one.submit(spec(1))
    with pytest.raises(UserError, match="job run runs on h0 with --hosts=h0,h1: cancel it with these"):
        pair.system("h0").submit(spec(1, slice_="cpu-1"))
    assert start_alone(pair, 1, number=1) == 11  # what the other host does not know
    pair.send(signal.SIGKILL)
    in_phase(one, Phase.PREEMPTED)
    one.submit(spec(1))
    (found,) = one.resources()
    assert found.attempt.number == 1


def test_a_place_lists_the_jobs_of_its_own_hosts(pair):
    one, other = pair.system("h0,h1"), pair.system("h0")
    one.submit(spec())
    other.submit(spec(name="single", slice_="cpu-1"))
    assert [found.job for found in one.resources()] == ["run"]
    assert in_phase(other, Phase.SUCCEEDED).job == "single"
    assert pair.ran("") and " A=" in pair.ran("")[0]  # no other host to be found


def test_a_host_whose_key_has_changed_runs_nothing_nor_do_the_others(alone):
    alone.hosts.know(alone.hosts.all[0].key, key(alone.folder / "other"))
    one = alone.system()
    message = "h1 has another host key than the known one, and nothing was run: .*ssh-keyscan h1.*ssh-keygen -R h1"
    for call in (lambda: one.submit(spec()), one.resources):
        with pytest.raises(UserError, match=message):
            call()
    assert not alone.jobs.exists() and (alone.hosts.folder / "known").read_text() == alone.hosts.known


def test_a_host_whose_key_is_not_known_runs_nothing(alone):
    known = alone.folder / "my known hosts"
    known.write_text(alone.hosts.known)
    alone.hosts.know(None, alone.hosts.all[1].key)
    with pytest.raises(UserError, match="h0 has a host key that is not known, and nothing was run: .*ssh-keyscan h0"):
        alone.system().submit(spec())
    assert not alone.jobs.exists() and (alone.hosts.folder / "known").read_text() == alone.hosts.known
    systems.connect(alone.backend(known_hosts=str(known))).submit(spec())
    assert alone.jobs.exists()


def test_a_user_who_is_refused_and_a_host_that_is_away(alone):
    one, hosts = alone.system(), alone.hosts
    one.submit(spec())
    found = in_phase(one, Phase.SUCCEEDED)
    hosts.allow("")
    with pytest.raises(Denied, match=r"refuses this user \(.*Permission denied \(publickey\).*: add your key"):
        one.resources()
    hosts.all[1].stop()
    hosts.allow((hosts.folder / "user.pub").read_text())
    for call in (one.resources, lambda: one.delete(found), lambda: one.submit(spec(1))):
        with pytest.raises(Busy, match=r"h1 is not reached \(.*Connection refused\)"):
            call()
    first, *more = one.log(spec(), found)
    assert first.startswith("h1 is not reached") and more[-1].startswith("began 0")
    hosts.all[1].start()
    one.delete(found)
    assert one.resources() == []


def test_a_host_that_does_not_answer(alone):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        alone.hosts.client.write_text(f"Host h0\nHostName 127.0.0.1\nPort {port}\nIdentityFile /dev/null\n")
        with pytest.raises(Busy, match=r"h0 has not answered after 0\.5 s"):
            alone.system("h0", call_s=0.5).resources()


def test_a_host_whose_answer_is_cut_off(alone):
    one, rc = alone.system("h0"), alone.hosts.all[0].rc
    alone.does(UNTIL_STOPPED)
    # $PPID is the server's process for the connection; jobs read this file, too.
    rc.write_text("case $- in *s*) trap 'kill -KILL $PPID' EXIT ;; esac")
    with pytest.raises(Busy, match="h0 is not reached"):
        one.resources()
    rc.write_text('flock() { command flock "$@" && [ $# != 2 ] && kill -KILL $PPID; }')
    with pytest.raises(Busy, match="h0 is not reached"):
        one.submit(spec(slice_="cpu-1"))
    rc.write_text("")
    in_phase(one, Phase.RUNNING)
    with pytest.raises(Exists):
        one.submit(spec(slice_="cpu-1"))
    assert len(alone.ran("")) == 1


def test_a_host_that_runs_something_else_has_not_started_the_job_and_hides_none(pair):
    pair.hosts.all[0].rc.write_text("case $- in *s*) echo this host is closed; exit 0 ;; esac")
    one = pair.system("h0")
    with pytest.raises(Busy, match="h0 has sent a part of its answer only"):
        one.resources()
    with pytest.raises(UserError, match="h0 does not run what ssh passes to it"):
        one._start("h0", b"exit 0")


def test_a_host_or_a_configuration_that_is_none(alone):
    alone.hosts.client.write_text("Nonsense yes\n")
    with pytest.raises(UserError, match="ssh h0 .*: correct --hosts, --config_file"):
        alone.system().resources()
    alone.hosts.client.unlink()
    with pytest.raises(UserError, match="ssh h0 .*: correct --hosts, --config_file"):
        alone.system().resources()


def test_a_machine_without_ssh(pair, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="ssh is not on this machine"):
        systems.connect(pair.backend())
    with pytest.raises(UserError, match="ssh is not on this machine"):
        pair.system().resources()


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "the job was killed"), (signal.SIGTERM, "the job was ended by SIGTERM")]
)
def test_a_job_that_a_host_has_lost_counts_as_preempted_and_is_stopped_on_the_others(pair, number, reason):
    pair.does(UNTIL_STOPPED)
    one = pair.system()
    one.submit(spec())
    in_phase(one, Phase.RUNNING)
    groups = pair.groups()
    until(lambda: pair.ran(0) and pair.ran(1))
    pair.send(number, groups[1])
    found = in_phase(one, Phase.PREEMPTED)
    assert found.reason == f"h1: {reason}" and not is_alive(groups[0])
    assert "saved" in one.log(spec(), found)
    one.delete(found)
    assert one.resources() == []


def test_a_job_that_fails_on_one_host_has_failed_once_the_others_have_ended(pair):
    pair.does(f'[ "$JAX_PROCESS_ID" = 0 ] || exit 2\n{UNTIL_STOPPED}')
    one = pair.system()
    one.submit(spec())
    found = in_phase(one, Phase.FAILED)
    assert found.reason == "h1: exit code 2" and not is_alive(pair.groups()[-1])
    assert not pair.now(0).exists() and len(pair.ran(0)) == 1


def test_a_command_that_is_killed_is_no_exit_code_137(pair):
    pair.does('[ "$JAX_PROCESS_ID" = 0 ] && kill -KILL $$; exit 0')
    one = pair.system()
    one.submit(spec())
    assert in_phase(one, Phase.PREEMPTED).reason == "h0: the job was killed"
    pair.does('[ "$JAX_PROCESS_ID" = 0 ] && exit 137; exit 0')
    one.submit(spec(1))
    assert in_phase(one, Phase.FAILED).reason == "h0: exit code 137"


def test_a_host_that_is_lost_is_why_the_others_have_failed(pair):
    pair.does('[ "$JAX_PROCESS_ID" = 1 ] && kill -KILL $$; exit 1')
    one = pair.system()
    one.submit(spec())
    until(lambda: pair.ran(0) and pair.ran(1) and not any(map(is_alive, pair.groups())))
    (found,) = one.resources()
    assert (found.phase, found.reason) == (Phase.PREEMPTED, "h1: the job was killed")


def test_a_host_that_was_rebooted_has_lost_its_job(pair):
    pair.does(UNTIL_STOPPED)
    one = pair.system("h0")
    one.submit(spec(slice_="cpu-1"))
    in_phase(one, Phase.RUNNING)
    path = pair.now(0) / "process"
    number, start, boot, began = path.read_text().split()
    path.write_text(f"{number} {start} 01234567-89ab-cdef-0123-456789abcdef {began}\n")
    assert in_phase(one, Phase.PREEMPTED).reason == "h0: the host was rebooted"
    path.write_text(f"{number} {start} {boot} {began}\n")


def test_a_process_whose_number_was_used_again_is_not_signalled(pair):
    pair.does(UNTIL_STOPPED)
    one = pair.system("h0")
    one.submit(spec(slice_="cpu-1"))
    found = in_phase(one, Phase.RUNNING)
    path = pair.now(0) / "process"
    group, *more = path.read_text().split()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as innocent:
        path.write_text(" ".join([str(innocent.pid), *more]))
        assert in_phase(one, Phase.PREEMPTED).reason == "h0: the job was killed"
        one.delete(found)
        assert innocent.poll() is None
        innocent.kill()
    pair.send(signal.SIGKILL, int(group))


def test_a_job_without_its_first_process_still_runs_and_is_stopped(pair):
    pair.does(UNTIL_STOPPED)
    one = pair.system()
    one.submit(spec())
    found = in_phase(one, Phase.RUNNING)
    groups = pair.groups()
    until(lambda: pair.ran(0) and pair.ran(1))
    for group in groups:
        os.kill(group, signal.SIGKILL)
    assert [again.phase for again in one.resources()] == [Phase.RUNNING]
    one.delete(found)
    until(lambda: one.resources() == [])
    assert not any(map(is_alive, groups))


def test_a_job_that_is_deleted_saves_and_is_listed_until_it_has_ended(pair):
    pair.does(
        f"trap 'until [ -e {pair.folder}/end ]; do sleep 0.02; done; echo saved; exit 143' TERM; while :; do sleep 0.05; done"
    )
    one = pair.system()
    one.submit(spec(grace_s=300))
    found = in_phase(one, Phase.RUNNING)
    until(lambda: pair.ran(0) and pair.ran(1))
    pair.send(signal.SIGSTOP, pair.groups()[0])  # which must not keep it from ending
    one.delete(found)
    in_phase(one, Phase.DELETING)
    one.delete(found)  # not SIGKILL yet
    with pytest.raises(Exists):
        one.submit(spec(1))
    (pair.folder / "end").touch()
    until(lambda: one.resources() == [])
    assert [*one.log(spec(), found)][-1] == "saved"
    one.submit(spec(1))


def test_a_job_that_does_not_end_is_killed_after_its_grace(pair):
    pair.does(f"cd {pair.folder}; {UNTIL_KILLED}")
    one = pair.system()
    one.submit(spec(grace_s=10))
    found, groups = in_phase(one, Phase.RUNNING), pair.groups()
    until(lambda: all((pair.folder / f"ready-{index}").exists() for index in range(2)))
    one.delete(found)
    assert in_phase(one, Phase.DELETING) and all(map(is_alive, groups))
    for index in range(2):
        path = pair.now(index) / "grace_s"
        assert path.read_text() == "40\n"  # and time for the launcher to end
        path.write_text("0\n")
    until(lambda: one.resources() == [])
    assert not any(map(is_alive, groups))


def test_a_host_where_the_job_cannot_start_stops_it_on_the_others(pair):
    pair.does(UNTIL_STOPPED)
    pair.now(1).parents[1].mkdir(parents=True)
    pair.now(1).parent.write_text("no folder")
    one = pair.system()
    with pytest.raises(UserError, match=r"h1: the script ends with exit code 1 \(mkdir: .*\): mend this on the host"):
        one.submit(spec())
    until(lambda: one.resources() == [])
    assert len(pair.ran(0)) <= 1 and not pair.ran(1)


def test_the_value_of_a_secret_is_in_no_file_and_on_no_command_line(pair, monkeypatch):
    pair.does(UNTIL_STOPPED)
    monkeypatch.setenv("MY_TOKEN", VALUE)
    one = pair.system()
    one.submit(spec(secrets=(TOKEN,)))
    in_phase(one, Phase.RUNNING)
    digest = hashlib.sha256(VALUE.encode()).hexdigest()
    for index in range(2):
        assert digest in until(lambda index=index: pair.ran(index))[0]
    files = [path for folder in (pair.folder, pair.hosts.folder) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if b"s3cr3t" in path.read_bytes()]
    assert not [path for path in pair.jobs.rglob("*") if path.is_dir() and path.stat().st_mode & 0o077]
    shown = subprocess.run(["ps", "-wweo", "args"], capture_output=True, check=True).stdout
    assert str(pair.folder / "python").encode() in shown and b"s3cr3t" not in shown
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(UserError, match="--secret=TOKEN=env:MY_TOKEN: MY_TOKEN is not set here: export it"):
        one.submit(spec(1, secrets=(TOKEN,)))


def test_a_script_that_arrives_in_part_runs_nothing(pair):
    script = pair.backend().render(spec(secrets=(TOKEN,))).script
    whole = script.encode() + b"the value\0"
    for length in (*range(len(script) // 2, len(script) - 1, 197), len(whole) - 1):
        subprocess.run(["bash", "-s", "0"], input=whole[:length], capture_output=True)
    assert not pair.jobs.exists()
    subprocess.run(["bash", "-s", "0"], input=whole, stdout=subprocess.DEVNULL, check=True)
    assert pair.jobs.exists()


def test_a_managed_job_survives_preemption_lost_connections_and_the_loss_of_its_database(alone):
    alone.does(f"until [ -e {alone.folder}/end ]; do sleep 0.05; done")
    place, hosts = alone.backend(), alone.hosts.all
    with Managed(alone.folder, place, spec()) as one:
        hosts[1].stop()
        assert one.manager.look()[0].state is State.SUBMITTING
        hosts[1].start()
        one.comes_to(State.RUNNING)
        alone.send(signal.SIGKILL, alone.groups()[1])
        one.comes_to(State.RUNNING, 1)
        hosts[0].stop()
        assert one.manager.look()[0].state is State.RUNNING
        hosts[0].start()
        one.lose()
        (found,) = recovery.recover(one.records, place, alone.system(), str(alone.folder))
        assert (found.attempt.number, found.attempt.failures) == (1, 0)
        (alone.folder / "end").touch()
        with one:
            assert one.ends().state is State.SUCCEEDED
    assert len(alone.ran(0)) == len(alone.ran(1)) == 2


def test_a_managed_job_is_cancelled_on_all_hosts_even_if_it_ignores_sigterm_on_one(pair):
    pair.does(f"cd {pair.folder}; if [ $JAX_PROCESS_ID = 0 ]; then {UNTIL_KILLED}; fi; {UNTIL_STOPPED}")
    with Managed(pair.folder, pair.backend(), spec()) as one:
        one.comes_to(State.RUNNING)
        groups = pair.groups()
        until((pair.folder / "ready-0").exists)
        one.records.cancel("run")
        one.comes_to(State.ENDING)
        (pair.now(0) / "grace_s").write_text("0\n")
        assert one.ends().state is State.CANCELLED
    assert not any(map(is_alive, groups))


def test_a_managed_job_that_has_started_on_one_host_only_is_completed(pair):
    pair.does(UNTIL_STOPPED)
    start_alone(pair, 0)
    with Managed(pair.folder, pair.backend(), spec()) as one:
        one.comes_to(State.RUNNING)
        assert until(lambda: len(pair.ran(1)) == 1) and len(pair.ran(0)) == 1
        one.records.cancel("run")
        assert one.ends().state is State.CANCELLED
