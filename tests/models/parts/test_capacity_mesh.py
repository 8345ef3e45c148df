"""With reordered rows, full experts drop the same tokens as on one device."""

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.core import tree
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from capibara.models.parts.moe import Moe
from capibara.sharding import Plan

ROWS, LENGTH, VOCAB = 4, 16, 64
SIZES = dict(
    vocab_size=VOCAB,
    embed_dim=16,
    num_layers=1,
    num_heads=2,
    mlp_dim=32,
    dtype="float32",
    moe=Moe(num_experts=4, top_k=2, expert_dim=16, dispatch="capacity", capacity_factor=0.5),
)
MODELS = {
    "decoder": DecoderConfig(**SIZES),
    "encoder_decoder": EncoderDecoderConfig(**SIZES),
    "encoder": EncoderConfig(**SIZES, max_length=LENGTH),
}


def batch_of():
    rng = np.random.default_rng(0)
    segments = np.tile(np.repeat([1, 2, 0], [9, 5, 2]).astype(np.int32), (ROWS, 1))
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    tokens = rng.integers(0, VOCAB, (2, ROWS, LENGTH)).astype(np.int32)
    batch = {"tokens": tokens[0], "segment_ids": segments, "positions": positions}
    batch |= {"weights": rng.standard_normal((ROWS, LENGTH)).astype(np.float32) * (segments > 0)}
    return batch | {"encoder_tokens": tokens[1], "encoder_segment_ids": segments, "encoder_positions": positions}


def loss_and_grads(name, layout, devices):
    """A loss of the hidden states, the tokens' dropped choices, and the gradients of all parameters."""
    model = api.build(MODELS[name])
    mesh = sharding.make_mesh(layout, devices)
    params = jax.jit(model.init)(jax.random.key(0))
    # Fresh norms and biases are ones and zeros, which hide mistakes.
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape), params)

    def loss(params, batch):
        with sharding.activate(mesh, layout.rules):
            batch = sharding.balanced(batch)
            hidden, stats = model.hidden(params, batch, layout.remat_policy)
            aim = (hidden @ model.head(params).T)[..., :4].mean(-1)
            return (aim * batch["weights"]).mean() + 1e-3 * model.layer_loss(stats), stats["dropped"]

    batch = sharding.global_batch(sharding.batch_sharding(mesh, layout.rules), batch_of())
    params = jax.device_put(params, sharding.shardings(mesh, layout.rules, model.axes, params))
    return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch))


@pytest.mark.parametrize(
    "name", ["decoder", *(pytest.param(name, marks=pytest.mark.heavy) for name in MODELS if name != "decoder")]
)
def test_the_same_tokens_are_dropped_on_a_context_axis(name):
    got = loss_and_grads(name, Plan(batch_size=ROWS, fsdp=1, context=2), jax.devices()[:2])
    want = loss_and_grads(name, Plan(batch_size=ROWS), jax.devices()[:1])
    assert want[0][1].min() > 0  # in every layer
    np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[0][1], want[0][1])
    for path, a, b in zip(tree.path_names(want[1]), jax.tree.leaves(got[1]), jax.tree.leaves(want[1])):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=path)
    largest = max(np.abs(b).max() for b in jax.tree.leaves(want[1]))
    assert largest > 1e-2  # so that 1e-5 is small
