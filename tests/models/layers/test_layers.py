"""The keys of parameters: those of flax, without what JAX says of each."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from capibara.models import api
from capibara.models.layers.layers import next_key


def test_keys_are_those_of_flax():
    theirs, ours = nnx.Rngs(3), nnx.Rngs(3)
    for _ in range(3):
        np.testing.assert_array_equal(jax.random.key_data(next_key(ours)), jax.random.key_data(theirs.params()))
    assert ours.params.count[...] == 3 and ours.params.count.dtype == theirs.params.count.dtype


def test_a_model_is_built_without_asking_tracers_for_their_sharding(monkeypatch):
    """The message that they have none shows the programs that made them, which took a third of the time."""
    kinds, asked = [], []
    jax.eval_shape(lambda x: kinds.append(type(x)) or x, 1.0)
    (kind,) = kinds
    (owner,) = [one for one in kind.__mro__ if "sharding" in vars(one)]

    def sharding(tracer):
        asked.append(tracer)
        raise AttributeError("sharding")

    monkeypatch.setattr(owner, "sharding", property(sharding))
    config = api.DecoderConfig(vocab_size=64, embed_dim=24, num_layers=2, num_heads=2, mlp_dim=40)  # no other test's
    api.build(config)
    assert not asked
    nnx.eval_shape(lambda: nnx.Rngs(0).params())
    assert asked
