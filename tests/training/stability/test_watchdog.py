"""The watchdog: what counts as hung, and how such a run ends."""

import re
import subprocess
import sys
import time

import pytest

from capibara.core.types import UserError
from capibara.multihost.exits import EXIT_HUNG
from capibara.training.stability import watchdog
from capibara.training.stability.watchdog import Watch, Watchdog

HANGS = """
import sys, time
from capibara.training.stability.watchdog import Watch, Watchdog

def a_peer_that_never_answers():
    time.sleep(60)

limits = dict(start_s=0.6, evaluation_s=0.7, save_s=0.8)
where = sys.argv[1]
with Watchdog(Watch(factor=5.0, at_least_s=0.3, **limits)) as dog:
    if where == "compile":
        a_peer_that_never_answers()
    dog.beat(1)
    if where == "first steps":
        dog.beat(2)
        a_peer_that_never_answers()
    for step in range(3, 13):
        time.sleep(0.01)
        dog.beat(step)
    if where == "steps":
        a_peer_that_never_answers()
    for _ in range(2):
        with dog.allowing("the evaluation", "evaluation_s"):
            for _ in range(3):
                time.sleep(0.5)
                dog.advance()
            if where == "evaluation":
                a_peer_that_never_answers()
        if where == "after":
            a_peer_that_never_answers()
        time.sleep(0.05)
        dog.beat(13)
        with dog.left_out("the rollout", "evaluation_s"):
            time.sleep(0.6)
            if where == "rollout":
                a_peer_that_never_answers()
        dog.beat(14)
    with dog.allowing("the save", "save_s"):
        time.sleep(0.6)
        if where == "save":
            a_peer_that_never_answers()
    dog.ending()
    time.sleep(0.6)
    if where == "end":
        a_peer_that_never_answers()
"""


@pytest.mark.parametrize(
    "where, said",
    [
        ("compile", "the start has made no progress for 1 s: this run hangs and ends; start it again to resume (Watch.start_s)"),
        pytest.param(*("first steps", "the start after step 2 has made no progress"), marks=pytest.mark.heavy),
        ("steps", r"the devices have completed no step for . s after step 12, 0\.(0[1-9]|1\d)"),
        pytest.param(*("evaluation", "the evaluation after step 12 has made no progress for 1 s"), marks=pytest.mark.heavy),
        pytest.param(*("after", "the devices have completed no step for . s after step 12"), marks=pytest.mark.heavy),
        ("rollout", "the rollout after step 13 has made no progress for 1 s"),
        ("save", r"the save after step 14 has made no progress for 1 s: .* \(Watch.save_s\)"),
        pytest.param(*("end", "the last save after step 14"), marks=pytest.mark.heavy),
    ],
)  # fmt: skip
def test_a_run_that_hangs_anywhere_prints_all_stacks_and_ends(where, said):
    begin_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS, where], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_HUNG == 75 and time.monotonic() - begin_s < 30
    assert re.search(said if where != "compile" else re.escape(said), done.stderr), done.stderr
    assert "start it again" in done.stderr and "in a_peer_that_never_answers" in done.stderr


def test_what_takes_its_time_within_its_limit_is_no_hang():
    done = subprocess.run([sys.executable, "-c", HANGS, "nowhere"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_usual_is_the_median_of_whole_intervals(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now_s[0])
    dog = Watchdog(Watch(factor=10.0, at_least_s=1.0, start_s=77.0), every=2)
    for step in range(11):
        now_s[0] += 3.0 if step == 4 else 0.5
        dog.beat(step)
    assert dog.limit_s == 77.0  # four intervals
    for step in range(11, 14):
        now_s[0] += 0.5
        dog.beat(step)
    assert dog.limit_s == pytest.approx(10.0)  # of 1 s, the long one notwithstanding
    assert Watchdog(Watch(factor=None)).limit_s is None


@pytest.mark.parametrize("bad", [dict(factor=1.0), dict(at_least_s=0.0), dict(start_s=-1.0), dict(save_s=float("nan"))])
def test_bad_settings(bad):
    with pytest.raises(UserError, match=f"Watch.{next(iter(bad))}"):
        Watch(**bad)


def test_what_is_left_out_between_steps_is_neither_a_hang_nor_their_time():
    """Rollouts between the steps, longer than the limit: the watch goes on, and the steps' usual time stays."""
    with Watchdog(Watch(factor=5.0, at_least_s=1.5)) as dog:
        for step in range(10):
            time.sleep(0.01)
            if step in (7, 8):
                with dog.left_out("the rollout", "evaluation_s"):
                    time.sleep(1.8)
            dog.beat(step)
        assert dog.limit_s == 1.5 and max(dog._times) < 1.5
