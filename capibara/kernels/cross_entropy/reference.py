"""The cross entropy by the plain formula, with whole logits and JAX's own gradients: what every other form must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.cross_entropy.terms import Softmax, Terms


def sums(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    terms: Terms,
    softmax: Softmax,
) -> jax.Array:
    """The first LossSums [4 or 5]; the arguments are those of `dispatch.cross_entropy`."""
    head_VD = head_VD.astype(hidden_BTD.dtype)
    logits = softmax.inputs(jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD, preferred_element_type=jnp.float32))
    V, log_z = logits.shape[-1], jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets_BT[..., None], axis=-1, mode="clip")[..., 0]
    correct = (target >= jnp.max(logits, axis=-1)).astype(jnp.float32)
    columns = [log_z - target, jnp.square(log_z), correct, jnp.ones_like(weights_BT)]
    if terms.smoothing:
        probabilities = jnp.where(jax.nn.one_hot(targets_BT, V, dtype=bool), 1.0 - terms.smoothing, terms.others(V))
        smoothed = log_z - jnp.sum(probabilities * logits, axis=-1) - terms.entropy(V)
        columns.append(smoothed - columns[0])
    return jnp.stack([jnp.sum(column * weights_BT) for column in columns])


def cross_entropy(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    terms: Terms,
    softmax: Softmax,
) -> tuple[jax.Array, jax.Array]:
    """The loss, to differentiate, and `sums`."""
    result = sums(hidden_BTD, head_VD, targets_BT, weights_BT, terms, softmax)
    return terms.total(result), jax.lax.stop_gradient(result)


def token_log_probabilities(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, softmax: Softmax
) -> jax.Array:
    """`dispatch.token_log_probabilities` by the plain formula."""
    head_VD = head_VD.astype(hidden_BTD.dtype)
    logits = softmax.inputs(jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD, preferred_element_type=jnp.float32))
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets_BT[..., None], axis=-1)[..., 0]
