"""The lease: only one writer at a time, even if processes die."""

import concurrent.futures
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from etils import epath

from capibara.checkpoints import lease as lease_module
from capibara.checkpoints.lease import NAME, Lease
from capibara.core import processes
from capibara.core.types import UserError
from capibara.storage import stores
from capibara.storage.bucket import BucketStore


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path)


HERE = {"host": socket.gethostname(), "boot": processes.boot_id(), "pid_namespace": processes.pid_namespace()}
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
HOLDING = """
import os, sys
from etils import epath
from capibara.checkpoints.lease import Lease
lease = Lease(epath.Path(sys.argv[1]), float(sys.argv[2]))
print(os.getpid(), flush=True)
sys.stdin.read()
lease.release()
"""


def forge(folder, **changes):
    record = {"pid": 1, "process_start": "1", "host": "elsewhere", "nonce": "n", "renewed": time.time()}
    (folder / NAME).write_text(json.dumps(record | changes))


def test_a_second_writer_is_refused_until_the_first_has_gone(folder):
    first = Lease(folder)
    with pytest.raises(
        UserError, match=rf"{folder} is being written by process {os.getpid()} on {socket.gethostname()}"
    ):
        Lease(folder)
    first.check()
    first.release()
    assert not (folder / NAME).exists()
    Lease(folder).release()


def test_that_of_a_process_that_died_is_taken_over_at_once(folder):
    code = f"from etils import epath; from capibara.checkpoints.lease import Lease; import os; Lease(epath.Path({str(folder)!r})); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert json.loads((folder / NAME).read_text())["pid"] != os.getpid()
    Lease(folder).release()


def test_a_process_with_the_number_of_one_that_died_does_not_hold_it(folder):
    forge(folder, **HERE, pid=os.getpid(), process_start="1")
    Lease(folder).release()


