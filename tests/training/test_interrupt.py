"""Signals: the first one only asks, a second ctrl-C interrupts, and the handlers of before come back."""

from __future__ import annotations

import os
import signal
import threading

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from capibara.core.interrupt import Interrupted, StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.agreed(1) is None
        os.kill(os.getpid(), number)
        assert stop.signal_number == number and stop.agreed(1) == number
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_interrupts_and_a_second_sigterm_does_not():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_it_does_nothing():
    found = []

    def work():
        with StopRequest() as stop:
            found.append(stop.agreed(1))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None] and signal.getsignal(signal.SIGTERM) is before


def test_what_takes_long_is_left_after_its_part():
    with StopRequest() as stop:
        stop.check(1)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.check(2)


def test_hosts_that_have_agreed_stop_at_any_step(monkeypatch):
    """The other host was signalled; they ask each other every third step."""
    asked = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda own: asked.append(own) or np.array([own, signal.SIGTERM])
    )
    with StopRequest(agree_every=3) as stop:
        stop.check(1, every=8), stop.agreed(2)
        assert not asked
        with pytest.raises(Interrupted):
            stop.check(8, every=8)
        assert stop.signal_number is None and stop.agreed(5) == signal.SIGTERM and len(asked) == 1
