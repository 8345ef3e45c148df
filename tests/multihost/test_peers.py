"""What one process of several that fails tells the others, and what they make of it; tests/hosts has real ones."""

import json
import threading
import time

import pytest

from capibara.core.types import TryAgain, UserError
from capibara.multihost import exits, peers


class Store:
    """The coordinator's store, as JAX's client has it."""

    def __init__(self, **known):
        self.known, self.gone = dict(known), False

    def key_value_set(self, name, value):
        if self.gone or name in self.known:
            raise RuntimeError("ALREADY_EXISTS")
        self.known[name] = value

    def key_value_try_get(self, name):
        if self.gone:
            raise RuntimeError("UNAVAILABLE")
        if name not in self.known:
            raise RuntimeError("NOT_FOUND: no such key")
        return self.known[name]


def word(index, code=2, message="no such file"):
    return json.dumps({"index": index, "host": "host-3", "code": code, "message": message})


@pytest.fixture
def store(monkeypatch):
    """This is process 1 of several."""
    made, ended = Store(), []
    monkeypatch.setattr(peers, "is_joined", lambda: True)
    monkeypatch.setattr(peers, "_client", lambda: (made, 1))
    monkeypatch.setattr(peers.os, "_exit", ended.append)
    monkeypatch.setattr(peers, "LOOK_S", 0.02)
    monkeypatch.setattr(peers, "OWN_S", 0.2)
    for name in ("_leaving", "_reported"):
        monkeypatch.setattr(peers, name, type(peers._leaving)())
    monkeypatch.setattr(exits, "LEAVE_S", 3600.0)
    made.ended = ended
    return made


def test_the_first_word_is_kept(store):
    peers.report(2, "mine")
    peers.report(1, "more")
    assert json.loads(store.known[peers.KEY])["message"] == "mine" and peers.has_reported()
    assert peers.peer_fault() is None  # it is our own


def test_a_report_that_is_to_come_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(peers, "_report_expected", type(peers._leaving)())
    threading.Timer(0.3, store.known.update, [{peers.KEY: word(0)}]).start()
    assert peers.peer_fault() is None
    peers.expect_report()
    assert peers.peer_fault(0.0) is None
    assert peers.peer_fault().line == "process 0 on host-3 ended: no such file"


def test_another_that_failed_ends_this_one_with_its_line_and_code(store, capfd):
    peers.listen()
    time.sleep(0.1)
    assert not store.ended
    store.key_value_set(peers.KEY, word(3))
    time.sleep(1.0)
    assert store.ended == [2] and capfd.readouterr().err == "error: process 3 on host-3 ended: no such file\n"


@pytest.mark.parametrize("end", ["well", "coordinator gone"])
def test_one_that_ends_by_itself_is_left_alone(store, capfd, end):
    peers.listen()
    if end == "well":
        peers.begin_exit()
        store.key_value_set(peers.KEY, word(3))
    store.gone = end != "well"
    time.sleep(0.6)
    assert store.ended == [] and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "raised, known, code, said, told",
    [
        (UserError("bad name"), None, 2, "error: bad name\n", "bad name"),
        (TryAgain("later"), None, 75, "error: later\n", "later"),
        (UserError("bad name"), word(3), 2, "error: bad name\n", None),
        (RuntimeError("connection closed"), word(3, 75), 75, "error: process 3 on host-3 ended: no such file\n", None),
    ],
)
def test_a_verb_tells_its_fault_or_says_whose_it_is(store, capfd, raised, known, code, said, told):
    """A connection that another's end has closed is no fault of this process."""
    if known is not None:
        store.known[peers.KEY] = known

    def main(argv):
        raise raised

    assert exits.run_verb(main, []) == code
    assert capfd.readouterr().err == said
    assert told is None or json.loads(store.known[peers.KEY])["message"] == told


class JaxRuntimeError(RuntimeError):
    """As JAX has it."""


RESET = "Gloo all-reduce failed: [x.cc:81] Read error [127.0.0.1]:5: Connection reset by peer"


@pytest.mark.parametrize(
    "error, is_lost",
    [
        (JaxRuntimeError(f"FAILED_PRECONDITION: Buffer: {RESET}"), True),
        (JaxRuntimeError("INTERNAL: NCCL operation failed: remote process exited or there was a network error"), True),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # a server of somebody's
    ],
)
def test_one_that_was_killed_is_said_to_be_gone(store, capfd, error, is_lost):
    """It can tell nobody; the computation that it was part of fails."""

    def main(argv):
        raise ValueError("the step failed") from error

    code, said = exits.run_verb(main, []), capfd.readouterr().err
    if is_lost:
        assert code == 75 and said.count("\n") == 1 and said.startswith("error: another process of this run is gone")
    else:
        assert code == 1 and "Traceback" in said


def test_a_crash_keeps_its_trace_and_is_told(store, capfd):
    assert exits.run_verb(lambda argv: {}["nothing"], []) == 1
    assert "Traceback" in capfd.readouterr().err
    assert json.loads(store.known[peers.KEY])["message"] == "KeyError: 'nothing'"
