"""The watchdog: what counts as hung, and how such a run ends."""

import re
import subprocess
import sys
import time

import pytest

from capibara.cli import EXIT_HUNG
from capibara.training import watchdog
from capibara.training.watchdog import Watch, Watchdog
from capibara.types import UserError

HANGS = """
import sys, threading, time
from capibara.training.watchdog import Watch, Watchdog

def a_peer_that_never_answers():
    time.sleep(60)

with Watchdog(Watch(factor=5.0, at_least_s=0.3)) as dog:
    for step in range(10):
        time.sleep(0.01)
        dog.beat(step)
    if sys.argv[1] == "paused":
        with dog.paused():
            time.sleep(1.0)
        time.sleep(0.05)
        dog.beat(10)
    else:
        a_peer_that_never_answers()
"""


def test_a_run_that_hangs_prints_all_stacks_and_ends():
    begin_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS, "hangs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_HUNG == 75 and time.monotonic() - begin_s < 30
    assert (
        re.search(r"after step 9, where 0\.(0[1-9]|1\d)", done.stderr)
        and "this run hangs and ends; start it again" in done.stderr
    )
    assert "in a_peer_that_never_answers" in done.stderr and "capibara-watchdog" not in done.stdout


def test_what_takes_its_time_is_not_watched():
    done = subprocess.run([sys.executable, "-c", HANGS, "paused"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_usual_is_the_median_of_whole_intervals(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now_s[0])
    dog = Watchdog(Watch(factor=10.0, at_least_s=1.0), every=2)
    for step in range(11):
        now_s[0] += 3.0 if step == 4 else 0.5
        dog.beat(step)
    assert dog.limit_s is None  # four intervals
    for step in range(11, 14):
        now_s[0] += 0.5
        dog.beat(step)
    assert dog.limit_s == pytest.approx(10.0)  # of 1 s, the long one notwithstanding
    assert Watchdog(Watch(factor=None)).limit_s is None


@pytest.mark.parametrize("bad", [dict(factor=1.0), dict(at_least_s=0.0)])
def test_bad_settings(bad):
    with pytest.raises(UserError, match=f"Watch.{next(iter(bad))}"):
        Watch(**bad)


def test_what_is_left_out_between_steps_is_neither_a_hang_nor_their_time():
    """Rollouts between the steps, longer than the limit: the watch goes on, and the steps' usual time stays."""
    with Watchdog(Watch(factor=5.0, at_least_s=1.5)) as dog:
        for step in range(10):
            time.sleep(0.01)
            if step in (7, 8):
                with dog.left_out():
                    time.sleep(1.8)
            dog.beat(step)
        assert dog.limit_s == 1.5 and max(dog._times) < 1.5
