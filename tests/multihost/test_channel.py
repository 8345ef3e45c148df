"""The lines between process 0 and the others, without JAX; tests/hosts has real processes."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from capibara.core.types import TryAgain
from capibara.multihost import channel, peers


@pytest.fixture
def made(monkeypatch):
    """(count) -> the leader and the followers of so many processes, all of them here; `ended`: (process that ended, code)."""
    store, known, ended = {}, threading.Condition(), queue.SimpleQueue()
    here = threading.local()

    def put(name, value):
        with known:
            store[name] = value
            known.notify_all()

    def got(name, timeout_s):
        with known:
            assert known.wait_for(lambda: name in store, timeout_s)
            return store[name]

    monkeypatch.setattr(peers, "is_joined", lambda: True)
    monkeypatch.setattr(peers, "process_info", lambda: (here.index, here.count, "127.0.0.1"))
    for name, value in {"put": put, "wait_for": got, "exit_process": ended.put, "report": lambda *_: None}.items():
        monkeypatch.setattr(peers, name, value)
    monkeypatch.setattr(peers, "peer_fault", lambda *_: peers._faults[0] if peers._faults else None)
    monkeypatch.setattr(peers, "_faults", [])
    monkeypatch.setattr(peers, "is_leaving", lambda _: False)
    for name in ("_news_expected", "_leaving"):
        monkeypatch.setattr(peers, name, threading.Event())
    monkeypatch.setattr(channel.os, "_exit", ended.put)
    monkeypatch.setattr(channel, "slow_aborts", lambda: None)

    def make(count, connect=channel.connect, of=None):
        found = [None] * count

        def one(index):
            here.index, here.count = index, of or count
            found[index] = connect()

        threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        lines.extend(found)
        return found[0], found[1:]

    lines = []
    make.store, make.ended, make.got = store, ended, got
    yield make
    for line in lines:
        if isinstance(line, channel.Leader):
            line.close()
    for line in lines:
        for one in getattr(line, "_lines", {0: getattr(line, "_line", None)}).values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
    for thread in threading.enumerate():  # none is left when `os._exit` is what it was
        if thread.name == "capibara-channel":
            thread.join(10)


def test_messages_come_in_order_to_all_until_the_last(made, capfd):
    leader, followers = made(3)
    assert isinstance(leader, channel.Leader) and all(isinstance(one, channel.Follower) for one in followers)
    messages = [{"number": number, "text": "ü" * number} for number in (*range(99), 200_000)]
    sending = threading.Thread(target=lambda: [leader.send(one) for one in messages])
    sending.start()
    for follower in followers:
        arrived = iter(follower)
        assert [next(arrived) for _ in messages] == messages
    sending.join(10)
    leader.close()
    assert [list(one) for one in followers] == [[], []]
    assert capfd.readouterr().err == ""


def test_strangers_that_connect_first_keep_nobody_waiting(made, monkeypatch):
    """One says nothing, one does not know the word; nobody is heard once all are there."""
    strangers, got = [], made.got

    def got_late(name, timeout_s):
        told = got(name, timeout_s)
        for said in (b"", b'{"word": "?", "index": 1, "host": "stranger"}\n'):
            strangers.append(socket.create_connection(("127.0.0.1", json.loads(told)["port"])))
            strangers[-1].sendall(said)
        return told

    monkeypatch.setattr(peers, "wait_for", got_late)
    begin_s = time.monotonic()
    leader, (follower,) = made(2)
    assert time.monotonic() - begin_s < channel.HELLO_S / 2
    leader.send({"text": "after all"})
    assert next(iter(follower)) == {"text": "after all"}
    port = json.loads(made.store["channel"])["port"]
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).recv(1)
    for one in strangers:
        one.close()


def test_a_signal_of_another_process_is_told(made):
    leader, (follower,) = made(2)
    signals = queue.SimpleQueue()
    leader.on_signal = signals.put
    follower.signal(15)
    assert signals.get(timeout=5) == 15


def test_a_process_that_is_gone_is_named_at_once_to_all(made, capfd):
    leader, followers = made(3)
    gone = queue.SimpleQueue()
    leader.on_gone = lambda fault: gone.put(fault) or 0.0
    followers[1]._line.shutdown(socket.SHUT_RDWR)
    fault = gone.get(timeout=5)
    want = f"process 2 on {socket.gethostname()} is gone: start the command again on every host"
    assert (fault.code, fault.line) == (75, want)
    # Process 0, process 1, which was told of it, and process 2, for which process 0 is gone.
    assert [made.ended.get(timeout=5) for _ in range(3)] == [75, 75, 75]
    said = capfd.readouterr().err
    assert said.count(f"error: {want}") == 2 and said.count("error: ") == said.count("\n") == 3
    with pytest.raises(TryAgain, match="process 2 on .* is gone"):
        for _ in range(99):
            leader.send({"text": "x" * 9999})


def test_a_follower_whose_process_0_is_gone_ends(made, capfd):
    leader, (follower,) = made(2)
    leader._closed.set()
    for line in leader._lines.values():
        line.shutdown(socket.SHUT_RDWR)
    assert made.ended.get(timeout=5) == 75
    assert f"error: process 0 on {socket.gethostname()} is gone: " in capfd.readouterr().err


def test_a_stranger_is_not_let_in(made, monkeypatch):
    monkeypatch.setattr(channel, "HELLO_S", 0.2)
    found = []

    def strangers():
        port = json.loads(made.got("channel", 10))["port"]
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"word": "guessed", "index": 1, "host": "h"}\n',
            b"x" * 9999,
            b"[]\n",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
                one.sendall(said)
                with contextlib.suppress(ConnectionError):
                    found.append(one.recv(99))

    got = peers.wait_for
    first = threading.Thread(target=strangers)
    monkeypatch.setattr(peers, "wait_for", lambda *asked: (first.join(10), got(*asked))[1])
    first.start()
    leader, (follower,) = made(2)
    leader.send({"number": 1})
    assert next(iter(follower)) == {"number": 1} and set(found) <= {b""}


def test_who_does_not_connect_is_named(made, monkeypatch):
    monkeypatch.setattr(channel, "OPEN_S", 0.3)
    with pytest.raises(TryAgain, match=r"process 1, 2 of 3 did not connect to process 0 within 0.3 s"):
        channel.Leader(3)


def test_who_does_not_connect_is_left_out_where_it_is_not_needed(made, monkeypatch, capfd):
    """And the others are watched."""
    monkeypatch.setattr(channel, "OPEN_S", 0.5)
    leader, (follower,) = made(2, channel.watch, of=3)
    assert "note: process 2 of 3 did not connect to process 0 within 0.5 s" in capfd.readouterr().err
    gone = queue.SimpleQueue()
    leader.on_gone = lambda fault: gone.put(fault) or 0.0
    follower._line.shutdown(socket.SHUT_RDWR)
    assert "process 1 on " in gone.get(timeout=5).line
    assert [made.ended.get(timeout=5) for _ in range(2)] == [75, 75]


def test_those_that_end_together_are_not_missed(made, monkeypatch, capfd):
    """At JAX's own exit all of them close their lines, in any order."""
    leader, followers = made(3)
    monkeypatch.setattr(peers, "is_leaving", lambda _: True)
    followers[0]._line.shutdown(socket.SHUT_RDWR)
    for line in leader._lines.values():
        line.shutdown(socket.SHUT_RDWR)
    for thread in threading.enumerate():
        if thread.name == "capibara-channel":
            thread.join(5)
            assert not thread.is_alive()
    assert made.ended.empty() and capfd.readouterr().err == "" and not peers._faults


def test_a_process_alone_has_no_line():
    assert channel.connect() is None
    assert channel.watch() is None


@pytest.mark.parametrize(
    "ends, code",
    [("os._exit(75)", 75), pytest.param("time.sleep(20)", -signal.SIGABRT, marks=pytest.mark.heavy)],
)
def test_an_abort_waits_for_what_says_why(ends, code):
    """And comes to its end where nothing does."""
    text = f"""
import ctypes, os, threading, time
from capibara.multihost import channel
channel.slow_aborts()
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()  # without Python's lock, as in JAX's threads
time.sleep(0.2)
{ends}
"""
    assert subprocess.run([sys.executable, "-c", text], timeout=30, check=False).returncode == code
