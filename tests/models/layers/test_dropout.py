"""Dropout: where and when it applies, and that nothing changes without it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from capibara.models.layers.dropout import Dropout, Site, of_step
from capibara.sharding import Remat, RematPolicy

SIZES = dict(vocab_size=64, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24, dtype="float32")
CONFIGS = {
    "decoder": DecoderConfig(**SIZES),
    "unrolled": DecoderConfig(**SIZES, layer_loop="unroll"),
    "encoder_decoder": EncoderDecoderConfig(**SIZES),
    "each_layer": EncoderDecoderConfig(**SIZES, relative_tables="each_layer"),
    "encoder": EncoderConfig(**SIZES),
}
_HEAVY = [pytest.param(name, marks=pytest.mark.heavy) for name in ("unrolled", "each_layer", "encoder")]


def batch():
    tokens = np.random.default_rng(0).integers(2, 64, (2, 12)).astype(np.int32)
    ones, positions = np.ones_like(tokens), np.tile(np.arange(12, dtype=np.int32), (2, 1))
    found = {"tokens": tokens, "segment_ids": ones, "positions": positions}
    return found | {f"encoder_{name}": value[:, :8] for name, value in found.items()}


def hidden(config, step, remat=Remat.NONE):
    model = api.build(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: (rng.standard_normal(s.shape) * 0.3).astype(np.float32), model.abstract_params)
    return jax.jit(lambda p, s: model.hidden(p, batch(), RematPolicy(remat), s)[0])(
        params, None if step is None else jnp.int32(step)
    )


@pytest.mark.parametrize("name", ["decoder", pytest.param("encoder_decoder", marks=pytest.mark.heavy), *_HEAVY])
def test_it_is_of_training_steps_alone(name):
    config = CONFIGS[name]
    dropped = dataclasses.replace(config, dropout_rate=0.5)
    plain = hidden(config, 3)
    np.testing.assert_array_equal(hidden(dropped, None), plain)
    one = hidden(dropped, 3)
    assert np.isfinite(one).all() and not np.allclose(one, plain, atol=1e-2)
    np.testing.assert_array_equal(hidden(dropped, 3), one)
    if name != "encoder_decoder":
        np.testing.assert_allclose(hidden(dropped, 3, Remat.FULL), one, atol=1e-5)
    assert not np.allclose(hidden(dropped, 4), one, atol=1e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_program_without_it_draws_nothing(name):
    model = api.build(CONFIGS[name])
    text = str(
        jax.make_jaxpr(lambda p, s: model.hidden(p, batch(), RematPolicy(), s)[0])(model.abstract_params, jnp.int32(1))
    )
    assert "random" not in text and "threefry" not in text


def test_the_mean_stays_and_positions_share_a_mask():
    drop = Dropout(0.25, jax.random.key(1))
    x = jnp.ones((64, 5, 128))
    y = np.asarray(drop(x, Site.MLP))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert (y == y[:, :1]).all()  # the positions of a row
    assert abs(y.mean() - 1) < 0.03 and abs((y == 0).mean() - 0.25) < 0.03
    apart = np.asarray(drop(x, Site.MLP, shared=None))
    assert not (apart == apart[:, :1]).all()
    other = (drop(x, Site.ATTENTION), drop.at(1)(x, Site.MLP), drop.at(2)(x, Site.MLP))
    assert all((np.asarray(one) != y).any() for one in other) and (other[1] != other[2]).any()


def test_micro_batches_of_a_step_have_masks_of_their_own():
    tokens = jnp.asarray(batch()["tokens"])
    keys = {
        tuple(jax.random.key_data(of_step(0.1, jnp.int32(1), t).key).tolist()) for t in (tokens, tokens[::-1, ::-1])
    }
    assert len(keys) == 2
    assert of_step(0.0, jnp.int32(1), tokens) is None and of_step(0.1, None, tokens) is None


def test_layers_have_masks_of_their_own():
    """A scan and unrolled layers have the same masks."""
    one = hidden(dataclasses.replace(CONFIGS["decoder"], dropout_rate=0.5), 3)
    np.testing.assert_allclose(hidden(dataclasses.replace(CONFIGS["unrolled"], dropout_rate=0.5), 3), one, atol=1e-5)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_bad_rates(rate):
    with pytest.raises(UserError, match=f"DecoderConfig.dropout_rate is {rate}, must be from 0 to below 1: try 0.1"):
        DecoderConfig(**SIZES, dropout_rate=rate)


def test_a_back_end_that_drops_nothing_is_refused():
    config = DecoderConfig(**SIZES | dict(vocab_size=65), attention="blockwise", dropout_rate=0.1)
    with pytest.raises(
        UserError, match="attention is 'blockwise', which does not support dropout of probabilities: set 'auto'"
    ):
        hidden(config, 1)
