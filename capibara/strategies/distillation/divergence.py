"""Divergences between the next-token distributions of a student and a teacher.

B: rows, T: positions, t: those of a block, V: vocabulary, K: the teacher's most probable tokens, C: K and the rest, or V.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.kernels.cross_entropy.terms import Softmax
from capibara.models.api import Model

_BLOCK = 128  # positions whose logits exist at a time
_LARGEST_LOG_P = -1e-6  # of all K tokens together: at 0 the rest has no probability, and its logarithm is infinite


def generalized_jsd(teacher_C: jax.Array, student_C: jax.Array, beta: float) -> jax.Array:
    """The divergence of two distributions, [...], from their log-probabilities [..., C].

    With 0 it is KL(teacher || student), with 1 KL(student || teacher), between them the generalised Jensen-Shannon divergence
    beta * KL(teacher || m) + (1 - beta) * KL(student || m) with m = beta * teacher + (1 - beta) * student (Agarwal et al. 2024,
    arXiv:2306.13649, equation 1).
    """
    if beta == 0:
        return _kl(teacher_C, student_C)
    if beta == 1:
        return _kl(student_C, teacher_C)
    mixture_C = jnp.logaddexp(teacher_C + math.log(beta), student_C + math.log1p(-beta))
    return beta * _kl(teacher_C, mixture_C) + (1 - beta) * _kl(student_C, mixture_C)


def _kl(log_p_C: jax.Array, log_q_C: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_p_C) * (log_p_C - log_q_C), axis=-1)


def with_rest(log_p_K: jax.Array) -> jax.Array:
    """Log-probabilities [..., K + 1]: those of some tokens, and that of all others together."""
    together = jnp.minimum(jax.nn.logsumexp(log_p_K, axis=-1, keepdims=True), _LARGEST_LOG_P)
    return jnp.concatenate([log_p_K, jnp.log(-jnp.expm1(together))], axis=-1)


def block_length(length: int) -> int:
    """The number of positions of a block, which divides that of a row; all of them where a context axis has parts of a row."""
    current = sharding.active()
    block = math.gcd(length, _BLOCK)
    return length if block < 16 or (current and current[0].shape["context"] > 1) else block


def blocks(x_BT: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] as [T / size, B, size, ...]."""
    B, T = x_BT.shape[:2]
    return jnp.moveaxis(x_BT.reshape(B, T // size, size, *x_BT.shape[2:]), 1, 0)


class TeacherLogProbs(NamedTuple):
    """What a teacher expects next at each position.

    Attributes:
      log_p_BTC: log-probabilities of next tokens, float32: of all, or of the K most probable ones in descending order.
      ids_BTK: the ids of these tokens, int32; None: all.
    """

    log_p_BTC: jax.Array
    ids_BTK: jax.Array | None


def logits_of(hidden_BtD: jax.Array, head_VD: jax.Array, model: Model, vocab_size: int) -> jax.Array:
    """Logits [B, t, V] in float32 of the first `vocab_size` ids, capped as the model caps them."""
    logits = jnp.einsum("btd,vd->btv", hidden_BtD, head_VD.astype(hidden_BtD.dtype), preferred_element_type=jnp.float32)
    return Softmax(model.config.logit_soft_cap).inputs(logits)[..., :vocab_size]


def log_probs_of(logits_BtV: jax.Array, temperature: float, top_k: int | None) -> TeacherLogProbs:
    """The distributions of a teacher at a temperature."""
    log_p_BtV = jax.nn.log_softmax(logits_BtV / temperature)
    return TeacherLogProbs(log_p_BtV, None) if top_k is None else TeacherLogProbs(*jax.lax.top_k(log_p_BtV, top_k))


class TokenTerms(NamedTuple):
    """Of each position, [B, t].

    Attributes:
      divergence: of student and teacher, in nats.
      nll: negative log-likelihood of the target at temperature 1, in nats.
      agreement: 1 if the most probable token of both is the same, else 0.
    """

    divergence: jax.Array
    nll: jax.Array
    agreement: jax.Array


def token_terms(
    logits_BtV: jax.Array, targets_Bt: jax.Array, teacher: TeacherLogProbs, temperature: float, beta: float
) -> TokenTerms:
    """Compares a student's logits with what the teacher says."""
    log_q_BtV = jax.nn.log_softmax(logits_BtV)
    at_temperature = log_q_BtV if temperature == 1 else jax.nn.log_softmax(logits_BtV / temperature)
    teacher_C, best = teacher.log_p_BTC, jnp.argmax(teacher.log_p_BTC, axis=-1)
    if teacher.ids_BTK is None:
        student_C = at_temperature
    else:
        teacher_C = with_rest(teacher_C)
        student_C = with_rest(jnp.take_along_axis(at_temperature, teacher.ids_BTK, axis=-1))
        best = teacher.ids_BTK[..., 0]
    nll = -jnp.take_along_axis(log_q_BtV, targets_Bt[..., None], axis=-1)[..., 0]
    agreement = (jnp.argmax(logits_BtV, axis=-1) == best).astype(jnp.float32)
    return TokenTerms(generalized_jsd(teacher_C, student_C, beta), nll, agreement)
