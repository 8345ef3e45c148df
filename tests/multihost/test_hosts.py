"""What processes tell each other, with processes that are threads: each has an index of its own, and waits for the others."""

from __future__ import annotations

import threading

import jax
import pytest

from capibara.core.types import UserError
from capibara.multihost import hosts, peers


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [0, 1, 2, 7, 12])
def test_each_thing_is_made_once_and_all_have_it_in_its_order(processes, count, total):
    made = []

    def squares(things):
        for thing in things:
            made.append(thing)
            yield thing * thing

    found = processes(count, lambda: list(hosts.in_turns(range(total), squares, every=2)))
    assert found == [[i * i for i in range(total)]] * count
    assert sorted(made) == list(range(total))


def test_what_one_process_raises_ends_all(processes, monkeypatch):
    monkeypatch.setattr(peers, "_report_expected", threading.Event())

    def failing(error):
        def make():
            if jax.process_index() == 1:
                raise error
            return 1

        return make

    found = processes(3, lambda: hosts.each(failing(UserError("Plan.x is 3: try 2"))))
    assert [(type(one), str(one)) for one in found] == [(UserError, "Plan.x is 3: try 2")] * 3
    assert not peers._report_expected.is_set()  # all have the line already
    found = processes(3, lambda: hosts.each(failing(KeyError("a"))))
    assert [type(one) for one in found] == [RuntimeError, KeyError, RuntimeError]
    assert str(found[0]) == "process 1 ended with KeyError: 'a'" and peers._report_expected.is_set()
    assert processes(2, lambda: hosts.each(jax.process_index)) == [[0, 1]] * 2


def test_the_first_process_decides_for_all(processes):
    assert processes(3, lambda: hosts.of_first(lambda: jax.process_index() + 5)) == [5] * 3
    asked = []
    processes(3, lambda: hosts.of_first(lambda: asked.append(jax.process_index())))
    assert asked == [0]