def test_that_of_a_live_process_is_refused_at_once(folder):
    forge(folder, **HERE, pid=os.getpid(), process_start=processes.start_of(os.getpid()))
    begin_s = time.monotonic()
    with pytest.raises(UserError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        Lease(folder, stale_after_s=30)
    assert time.monotonic() - begin_s < 15


@pytest.mark.parametrize(
    "other",
    [
        {"pid_namespace": "pid:[7]"},
        *(pytest.param(other, marks=pytest.mark.heavy) for other in ({"boot": "b"}, {"boot": None})),
    ],
    ids=str,
)
def test_another_container_with_our_host_name_is_another_host(folder, other):
    """The process id is unused here, or another process's: neither proves anything."""
    for pid in (0, os.getpid()):
        record = {**HERE, "pid": pid, "process_start": processes.start_of(pid)} | other
        forge(folder, **record)
        renewing = threading.Timer(0.3, forge, [folder], record)
        renewing.start()
        with pytest.raises(UserError, match=f"process {pid} on {socket.gethostname()}"):
            Lease(folder, stale_after_s=30)
        renewing.join()
        begin_s = time.monotonic()
        Lease(folder, stale_after_s=0.6).release()
        assert time.monotonic() - begin_s >= 0.6


def test_where_the_system_does_not_say_where_we_are_no_process_id_decides(folder, monkeypatch):
    monkeypatch.setattr(processes, "pid_namespace", lambda: None)
    forge(folder, **HERE | {"pid_namespace": None}, pid=0)
    begin_s = time.monotonic()
    Lease(folder, stale_after_s=0.6).release()
    assert time.monotonic() - begin_s >= 0.6


def test_a_live_process_in_another_pid_namespace_keeps_it(folder):
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no command unshare here")
    if tried.returncode:
        pytest.skip(f"no pid namespace can be made here: {tried.stderr.strip()}")
    holder = subprocess.Popen(
        [*UNSHARE, sys.executable, "-c", HOLDING, str(folder), "3"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "1\n"
    assert json.loads((folder / NAME).read_text())["host"] == socket.gethostname()
    with pytest.raises(UserError, match=f"process 1 on {socket.gethostname()}"):
        Lease(folder, stale_after_s=3)
    holder.communicate()
    assert holder.returncode == 0 and not (folder / NAME).exists()


@pytest.fixture(params=["gs", "s3"])
def bucket(request):
    """A folder in a bucket, without locks and renames."""
    request.getfixturevalue(request.param)
    return stores.folder_of(f"{request.param}://bucket/{secrets.token_hex(4)}/checkpoints")


@pytest.mark.fault(66)
def test_in_a_bucket_exactly_one_of_several_at_once_has_it(bucket):
    barrier = threading.Barrier(5)

    def reach(_):
        barrier.wait()
        try:
            return Lease(bucket)
        except UserError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        found = list(pool.map(reach, range(5)))
    [lease] = [one for one in found if isinstance(one, Lease)]
    assert all(f"{bucket} is being written by process {os.getpid()}" in one for one in found if one is not lease)
    lease.check()
    lease.release()
    assert not (bucket / NAME).exists()


@pytest.mark.fault(66)
def test_in_a_bucket_exactly_one_takes_over_what_nobody_renews(bucket):
    forge(bucket)
    barrier = threading.Barrier(3)

    def reach(_):
        barrier.wait()
        try:
            return Lease(bucket, stale_after_s=1.2)
        except UserError:
            return None

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        [lease] = [one for one in pool.map(reach, range(3)) if one]
    lease.check()
    lease.release()


def test_in_a_bucket_another_that_wrote_between_look_and_write_keeps_it(bucket, monkeypatch):
    """At any length of the wait: waiting would not help."""
    write = BucketStore.write_version

    def late(store, path, content, expected):
        monkeypatch.setattr(BucketStore, "write_version", write)
        forge(bucket)
        return write(store, path, content, expected)

    monkeypatch.setattr(BucketStore, "write_version", late)
    with pytest.raises(UserError, match=f"{bucket} is being written by process 1 on elsewhere"):
        Lease(bucket, stale_after_s=60.0)
    assert json.loads(stores.of(bucket).read(bucket / NAME))["nonce"] == "n"


def test_in_a_bucket_it_is_written_again_where_it_has_gone_meanwhile(bucket, monkeypatch):
    read = lease_module._read

    def late(path):
        found = read(path)
        monkeypatch.setattr(lease_module, "_read", read)
        (bucket / NAME).unlink()
        return found

    forge(bucket, **HERE, pid=os.getpid(), process_start=processes.start_of(os.getpid()))
    monkeypatch.setattr(lease_module, "_read", late)
    lease = Lease(bucket)
    lease.check()
    lease.release()
    assert not (bucket / NAME).exists()


@pytest.mark.fault(66)
def test_in_a_bucket_it_is_renewed_and_what_another_wrote_is_not(bucket):
    lease = Lease(bucket, stale_after_s=0.6)
    before = json.loads(stores.of(bucket).read(bucket / NAME))["renewed"]
    time.sleep(0.5)
    assert json.loads(stores.of(bucket).read(bucket / NAME))["renewed"] > before
    forge(bucket)
    time.sleep(0.4)
    with pytest.raises(UserError, match="was taken over by process 1 on elsewhere"):
        lease.check()
    lease.release()
    assert json.loads(stores.of(bucket).read(bucket / NAME))["nonce"] == "n"


@pytest.mark.fault(66)
@pytest.mark.parametrize("stale_after_s", [60.0, 0.6], ids=["given back", "renewed"])
def test_in_a_bucket_it_is_left_to_who_took_it_over_since_the_look(bucket, monkeypatch, stale_after_s):
    lease, read, later = Lease(bucket, stale_after_s), lease_module._read, threading.Event()

    def late(path):
        found = read(path)
        if not later.is_set():
            forge(bucket)
            later.set()
        return found

    monkeypatch.setattr(lease_module, "_read", late)
    if stale_after_s < 1:
        assert later.wait(10)
        time.sleep(0.3)
    else:
        lease.release()
    assert json.loads(stores.of(bucket).read(bucket / NAME))["nonce"] == "n"
    lease.release()


def test_release_after_the_folder_has_gone(folder):
    inner = folder / "checkpoints"
    inner.mkdir()
    lease = Lease(inner)
    shutil.rmtree(inner)
    lease.release()


def test_a_folder_with_its_name_is_one_line(folder):
    (folder / NAME).mkdir()
    with pytest.raises(UserError, match=rf"^{folder}/lease.json is a folder, must be .*: remove it$"):
        Lease(folder)


@pytest.mark.parametrize("clock_s", [-1000, 0, 1000])
def test_that_of_another_host_holds_as_long_as_it_is_renewed(folder, clock_s, caplog):
    """With any clock."""
    forge(folder, renewed=time.time() + clock_s)
    renewing = threading.Timer(0.3, forge, [folder], {"renewed": time.time() + clock_s + 0.3})
    renewing.start()
    with pytest.raises(UserError, match="process 1 on elsewhere"):
        Lease(folder, stale_after_s=30)
    renewing.join()
    begin_s = time.monotonic()
    Lease(folder, stale_after_s=0.6).release()
    assert time.monotonic() - begin_s >= 0.6 and "for a sign of life" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "elsewhere"}'])
def test_one_that_cannot_be_read_is_nobodys(folder, content):
    (folder / NAME).write_text(content)
    Lease(folder).release()


def test_it_is_renewed(folder):
    lease = Lease(folder, stale_after_s=0.6)
    before = json.loads(stores.of(folder).read(folder / NAME))["renewed"]
    time.sleep(0.5)
    assert json.loads(stores.of(folder).read(folder / NAME))["renewed"] > before
    lease.check()
    lease.release()


def test_a_holder_that_lost_it_writes_nothing_more_and_leaves_the_other_alone(folder):
    lease = Lease(folder)
    forge(folder)
    with pytest.raises(UserError, match="was taken over by process 1 on elsewhere meanwhile"):
        lease.check()
    lease.release()
    assert json.loads(stores.of(folder).read(folder / NAME))["nonce"] == "n"
