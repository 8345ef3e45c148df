"""Which losses are spikes, what the window remembers, and the cost of leaving updates out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.models import api
from capibara.training import setup
from capibara.training.stability.anomalies import Anomalies, OnSpike


def spikes(losses, **settings):
    """Which of a row of losses are spikes, and the window after them."""
    anomalies = Anomalies(on_spike=OnSpike.SKIP, **settings)
    window, found = anomalies.start(), []

    @jax.jit
    def take(window, loss):
        spike, told = anomalies.spike(window, loss)
        return anomalies.after(window, loss, jnp.isfinite(loss) & ~spike), spike, told

    for loss in losses:
        window, spike, told = take(window, jnp.float32(loss))
        found.append(bool(spike))
    return found, window, {name: float(value) for name, value in told.items()}


def test_a_spike_is_above_the_mean_of_a_full_window_by_so_many_deviations():
    rng = np.random.default_rng(0)
    losses = rng.normal(3.0, 0.1, 16)
    for above, want in ((5.9, False), (6.1, True)):
        loss = losses.mean() + above * losses.std()
        found, _, told = spikes([*losses, loss], window=16)
        assert found == [False] * 16 + [want]
        assert told["window_mean"] == pytest.approx(losses.mean()) and told["window_spread"] == pytest.approx(
            losses.std()
        )
    assert not any(spikes([*losses[:15], 99.0], window=16)[0])  # not full


def test_the_window_holds_the_last_good_losses():
    """Neither spikes nor what is no number is remembered; a loss that falls is none, however far."""
    found, window, _ = spikes([2.0, 2.2, 2.1, 2.3, 50.0, float("nan"), float("inf"), 0.1, 2.0], window=4)
    assert found == [False] * 4 + [True] + [False] * 4
    assert sorted(window.losses.tolist()) == pytest.approx([0.1, 2.0, 2.1, 2.3]) and int(window.count) == 6


def test_equal_losses_leave_room_for_rounding():
    assert spikes([1.0] * 4 + [1.005, 1.1], window=4)[0] == [False] * 5 + [True]
    assert spikes([0.0] * 4 + [1e-6], window=4)[0] == [False] * 4 + [True]


@pytest.mark.parametrize("bad", [
    dict(most_in_a_row=0), dict(window=1), dict(sigmas=0.0), dict(sigmas=float("nan")), dict(roll_back_steps=0),
    dict(skip_batches=0), dict(most_roll_backs=0),
])  # fmt: skip
def test_bad_settings(bad):
    with pytest.raises(UserError, match=f"Anomalies.{next(iter(bad))} is "):
        Anomalies(**bad)


def test_going_back_needs_checkpoints(make_trainer):
    anomalies = Anomalies(on_spike=OnSpike.ROLL_BACK)
    with pytest.raises(UserError, match=r"Checkpointing.every is 0: set it, e.g. to 100"):
        make_trainer(anomalies=anomalies)
    make_trainer(anomalies=anomalies, checkpointing=Checkpointing(every=10))


def test_looking_for_spikes_can_be_switched_on_for_a_run_that_is_under_way(make_trainer, train):
    trainer = make_trainer(steps=3)
    plain = train(trainer)
    watching = dataclasses.replace(trainer, steps=5, anomalies=Anomalies(on_spike=OnSpike.SKIP, window=4))
    seen = train(watching)
    assert plain.state.losses is None and int(seen.started.losses.count) == 0
    jax.tree.map(np.testing.assert_array_equal, seen.started.params, plain.state.params)
    assert int(seen.state.losses.count) == 2 and seen.state.losses.losses[:2].tolist() == list(seen.losses.values())


def test_leaving_updates_out_costs_next_to_nothing(make_trainer):
    """What XLA says of the step with and without it, of a run that has no other need of the gradients' norm."""

    def step(**settings):
        plain = make_trainer(anomalies=Anomalies(**settings))
        trainer = dataclasses.replace(plain, optimizer=dataclasses.replace(plain.optimizer, clip_norm=None))
        lowered = setup.lower_step(trainer, api.build(trainer.model), sharding.make_mesh(trainer.plan))
        compiled = lowered.compile()
        cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
        return cost["flops"], memory.temp_size_in_bytes + memory.argument_size_in_bytes

    (flops, size), (plain_flops, plain_size) = step(), step(skip_nonfinite=False)
    assert flops < 1.03 * plain_flops and size < 1.05 * plain_size
