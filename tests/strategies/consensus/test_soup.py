"""A model comes into the incremental soup if it does not raise its loss."""

import jax.numpy as jnp
import numpy as np

from capibara.strategies.consensus.soup import stirred
from capibara.training.base.strategy import NodesPrograms


def loss(params, batch):
    """Of two nodes: the squared distance from the node's target, of as many tokens as it has rows."""
    off = params["w"] - batch["target"]
    return jnp.stack([jnp.sum(off**2, axis=1) * batch["tokens"], batch["tokens"]], axis=1)


NODES = NodesPrograms(step=None, loss=loss, gradient=None)


def stir(soup, size, agreed, target=(1.0, 1.0), tokens=(10.0, 10.0)):
    batch = {"target": jnp.array(target)[:, None], "tokens": jnp.array(tokens)}
    one = lambda x: {"w": jnp.array([x])}  # noqa: E731
    found, size = stirred(NODES, batch, one(soup), jnp.int32(size), one(agreed), 2)
    return float(found["w"][0]), int(size)


def test_the_first_model_comes_in_whatever_its_loss():
    assert stir(1.0, 0, 5.0) == (5.0, 1)
    assert stir(1.0, 0, np.nan) == (1.0, 0)


def test_a_model_that_lowers_the_loss_changes_the_mean():
    assert stir(0.0, 1, 1.0) == (0.5, 2)
    assert stir(0.5, 2, 2.0) == (1.0, 3)


def test_one_that_raises_it_stays_out():
    assert stir(1.0, 3, 2.0) == (1.0, 3)
    assert stir(1.0, 3, np.inf) == (1.0, 3)


def test_nodes_count_by_their_tokens():
    """The node with more tokens has its target at 0, where the other's is at 2."""
    assert stir(1.0, 1, 0.0, (0.0, 2.0), (30.0, 10.0)) == (0.5, 2)
    assert stir(1.0, 1, 0.0, (0.0, 2.0), (10.0, 30.0)) == (1.0, 1)
