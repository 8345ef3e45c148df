"""What processes decide is compared; tests/hosts/test_axes.py has two that differ."""

from __future__ import annotations

import json
import queue
import re

import pytest

from capibara import peers
from capibara.training import decisions
from capibara.training.decisions import Decisions

SAVE, EVALUATE = "save", "evaluate"


@pytest.fixture
def made(monkeypatch):
    """(number, *what it decides; a number alone: it has passed that step) -> the decisions of a process."""

    def make(index, *acts, differ=None):
        monkeypatch.setattr(peers, "is_joined", lambda: True)
        monkeypatch.setattr(peers, "place", lambda: (index, 2, "host"))
        one = Decisions(differ)
        for act in acts:
            one.passed(act) if isinstance(act, int) else one.made(*act)
        return one

    return make


def compared(one, other):
    """What the first finds."""
    return one.difference(json.loads(other.told()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], []),
        ([0, 1, 2, (3, SAVE)], [0, 1, 2]),  # it has not come so far
        ([0, (1, EVALUATE), (1, SAVE), 1], [0, (1, EVALUATE)]),
        ([0, (5, SAVE), 5, (6, "go back"), (2, EVALUATE)], [0, (5, SAVE), 5, (6, "go back")]),
        ([0, (5, SAVE), 5, (6, "go back"), 2, (3, SAVE), 3], [0, (5, SAVE), 5, (6, "go back"), 2, (3, SAVE), 9]),
        ([*[(step, SAVE) for step in range(200)], 200], [*[(step, SAVE) for step in range(150)], 149]),
    ],
)
def test_who_is_later_does_not_differ(made, first, second):
    one, other = made(0, *first), made(1, *second)
    assert compared(one, other) is None and compared(other, one) is None


@pytest.mark.parametrize(
    ("first", "second", "who", "says"),
    [
        ([0, 1, 2, 3], [0, 1, 2, (3, SAVE)], 0, "process 1 on .*: save after step 3; process 0 on .*: the next step"),
        ([(2, SAVE), 2, 3], [(2, SAVE), 2, (3, "end")], 0, "process 1 on .*: end after step 3"),
        ([(3, EVALUATE)], [(3, SAVE)], 0, "process 0 on .*: evaluate after step 3; process 1 on .*: save after step 3"),
        (
            [(3, SAVE), 3],
            [2, 3, (4, SAVE)],
            1,
            "process 1 on .*: save after step 4; process 0 on .*: save after step 3",
        ),
        ([(6, "go back"), 2, 3, 4], [(6, "go back"), 2, 3, (4, SAVE)], 0, "process 1 on .*: save after step 4"),
    ],
)
def test_who_decides_otherwise_is_named(made, first, second, who, says):
    both = made(0, *first), made(1, *second)
    found = compared(both[who], both[1 - who])
    assert found is not None
    assert re.match(says, found)


def test_a_thread_tells_the_others_and_looks(made, monkeypatch):
    store, said = {}, queue.SimpleQueue()
    monkeypatch.setattr(decisions, "_LOOK_S", 0.02)
    monkeypatch.setattr(peers, "put", lambda name, value, again: store.update({name: value}))
    monkeypatch.setattr(peers, "all_put", lambda folder: [v for n, v in store.items() if n.startswith(f"{folder}/")])
    with made(0, differ=said.put) as first, made(1, differ=said.put) as second:
        for one in (first, second):
            one.made(1, SAVE)
            one.passed(1)
        with pytest.raises(queue.Empty):
            said.get(timeout=0.2)
        second.made(2, EVALUATE)
        first.passed(2)
        assert "process 1 on" in said.get(timeout=5)


def test_a_process_alone_compares_nothing():
    with Decisions() as one:
        one.made(1, SAVE)
        assert not one._thread.is_alive()
