"""The loss scale: its path through good and bad steps, and choosing one of two states bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.training.stability.loss_scale import LossScale, LossScaling, select


def test_doubles_after_good_steps_and_halves_at_an_overflow():
    scaling = LossScaling(initial=8.0, growth_steps=3, minimum=2.0)
    state, scales = scaling.start(), []
    after = jax.jit(scaling.after)
    for good in [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1]:
        state = after(state, jnp.bool_(good))
        scales.append(float(state.scale))
    assert scales == [8, 8, 16, 16, 16, 8, 8, 8, 16, 8, 4, 2, 2, 2]
    assert int(state.good_steps) == 1 and state.scale.dtype == jnp.float32 and state.good_steps.dtype == jnp.int32


def test_stays_finite():
    state = LossScale(jnp.float32(2.0**126), jnp.int32(0))
    assert np.isfinite(LossScaling(growth_steps=1).after(state, jnp.bool_(True)).scale)


@pytest.mark.parametrize("finite", [True, False])
def test_select_is_one_of_the_two_bit_for_bit(finite):
    old = {
        "a": jnp.float32([1.0, -0.0]),
        "b": jnp.bfloat16([-1.0, jnp.inf]),
        "h": jnp.float16(-0.0),
        "n": jnp.int8(3),
        "skip": jnp.bool_(True),
    }
    new = {
        "a": jnp.float32([jnp.nan, 0.0]),
        "b": jnp.bfloat16([jnp.nan, 0.0]),
        "h": jnp.float16(jnp.nan),
        "n": jnp.int8(4),
        "skip": jnp.bool_(False),
    }
    got, want = select(jnp.bool_(finite), new, old), new if finite else old
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    "bad",
    [
        *(dict(initial=0.0), dict(initial=1e300), dict(minimum=0.0), dict(minimum=1e-60)),
        *(dict(initial=1.0, minimum=2.0), dict(growth_steps=0), dict(growth_steps=2**31)),
    ],
)
def test_bad_settings(bad):
    with pytest.raises(UserError, match="LossScaling"):
        LossScaling(**bad)
