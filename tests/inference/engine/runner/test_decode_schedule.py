"""How many tokens a program generates, by the rows' limits and by the time it takes."""

import types

import pytest

from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.runner import decode_schedule
from capibara.inference.engine.runner.decode_schedule import DecodeSchedule
from capibara.inference.sampling.sampling import Sampling


def row(**changes):
    plain = {"limit": 100, "requested": 10, "row_length": 20, "sampling": Sampling(), "forced": {}}
    return types.SimpleNamespace(**plain | changes)


@pytest.fixture
def clock(monkeypatch):
    now_s = [50.0]
    monkeypatch.setattr(decode_schedule.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 8),
        ({"requested": 97}, 3),
        ({"row_length": 60}, 5),  # of 64, and the last token is not read
        ({"sampling": Sampling(thinking_tokens=4)}, 4),
        ({"sampling": Sampling(thinking_tokens=4), "forced": {12: 7, 13: 8}}, 2),
        ({"sampling": Sampling(thinking_tokens=4), "forced": {10: 7, 11: 8}}, 1),
    ],
    ids=str,
)
def test_no_row_gets_more_than_it_may_have(changes, count):
    chosen = DecodeSchedule(EngineConfig(decode_steps=8), length=64)
    assert chosen.tokens([row()], 8) == 8 and chosen.tokens([row(), row(**changes)], 8) == count


def test_a_reader_waits_a_tenth_of_a_second_at_most(clock):
    chosen = DecodeSchedule(EngineConfig(), length=64)
    chosen.streaming = True
    assert chosen.tokens([row()], chosen.allowed()) == 1  # no time was measured yet
    for took_s, count in ((0.02, 4), (0.03, 3), (0.04, 2), (0.08, 1), (0.5, 1), (0.01, 4)):
        began_s = clock[0]
        clock[0] += 2 * took_s
        chosen.record(began_s, 2)
        assert chosen.tokens([row()], chosen.allowed()) == count


def test_a_prompt_that_is_read_meanwhile_is_no_time_of_a_step(clock):
    chosen = DecodeSchedule(EngineConfig(), length=64)
    chosen.streaming = True
    began_s = clock[0]
    clock[0] += 3.0
    chosen.record(None, 1)  # of a prompt
    clock[0] += 0.03
    chosen.record(began_s, 1)
    assert chosen.tokens([row()], chosen.allowed()) == 3


def test_what_was_set_holds_and_nobody_looks_at_the_clock_where_nobody_reads_along(clock):
    for config, streaming in ((EngineConfig(decode_steps=4), True), (EngineConfig(), False)):
        chosen = DecodeSchedule(config, length=64)
        chosen.streaming = streaming
        began_s = clock[0]
        clock[0] += 9.0
        chosen.record(began_s, 1)
        assert chosen.tokens([row()], chosen.allowed()) == 4
