"""--profile: which steps are traced, in new, resumed and interrupted runs; the losses stay the same."""

from __future__ import annotations

import glob
import tempfile
import time

import jax
import pytest

from capibara.core.types import UserError
from capibara.monitoring.profiling import trace
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.profiling import profiler as profiler_module
from capibara.training.profiling.profile import Profile
from capibara.training.profiling.profiler import Profiler


class Traced(Callback):
    def __init__(self):
        self.found, self.losses, self.metrics, self.lines = [], {}, {}, []

    def on_profile(self, step, first_step, folder):
        self.found.append((first_step, step, folder))

    def on_status(self, text):
        self.lines.append(text)

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


def test_a_profile_beyond_the_last_step_ends_with_it(make_trainer):
    trainer, seen = make_trainer(steps=3, profile=Profile(start=2, stop=9)), Traced()
    loop.train(trainer, seen)
    ((first, last, folder),) = seen.found
    assert (first, last) == (2, 3) and trace.files_of(folder)
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


def test_steps_that_the_run_does_not_make_are_named(make_trainer, tmp_path):
    seen = Traced()
    loop.train(make_trainer(steps=2, profile=Profile(start=5, stop=6)), seen)
    assert "nothing is profiled: steps 5 to 6 come after the last step, 2" in seen.lines and not seen.found
    said = []
    Profiler(Profile(start=5, stop=6), str(tmp_path), 100).announce(6, said.append)
    Profiler(None, str(tmp_path), 100).announce(1, said.append)
    assert not said
    Profiler(Profile(start=5, stop=6), str(tmp_path), 100).announce(7, said.append)
    assert said == ["nothing is profiled: steps 5 to 6 are over, the run starts with step 7"]


def test_a_full_disk_costs_the_profile_and_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(profiler_module, "_stored", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with Profiler(Profile(start=1, stop=1), str(tmp_path)) as profiler:
        with profiler.step(1):
            result = jax.numpy.ones(3)
        assert profiler.ends(1) and profiler.end(1, result) is None
        assert not profiler.ends(2)
    assert "cannot be written to" in caplog.text and "No space left" in caplog.text


def test_a_trace_that_is_cut_off_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Profiler(Profile(start=1, stop=5), str(tmp_path / "run")) as profiler:
        with profiler.step(1):
            pass
    assert list(tmp_path.iterdir()) == []


def test_the_last_step_of_a_profile_has_its_own_time(make_trainer, monkeypatch):
    """Which a device may still need when the step has been dispatched; a wait stands for it here."""
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: time.sleep(0.3 * bool(tree)) or wait(tree))
    seen = Traced()
    loop.train(make_trainer(steps=4, profile=Profile(start=2, stop=3)), seen)  # to begin a trace also takes time
    assert seen.metrics[3]["step_s"] > 0.3 > seen.metrics[4]["step_s"]
