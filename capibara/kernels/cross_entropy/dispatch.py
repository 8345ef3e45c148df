"""Chooses how the cross entropy is computed: by blocks of tokens or by parts of the vocabulary.

Losses are sums, so that those of micro-batches and hosts can be added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.kernels.cross_entropy import by_tokens, by_vocabulary
from capibara.kernels.cross_entropy.layout import Layout, layout_of, on_shards, specs
from capibara.kernels.cross_entropy.terms import LossSums, Softmax, Terms

# On a TPU blocks of tokens are faster only for a small vocabulary of wide states (`by_vocabulary_on`): ids of a device, and
# the states' width; and not if a float32 head gradient on a device has at least so many bytes.
_SMALL_VOCABULARY, _SMALL_WIDTH = 40_000, 1024
_LARGE_GRADIENT_BYTES = 768 * 2**20


def cross_entropy(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    trains_head: bool = True,
) -> tuple[jax.Array, LossSums]:
    """Cross entropy of softmax(hidden @ head.T) against the targets.

    The gradients are computed in the forward pass, from logits that exist for one block of tokens or one part of the
    vocabulary at a time (`by_vocabulary_on`).

    Args:
      hidden_BTD: final hidden states, in the compute dtype.
      head_VD: output projection, float32.
      targets_BT: target token ids.
      weights_BT: weight of each target; 0 leaves it out. No gradient.
      z_loss: coefficient of the squared log normaliser in the loss.
      label_smoothing: share of a target's probability that goes to the other ids.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap); None: they stay.
      trains_head: False computes no gradient of the head.

    Returns:
      The loss, nll + z_loss * z + smoothing, to differentiate; and the sums, without gradient.
    """
    layout = layout_of(targets_BT, head_VD, trains_head)
    terms = Terms(z_loss, label_smoothing)
    loss, sums = _loss(hidden_BTD, head_VD, targets_BT, weights_BT, layout, terms, Softmax(soft_cap))
    return loss, LossSums(*jax.lax.stop_gradient(sums))


def token_log_probabilities(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    *,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    usable: int | None = None,
    trains_head: bool = True,
) -> jax.Array:
    """Log-probability of each target under softmax(hidden @ head.T / temperature), float32 [B, T], to differentiate.

    For losses that are not a sum over tokens. A token's weight in such a loss is known only after all
    log-probabilities, so the backward pass computes the logits again: it is that of `cross_entropy` with these weights.

    Args:
      hidden_BTD, head_VD, targets_BT, soft_cap, trains_head: as for `cross_entropy`.
      temperature: divides the logits, after the cap.
      usable: only this many first ids have a probability; None: all.
    """
    layout = layout_of(targets_BT, head_VD, trains_head)
    usable = None if usable is None or usable >= len(head_VD) else usable
    return _log_probabilities(hidden_BTD, head_VD, targets_BT, layout, Softmax(soft_cap, temperature, usable))


def by_vocabulary_on(platform: str, vocabulary: float, width: int) -> bool:
    """Whether gradients are made by parts of the vocabulary, not by blocks of tokens.

    The parts compute the logits twice (a third more of the head's FLOPs) but never hold its whole gradient, which every
    block of tokens reads and writes. The larger the vocabulary, the fewer tokens a block has, and the more often that is.
    Compiled gradients of a loss, collectives excluded (libtpu 0.0.42.1, 29 November 2026):

    | slice (fsdp) | vocabulary, width | tokens a chip | by blocks of tokens | by parts of the vocabulary |
    |---|---|---|---|---|
    | v5e-64 | 32,000, 4096 | 8,192 | 47.5 ms, 1.28 GiB | 58.4 ms, 0.37 GiB |
    | v6e-64 | 32,000, 4096 | 16,384 | 38.8 ms, 1.35 GiB | 40.0 ms, 0.49 GiB |
    | v6e-64 | 32,000, 2048 | 16,384 | 18.0 ms, 0.92 GiB | 21.1 ms, 0.25 GiB |
    | v6e-4 | 32,000, 768 | 32,768 | 18.5 ms, 0.38 GiB | 16.5 ms, 0.14 GiB |
    | v5e-4 | 49,152, 576 | 32,768 | 67.5 ms, 0.40 GiB | 58.1 ms, 0.15 GiB |
    | v6e-4 | 49,152, 960 | 16,384 | 17.8 ms, 0.63 GiB | 12.8 ms, 0.13 GiB |
    | v6e-64 | 50,304, 2048 | 16,384 | 31.4 ms, 1.02 GiB | 25.8 ms, 0.32 GiB |
    | v5e-64 | 100,352, 4096 | 2,048 | 76.3 ms, 1.56 GiB | 39.6 ms, 0.79 GiB |
    | v5e-4 | 128,256, 2048 | 16,384 | 264 ms, 1.78 GiB | 216 ms, 0.86 GiB |
    | v6e-64 | 128,256, 4096 | 16,384 | 211 ms, 3.55 GiB | 144 ms, 1.23 GiB |
    | v5e-1 | 151,936, 1024 | 16,384 | 295 ms, 0.90 GiB | 136 ms, 0.58 GiB |
    | v6e-64 | 151,936, 2048 | 16,384 | 221 ms, 2.09 GiB | 77.2 ms, 0.73 GiB |

    A CPU's caches favour blocks of tokens.

    Args:
      platform: as sharding.platform() returns it.
      vocabulary: ids on a device.
      width: all of D.
    """
    small = vocabulary < _SMALL_VOCABULARY and width > _SMALL_WIDTH and 4 * vocabulary * width < _LARGE_GRADIENT_BYTES
    return platform == "tpu" and not small


def _form(
    head_VD: jax.Array, layout: Layout, width: int
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]:
    """The function that computes the loss and its gradients."""
    if layout.trains_head and by_vocabulary_on(sharding.platform(), len(head_VD) / layout.vocab_shards, width):
        return by_vocabulary.loss_and_gradients
    return by_tokens.loss_and_gradients


# By the hidden states, by the head, and an empty array of the head's dtype.
_Gradients = tuple[jax.Array, jax.Array | None, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _loss(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    layout: Layout,
    terms: Terms,
    softmax: Softmax,
) -> tuple[jax.Array, jax.Array]:
    """The loss and the first LossSums [4 or 5]."""

    def local(hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
        return by_tokens.loss_sums(hidden_BTD, head_VD, targets_BT, weights_BT, layout, terms, softmax)[None]

    tokens, head, per_shard = specs(layout)
    sums = on_shards(local, layout, (tokens, head, tokens, tokens), per_shard)(
        hidden_BTD, head_VD, targets_BT, weights_BT
    )
    sums = jnp.sum(sums, 0)
    return terms.total(sums), sums


def _loss_forward(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    layout: Layout,
    terms: Terms,
    softmax: Softmax,
) -> tuple[tuple[jax.Array, jax.Array], _Gradients]:
    form = _form(head_VD, layout, hidden_BTD.shape[-1])

    def local(
        hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        return form(hidden_BTD, head_VD, targets_BT, weights_BT, layout, terms, softmax)

    tokens, head, per_shard = specs(layout)
    sums, dhidden_BTD, dhead_VD = on_shards(
        local, layout, (tokens, head, tokens, tokens), (per_shard, tokens, head if layout.trains_head else None)
    )(hidden_BTD, head_VD, targets_BT, weights_BT)
    sums = jnp.sum(sums, 0)
    if layout.trains_head and sharding.platform() == "tpu":
        # XLA's TPU scheduler would reduce the head's gradient last and keep it whole until then.
        dhidden_BTD, dhead_VD = jax.lax.optimization_barrier((dhidden_BTD, dhead_VD))
    return (terms.total(sums), sums), (dhidden_BTD, dhead_VD, jnp.zeros(0, head_VD.dtype))


def _loss_backward(
    layout: Layout, terms: Terms, softmax: Softmax, gradients: _Gradients, upstream: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array | None, None, None]:
    del layout, terms, softmax
    dloss, _ = upstream  # the sums have no gradient
    dhidden_BTD, dhead_VD, like_head = gradients
    # In float32, rounded only at the end: dloss is the loss scale of a float16 run.
    dhidden = (dhidden_BTD.astype(dloss.dtype) * dloss).astype(dhidden_BTD.dtype)
    dhead = None if dhead_VD is None else (dhead_VD.astype(dloss.dtype) * dloss).astype(like_head.dtype)
    return dhidden, dhead, None, None


_loss.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _log_probabilities(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, layout: Layout, softmax: Softmax
) -> jax.Array:
    def local(hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        return by_tokens.token_log_probabilities(hidden_BTD, head_VD, targets_BT, layout, softmax)

    tokens, head, _ = specs(layout)
    return on_shards(local, layout, (tokens, head, tokens), tokens)(hidden_BTD, head_VD, targets_BT)


def _log_probabilities_forward(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, layout: Layout, softmax: Softmax
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    log_probabilities_BT = _log_probabilities(hidden_BTD, head_VD, targets_BT, layout, softmax)
    return log_probabilities_BT, (hidden_BTD, head_VD, targets_BT)


def _log_probabilities_backward(
    layout: Layout, softmax: Softmax, residuals: tuple[jax.Array, jax.Array, jax.Array], upstream_BT: jax.Array
) -> tuple[jax.Array, jax.Array | None, None]:
    _, (dhidden_BTD, dhead_VD, _) = _loss_forward(*residuals, -upstream_BT, layout, Terms(), softmax)
    return dhidden_BTD, None if dhead_VD is None else dhead_VD.astype(residuals[1].dtype), None


_log_probabilities.defvjp(_log_probabilities_forward, _log_probabilities_backward)
