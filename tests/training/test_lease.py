"""The lease: one writer, whoever died."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from etils import epath

from capibara.training.lease import NAME, Lease
from capibara.types import UserError


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path)


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
    code = f"from etils import epath; from capibara.training.lease import Lease; import os; Lease(epath.Path({str(folder)!r})); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert json.loads((folder / NAME).read_text())["pid"] != os.getpid()
    Lease(folder).release()


def test_a_process_with_the_number_of_one_that_died_does_not_hold_it(folder):
    forge(folder, pid=os.getpid(), process_start="1", host=socket.gethostname())
    Lease(folder).release()


@pytest.mark.parametrize("clock_s", [-1000, 0, 1000])
def test_that_of_another_host_holds_as_long_as_it_is_renewed(folder, clock_s, caplog):
    """Whatever its clock says."""
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
    before = json.loads((folder / NAME).read_text())["renewed"]
    time.sleep(0.5)
    assert json.loads((folder / NAME).read_text())["renewed"] > before
    lease.check()
    lease.release()


def test_a_holder_that_lost_it_writes_nothing_more_and_leaves_the_other_alone(folder):
    lease = Lease(folder)
    forge(folder)
    with pytest.raises(UserError, match="was taken over by process 1 on elsewhere meanwhile"):
        lease.check()
    lease.release()
    assert json.loads((folder / NAME).read_text())["nonce"] == "n"
