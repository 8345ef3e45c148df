"""Hints of weight 1 for domains that have fewer experts than a token chooses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.parts import router
from capibara.models.parts.moe import Hints, Moe, MoeMLP, router_metrics

DOMAINS = 8
HINTS = Hints(domains=tuple("abcdefgh"), hold_steps=10, decay_steps=20)
MOE = Moe(num_experts=8, top_k=2, expert_dim=16, dispatch="capacity", capacity_factor=1.25, hints=HINTS)
ROWS, LENGTH = 4, 32


def routed(mixture, step):
    """(logits, domains, choice, sums) of rows with as many tokens of each domain, and a padded end."""
    logits = 3.0 * jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 8))
    domains = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32) % DOMAINS + 1, (ROWS, 1))
    real = jnp.tile(jnp.arange(LENGTH) < LENGTH - DOMAINS, (ROWS, 1))
    choice, stats = router.choose(logits, real, mixture, router.hint_of(mixture, domains, jnp.int32(step)))
    return domains, real, choice, stats


def test_choices_outside_a_domain_of_one_expert_are_none():
    domains, real, choice, stats = routed(MOE, 0)
    experts, gates = np.array(choice.experts), np.array(choice.gates)
    np.testing.assert_array_equal(experts[..., 0], np.where(real, domains - 1, 8))
    np.testing.assert_array_equal(experts[..., 1], 8)
    np.testing.assert_array_equal(gates[..., 1], 0.0)
    np.testing.assert_allclose(gates[..., 0], np.array(real, np.float32), rtol=1e-6)
    np.testing.assert_array_equal(stats["load"], ROWS * (LENGTH / DOMAINS - 1))
    metrics = router_metrics(stats, MOE)
    assert metrics["expert_load_max"] == metrics["expert_load_min"] == 1
    # Experts are used evenly: 1 per token, as for tokens with all of their choices.
    alike = dataclasses.replace(MOE, balance_loss=1.0)
    np.testing.assert_allclose(router_metrics(stats, alike)["balance_loss"], 1.0, rtol=1e-5)


def test_choices_return_as_the_hint_fades():
    _, real, choice, stats = routed(MOE, 11)
    experts = np.array(choice.experts)[np.array(real)]
    assert (experts < 8).all()
    assert float(stats["load"].sum()) == 2 * int(real.sum())


def test_an_expert_chooses_only_tokens_of_its_domain():
    mixture = dataclasses.replace(MOE, routing="expert_choice")
    domains, _, choice, stats = routed(mixture, 0)
    tokens = np.array(choice.tokens)
    for expert in range(8):
        taken = tokens[:, expert][tokens[:, expert] < LENGTH]
        assert (np.array(domains)[0, taken] == expert + 1).all()
    np.testing.assert_array_equal(stats["load"], ROWS * (LENGTH / DOMAINS - 1))


@pytest.mark.parametrize("dispatch", ["capacity", "dropless"])
def test_no_token_of_a_domain_is_dropped(dispatch):
    config = DecoderConfig(vocab_size=64, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32, dtype="float32")
    mixture = dataclasses.replace(MOE, dispatch=dispatch)
    layer = MoeMLP(config, mixture, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, 16))
    # The first tokens belong to the last domains: they must not use capacity of the first experts that they do not
    # need.
    domains = jnp.tile(DOMAINS - jnp.arange(LENGTH, dtype=jnp.int32) // (LENGTH // DOMAINS), (ROWS, 1))
    y, stats = layer(x, jnp.ones((ROWS, LENGTH), jnp.int32), domains, jnp.int32(0))
    assert stats["dropped"] == 0
    assert router_metrics(stats, mixture)["dropped_share"] == 0
    h = jnp.einsum("btd,edf->btef", x, layer.up[...])
    h = config.activation(jnp.einsum("btd,edf->btef", x, layer.gate[...])) * h
    every = jnp.einsum("btef,efd->bted", h, layer.down[...])
    want = jnp.take_along_axis(every, (domains - 1)[..., None, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
