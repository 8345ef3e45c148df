"""Neighbourhood gradient descent (Li et al. 2025, arXiv:2504.07964): scores of experts by the loss of similar prompts' right answers.

P: prompts, K: neighbours of each, L: layers with experts, E: experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from capibara.core.types import Batch, HostBatch, Params
from capibara.evaluation.remix.remixing import RemixExperts

LogProbabilities = Callable[[Params, Batch], jax.Array]
Descent = Callable[[Params, Batch | HostBatch, jax.Array, jax.Array], jax.Array]
_LEAST = 1e-9  # of a score


def surrogate(
    log_probabilities: LogProbabilities,
    layers: Sequence[int],
    log_scores_PLE: jax.Array,
    params: Params,
    batch: Batch,
    weights_PK: jax.Array,
) -> jax.Array:
    """The loss that stands for a prompt's own: that of its neighbours' right answers when they are routed by its scores, [P].

    Args:
      log_probabilities: (params, batch) -> the sum of ln p of each row's targets [P * K].
      layers: the numbers of the layers with experts.
      log_scores_PLE: logarithms of the scores of each prompt.
      params: of the model.
      batch: the neighbours' prompts and right answers [P * K, T], with the entries of a routing.
      weights_PK: of the neighbours of each prompt, with the sum 1.
    """
    rows, places = weights_PK.size, jnp.asarray(layers)
    of_rows = jnp.repeat(jnp.exp(log_scores_PLE), weights_PK.shape[1], axis=0)
    scores = jnp.zeros((rows, *batch["pathway_scores"].shape[1:]), jnp.float32).at[:, places].set(of_rows)
    tokens = jnp.maximum(jnp.sum(batch["weights"], axis=1), 1.0)
    loss = -log_probabilities(params, dict(batch) | {"pathway_scores": scores}) / tokens
    return jnp.sum(weights_PK * loss.reshape(weights_PK.shape), axis=1)


def make_descent(
    log_probabilities: LogProbabilities, layers: Sequence[int], remix: RemixExperts, *, normalised: bool
) -> Descent:
    """A jitted function (params, batch, weights_PK, scores_PLE) -> the scores [P, L, E] after `remix.steps` steps.

    Steps are on the logarithms, so that scores stay above 0.

    Args:
      log_probabilities, layers: as in `surrogate`.
      remix: steps and learning rate.
      normalised: whether a layer's scores sum to 1, as those of a softmax do.
    """
    rate = optax.cosine_decay_schedule(remix.learning_rate, remix.steps)

    def descend(params: Params, batch: Batch, weights_PK: jax.Array, scores_PLE: jax.Array) -> jax.Array:
        def normal(log_scores: jax.Array) -> jax.Array:
            return jax.nn.log_softmax(log_scores, axis=-1) if normalised else log_scores

        def loss(
            log_scores: jax.Array,
        ) -> jax.Array:  # prompts do not share anything, so a sum keeps their gradients apart
            return jnp.sum(surrogate(log_probabilities, layers, normal(log_scores), params, batch, weights_PK))

        def step(number: jax.Array, log_scores: jax.Array) -> jax.Array:
            return log_scores - rate(number) * jax.grad(loss)(log_scores)

        start = jnp.log(jnp.maximum(scores_PLE, _LEAST))
        return jnp.exp(normal(jax.lax.fori_loop(0, remix.steps, step, start)))

    return jax.jit(descend)
