"""Work on many files at once: all of it is done, whatever fails and wherever it is called."""

from __future__ import annotations

import threading

import pytest

from capibara.core.background import Task
from capibara.storage import threads


def no_thread(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_results_are_in_the_order_of_the_items():
    assert threads.each(lambda x: 2 * x, range(100)) == [2 * x for x in range(100)]
    assert threads.each(lambda x: x, []) == []
    assert threads.each(lambda x: threads.each(lambda y: x * y, range(20)), range(40))[39][19] == 39 * 19


def test_an_error_ends_the_others_and_is_raised():
    done = []

    def fail(x):
        if x == 3:
            raise ValueError("the third")
        done.append(x)

    with pytest.raises(ValueError, match="the third"):
        threads.each(fail, range(10_000))
    assert len(done) < 10_000


def test_an_error_of_a_helper_is_raised_too():
    """The caller waits until a helper has had the item that fails."""
    caller, failed = threading.get_ident(), threading.Event()

    def fail(x):
        if threading.get_ident() == caller:
            assert failed.wait(60)
            return
        failed.set()
        raise ValueError("a helper's")

    with pytest.raises(ValueError, match="a helper's"):
        threads.each(fail, range(4))


def test_the_caller_does_all_where_no_thread_can_be_started(monkeypatch):
    """As at the exit of the interpreter since Python 3.12; a save must not be lost there."""
    threads._pool.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert threads.each(lambda x: (x, threading.get_ident()), range(9)) == [
        (x, threading.get_ident()) for x in range(9)
    ]
    found: list[int] = []
    task = Task(lambda: found.append(1), "a task")
    assert task.done and found == [1]
    task.wait(1.0)
    with pytest.raises(ZeroDivisionError):
        Task(lambda: 1 / 0, "another").wait(1.0)
    threads._pool.cache_clear()


def test_after_an_error_no_new_call_starts():
    begun, called = threading.Event(), []

    def fail(x):
        called.append(x)
        if x == 0:
            assert begun.wait(60)  # a helper is at work
            raise ValueError("the first")
        begun.set()
        threading.Event().wait(0.001)

    with pytest.raises(ValueError, match="the first"):
        threads.each(fail, range(2000))
    assert len(called) < 1000
