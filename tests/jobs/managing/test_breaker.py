"""Pauses, and when no call is made."""

from capibara.jobs.managing.breaker import Breaker, pause_s


def test_a_pause_doubles_up_to_a_limit_and_is_spread_by_chance():
    for failures, longest in ((1, 5.0), (2, 10.0), (3, 20.0), (7, 300.0), (10_000, 300.0)):
        found = {pause_s(failures) for _ in range(200)}
        assert longest / 2 <= min(found) < max(found) <= longest and len(found) > 100
        assert max(found) - min(found) > longest / 4


def test_three_failures_in_a_row_stop_the_calls():
    breaker = Breaker(first_s=10, longest_s=40)
    for _ in range(2):
        breaker.failed(100.0)
        assert breaker.allows(100.0)
    breaker.failed(100.0)
    assert not breaker.allows(104.9) and breaker.allows(110.0)
    breaker.failed(110.0)  # the one call that tries
    assert not breaker.allows(119.9) and breaker.allows(130.0)
    for _ in range(10):
        breaker.failed(200.0)
    assert not breaker.allows(219.9) and breaker.allows(240.0)


def test_an_answer_ends_it():
    breaker = Breaker(first_s=10)
    for _ in range(3):
        breaker.failed(100.0)
    breaker.succeeded()
    assert breaker.allows(100.0)
    breaker.failed(100.0)
    assert breaker.allows(100.0)


def test_a_system_that_names_a_time_is_left_alone_for_so_long():
    breaker = Breaker(longest_s=300)
    breaker.failed(100.0, after_s=20.0)
    assert not breaker.allows(119.0) and breaker.allows(120.0)
    breaker.failed(200.0, after_s=1e9)  # which nobody waits for
    assert breaker.allows(500.0)
