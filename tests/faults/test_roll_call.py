"""The roll call: who is missing, came twice or differs is named, to everyone, within the time."""

import socket
import threading
import time

import pytest

from capibara.core.types import TryAgain, UserError
from capibara.jobs.local import free_address
from capibara.multihost import roll_call
from capibara.multihost.roll_call import Process

FACTS = {"version of capibara": "1", "configuration": "Trainer.seed = 0\nTrainer.steps = 9"}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(roll_call, "LINGER_S", 1.5)
    monkeypatch.setattr(roll_call, "RETRY_S", 0.1)


@pytest.fixture
def address():
    return free_address()


def calls(address, *processes, timeout_s=10.0, later_s=()):
    """What each process of a roll call is told: None, or the exception; and the lines that were said."""
    told, said, came = {}, [], {}

    def run(number, process):
        time.sleep(dict(later_s).get(number, 0.0))
        try:
            came[number] = [str(one) for one in roll_call.call(process, address, timeout_s, said.append)]
            told[number] = None
        except (TryAgain, UserError) as error:
            told[number] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    known = [str(one) for one in processes]  # process 0 knows all of them
    assert all(len(found) == (processes[0].count if number == 0 else 1) for number, found in came.items())
    assert all(one in known for found in came.values() for one in found)
    return told, said


def all_of(count, **changed):
    return [Process(index, count, FACTS, host=f"host-{index}") for index in range(count)]


def test_all_go_on_when_the_last_has_come(address):
    began_s = time.monotonic()
    told, _ = calls(address, *all_of(4), later_s={0: 1.0, 2: 0.5}.items())
    assert told == dict.fromkeys(range(4)) and time.monotonic() - began_s > 1.0
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))):
        pass  # the port is JAX's now


@pytest.mark.fault(65)
def test_who_does_not_come_is_named_to_all(address, monkeypatch):
    monkeypatch.setattr(roll_call, "SAY_S", 0.5)
    began_s = time.monotonic()
    told, said = calls(address, *[one for one in all_of(4) if one.index != 2], timeout_s=2.0)
    assert time.monotonic() - began_s < 2.0 + roll_call.LINGER_S + 1.0
    for error in told.values():
        assert isinstance(error, TryAgain)
        assert "process 2 of 4 did not connect within 2 s (connected: 0 on host-0, " in str(error)
    assert any("waiting for process 2: 3 of 4 processes have connected" in line for line in said)


@pytest.mark.fault(65)
def test_where_process_0_does_not_come_the_others_say_so(address):
    told, _ = calls(address, all_of(3)[1], timeout_s=1.0)
    assert isinstance(told[0], TryAgain)
    assert f"process 1 (pid {all_of(2)[1].pid} on host-1) did not find process 0 of 3 at {address} within 1 s" in str(
        told[0]
    )


@pytest.mark.fault(65)
def test_a_process_that_comes_twice_is_refused_and_the_others_go_on(address):
    one = all_of(3)
    twice = Process(1, 3, FACTS, host="host-9")
    told, _ = calls(address, *one, twice, later_s={2: 1.5, 3: 0.7}.items())
    assert [told[k] for k in range(3)] == [None] * 3
    assert isinstance(told[3], UserError) and "process 1 (pid" in str(told[3])
    assert "has joined already: give process 1 (pid" in str(told[3]) and "on host-9) an index of its own" in str(
        told[3]
    )


@pytest.mark.fault(65)
def test_one_that_came_twice_in_place_of_another_is_named_with_it(address):
    one = all_of(3)
    told, _ = calls(address, one[0], one[1], Process(1, 3, FACTS, host="host-2"), timeout_s=2.0)
    assert "process 2 of 3 did not connect" in str(told[0]) and "give one of them another index" in str(told[0])


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    "facts, said",
    [
        ({"configuration": "Trainer.seed = 1\nTrainer.steps = 9"}, "'Trainer.seed = 1' and 'Trainer.seed = 0'"),
        ({"version of capibara": "2"}, "another version of capibara than process 0"),
        ({"version of jax": "9"}, "another version of jax"),
    ],
)
def test_one_that_differs_is_named_to_all(address, facts, said):
    one = all_of(3)
    told, _ = calls(address, *one[:2], Process(2, 3, FACTS | facts, host="host-2"), later_s={1: 1.0}.items())
    for error in told.values():
        assert isinstance(error, UserError) and "on host-2) has another" in str(error) and said in str(error)


@pytest.mark.fault(65)
def test_another_number_of_processes_is_refused(address):
    told, _ = calls(address, all_of(2)[0], Process(2, 3, FACTS))
    assert all("says that there are 3 processes" in str(error) for error in told.values())


def test_whoever_scans_ports_is_not_counted(address):
    host, port = address.split(":")

    def scan():
        time.sleep(0.3)
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000 + b"\n", b'{"kind": 1}\n', b"\xff\n"):
            with socket.create_connection((host, int(port))) as one:
                one.sendall(sent)

    scanner = threading.Thread(target=scan)
    scanner.start()
    told, _ = calls(address, *all_of(2), later_s={1: 1.0}.items())
    scanner.join()
    assert told == {0: None, 1: None}


def test_a_process_that_went_away_may_come_again(address):
    """A host that was preempted while it waited."""
    host, port = address.split(":")
    one, lines = all_of(3), []

    def come_and_go():
        time.sleep(0.3)
        import dataclasses
        import json

        with socket.create_connection((host, int(port))) as leaving:
            leaving.sendall(json.dumps({"kind": roll_call.KIND, **dataclasses.asdict(one[1])}).encode() + b"\n")
            time.sleep(0.2)

    leaver = threading.Thread(target=come_and_go)
    leaver.start()
    told, lines = calls(address, *one, later_s={1: 1.0, 2: 1.5}.items())
    leaver.join()
    assert told == dict.fromkeys(range(3)), (told, lines)


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:0", "host:70000", ":99"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserError, match="must be HOST:PORT"):
        roll_call.call(all_of(2)[0], address, 1.0)


def test_a_port_that_is_taken_is_named(address):
    with socket.create_server(("", int(address.split(":")[1]))):
        with pytest.raises(UserError, match="cannot listen at the coordinator's address"):
            roll_call.call(all_of(2)[0], address, 1.0)
