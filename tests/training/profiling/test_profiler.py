"""--profile: which steps are traced, in new, resumed and interrupted runs; the losses stay the same."""

from __future__ import annotations

import glob

import jax
import pytest

from capibara.core.types import UserError
from capibara.monitoring.profiling import trace
from capibara.training import loop
from capibara.training.callbacks import Callback
from capibara.training.profiling.profile import Profile
from capibara.training.profiling.profiler import Profiler


class Traced(Callback):
    def __init__(self):
        self.found, self.losses, self.metrics = [], {}, {}

    def on_profile(self, step, first_step, folder):
        self.found.append((first_step, step, folder))

    def on_step(self, step, metrics):
        self.losses[step] = metrics["loss"]
        self.metrics[step] = metrics


def test_the_steps_of_a_profile_are_traced_and_the_losses_stay_the_same(make_trainer, tmp_path):
    plain, traced = Traced(), Traced()
    loop.train(make_trainer(steps=6, model_dir=str(tmp_path / "plain")), plain)
    trainer = make_trainer(steps=6, profile=Profile(start=3, stop=4))
    loop.train(trainer, traced)
    assert traced.losses == plain.losses and plain.found == []
    ((first, last, folder),) = traced.found
    assert (first, last) == (3, 4) and traced.metrics[4]["profile_s"] > 0
    (path,) = trace.files_of(folder)
    found = trace.read(path)
    assert len(found.steps_ns) == 2
    assert {lane.device for lane in found.lanes} == {f"CPU:{number}" for number in range(8)}
    assert any(op.category == "collectives" for lane in found.lanes for op in lane.ops)


def test_a_profile_that_the_run_does_not_reach_ends_with_it(make_trainer):
    trainer, seen = make_trainer(steps=3, profile=Profile(start=2, stop=9)), Traced()
    loop.train(trainer, seen)
    assert seen.found == []
    jax.profiler.start_trace(trainer.model_dir)  # would fail if a trace were still open
    jax.profiler.stop_trace()


@pytest.mark.parametrize(
    ("start", "stop", "first_step", "traced"), [(2, 5, 4, (4, 5)), (2, 5, 6, None), (7, 7, 1, (7, 7))]
)
def test_a_run_that_starts_later_traces_what_remains(start, stop, first_step, traced, tmp_path):
    found = None
    with Profiler(Profile(start=start, stop=stop), str(tmp_path)) as profiler:
        for step in range(first_step, 9):
            with profiler.step(step):
                result = jax.numpy.ones(3) + step
            if profiler.ends(step):
                assert found is None
                found = (profiler.end(step, result)[0], step)
    assert found == traced
    assert len(glob.glob(str(tmp_path / "**" / "*.xplane.pb"), recursive=True)) == (traced is not None)


@pytest.mark.parametrize(
    ("start", "stop", "fault"), [(0, 3, "from 1 to"), (5, 4, "from 1 to"), (1, 1001, "at most 1000")]
)
def test_wrong_steps_are_refused(start, stop, fault):
    with pytest.raises(UserError, match=fault):
        Profile(start=start, stop=stop)


def test_a_second_trace_of_the_process_is_refused(tmp_path):
    jax.profiler.start_trace(str(tmp_path / "other"))
    try:
        with (
            pytest.raises(UserError, match="end the other trace"),
            Profiler(Profile(start=1, stop=1), str(tmp_path)) as one,
        ):
            with one.step(1):
                pass
    finally:
        jax.profiler.stop_trace()
