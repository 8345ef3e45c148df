"""What processes decide is compared; tests/hosts/test_axes.py has two that differ."""

from __future__ import annotations

import itertools
import json
import queue
import re
import sys

import pytest

from capibara.multihost import decisions, peers
from capibara.multihost.decisions import Decisions

SAVE, EVALUATE = "save", "evaluate"


@pytest.fixture
def made(monkeypatch):
    """(number, *what it decides; a number alone: it has passed that step) -> the decisions of a process."""

    def make(index, *acts, end=None):
        monkeypatch.setattr(peers, "is_joined", lambda: True)
        monkeypatch.setattr(peers, "process_info", lambda: (index, 2, "host"))
        one = Decisions(end)
        for act in acts:
            one.passed(act) if isinstance(act, int) else one.record(*act)
        return one

    return make


def compared(one, other):
    """What the first finds."""
    return one.difference(json.loads(other.published()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], []),
        ([0, 1, 2, (3, SAVE)], [0, 1, 2]),  # it has not come so far
        ([0, (1, EVALUATE), (1, SAVE), 1], [0, (1, EVALUATE)]),
        ([0, (5, SAVE), 5, (6, "roll back"), (2, EVALUATE)], [0, (5, SAVE), 5, (6, "roll back")]),
        ([0, (5, SAVE), 5, (6, "roll back"), 2, (3, SAVE), 3], [0, (5, SAVE), 5, (6, "roll back"), 2, (3, SAVE), 9]),
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
        ([(6, "roll back"), 2, 3, 4], [(6, "roll back"), 2, 3, (4, SAVE)], 0, "process 1 on .*: save after step 4"),
    ],
)
def test_who_decides_otherwise_is_named(made, first, second, who, says):
    both = made(0, *first), made(1, *second)
    found = compared(both[who], both[1 - who])
    assert found is not None
    assert re.match(says, found)


@pytest.fixture
def store(monkeypatch):
    """The coordinator's, and a short time between two comparisons."""
    kept = {}
    monkeypatch.setattr(decisions, "COMPARE_S", 0.02)
    monkeypatch.setattr(decisions, "_runs", itertools.repeat(0))
    monkeypatch.setattr(peers, "put", lambda name, value, again: kept.update({name: value}))
    monkeypatch.setattr(peers, "list_values", lambda folder: [v for n, v in kept.items() if n.startswith(f"{folder}/")])
    return kept


def test_threads_publish_and_compare(made, store):
    said = queue.SimpleQueue()
    with made(0, end=said.put) as first, made(1, end=said.put) as second:
        for one in (first, second):
            one.record(1, SAVE)
            one.passed(1)
        with pytest.raises(queue.Empty):
            said.get(timeout=0.2)
        second.record(2, EVALUATE)
        first.passed(2)
        assert "process 1 on" in said.get(timeout=5)


def test_what_is_decided_last_is_published(made, store, monkeypatch):
    """A process that ends too early is found by those that go on."""
    monkeypatch.setattr(decisions, "COMPARE_S", 3600.0)
    for step in range(20):
        with made(1) as one:
            one._wake.clear()
            one._last.append(decisions.Decision(step, "end"))
        assert f'[[{step}, "end"]]' in store["decisions/0/1/made"]


def test_the_next_run_is_not_compared_with_the_last_one(made, store, monkeypatch):
    """Process 0 may come to it first."""
    said = queue.SimpleQueue()
    monkeypatch.setattr(decisions, "_runs", iter([0, 0, 1]))
    with made(0, end=said.put) as first, made(1, end=said.put) as second:
        for one in (first, second):
            one.record(1, SAVE)
    assert all(f'[[1, "{SAVE}"]]' in published for published in store.values()) and len(store) == 2
    with made(0, end=said.put) as first:
        first.record(5, EVALUATE)
        with pytest.raises(queue.Empty):
            said.get(timeout=0.2)


def test_memory_and_time_do_not_grow_with_the_run(made):
    one = made(0)
    most = 0
    for step in range(100_000):
        one.record(step, SAVE)
        most = max(most, sys.getsizeof(one._last))
    assert most < 100_000 and len(one.published()) < 4_000
    assert json.loads(one.published())["made"][-1] == [99_999, SAVE]


@pytest.mark.parametrize("behind", [0, 1, 100, 4000])
def test_a_difference_is_found_after_the_list_was_cut(made, behind):
    """Also where the other has published its last decisions some time ago."""
    count = 100_000
    one, other = made(0), made(1)
    for step in range(count - behind):
        one.record(step, SAVE)
        other.record(step if step < count - behind - 1 else step + 1, SAVE)
    published = json.loads(other.published())
    for step in range(count - behind, count):
        one.record(step, SAVE)
    last = count - behind - 1
    assert f": save after step {last}; process 1" in one.difference(published)
    published["made"].pop()
    assert one.difference(published) is None


@pytest.mark.parametrize("error", ["UNAVAILABLE: Failed to send RPC", "DEADLINE_EXCEEDED: after 5 s"])
def test_a_coordinator_that_is_gone_ends_nothing_here(made, store, monkeypatch, error):
    said, asked = queue.SimpleQueue(), queue.SimpleQueue()

    def gone(folder):
        asked.put(folder)
        raise RuntimeError(error)

    monkeypatch.setattr(peers, "list_values", gone)
    with made(0, end=said.put):
        for _ in range(3):
            asked.get(timeout=5)
    assert said.empty()


@pytest.mark.parametrize("where", ["put", "list_values"])
def test_a_fault_of_the_comparison_is_told(made, store, monkeypatch, capfd, where):
    def fail(*_, **__):
        raise RuntimeError("INVALID_ARGUMENT:\nno such key")

    monkeypatch.setattr(peers, where, fail)
    said = queue.SimpleQueue()
    with made(0, end=said.put) as one:
        one.record(1, SAVE)
        line = said.get(timeout=5)
    assert line.endswith("cannot be compared: RuntimeError: INVALID_ARGUMENT: no such key")
    assert "Traceback" in capfd.readouterr().err


def test_a_fault_ends_the_process_and_the_others(made, store, monkeypatch, capfd):
    ends = []
    monkeypatch.setattr(peers, "list_values", lambda folder: ["no JSON"])
    monkeypatch.setattr(peers, "report", lambda *word: ends.append(word))
    monkeypatch.setattr(peers, "exit_process", ends.append)
    with made(1) as one:
        one._thread.join(5)
    assert ends[0][0] == ends[1] == 1 and "JSONDecodeError" in ends[0][1]
    assert f"error: {ends[0][1]}\n" in capfd.readouterr().err


def test_a_process_alone_compares_nothing():
    with Decisions() as one:
        one.record(1, SAVE)
        assert not one._thread.is_alive()
