"""Signals: the first one only asks, a second ctrl-C interrupts, and the handlers of before come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from capibara.training.interrupt import StopRequest


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
