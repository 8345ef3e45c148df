"""Ctrl-C and SIGTERM wait for a place where what runs can be left, and a second Ctrl-C does not."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from capibara.multihost.signals import Signals


def test_without_a_signal_a_pause_is_a_pause():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    began_s = time.monotonic()
    with Signals() as signals:
        signals.pause(0.05)
        assert signals.number is None and not signals.wait(0.0)
    assert time.monotonic() >= began_s + 0.05
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_seen_at_the_next_pause(number):
    with Signals() as signals:
        signal.raise_signal(number)
        assert signals.number == number  # nothing is raised where it arrives
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as ended:
            signals.pause(60.0)
    assert number == signal.SIGINT or ended.value.code == 143


def test_a_signal_ends_a_long_pause():
    began_s = time.monotonic()
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with Signals() as signals, pytest.raises(KeyboardInterrupt):
        signals.pause(60.0)
    assert time.monotonic() < began_s + 10


def test_a_second_ctrl_c_interrupts_at_once():
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signals.number == signal.SIGTERM


def test_the_first_signal_says_how_it_ends():
    with Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert signals.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signals.pause(60.0)


def test_another_thread_has_no_handlers():
    before, seen = signal.getsignal(signal.SIGINT), []

    def run():
        with Signals() as signals:
            seen.append(signal.getsignal(signal.SIGINT))
            signals.pause(0.0)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
