"""Next-token losses as sums, so that micro-batches and hosts add up exactly."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara.sharding import constrain


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, float32 scalars.

    Attributes:
      nll: negative log-likelihood in nats.
      z: squared log of the softmax normaliser (the z-loss of PaLM, before its coefficient).
      correct: targets that are the arg max.
      weight: sum of the weights.
    """

    nll: jax.Array
    z: jax.Array
    correct: jax.Array
    weight: jax.Array


def cross_entropy(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> LossSums:
    """Cross entropy of softmax(hidden @ head.T) against the targets.

    Args:
      hidden_BTD: final hidden states, in the compute dtype.
      head_VD: output projection, float32.
      targets_BT: wanted token ids.
      weights_BT: weight of each target; 0 leaves it out.
    """
    logits = jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD.astype(hidden_BTD.dtype), preferred_element_type=jnp.float32)
    logits = constrain(logits, ("batch", "act_time", "act_vocab"))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets_BT[..., None], axis=-1)[..., 0]
    return LossSums(
        nll=jnp.sum((log_z - target) * weights_BT),
        z=jnp.sum(jnp.square(log_z) * weights_BT),
        correct=jnp.sum((jnp.argmax(logits, axis=-1) == targets_BT) * weights_BT),
        weight=jnp.sum(weights_BT),
    )
