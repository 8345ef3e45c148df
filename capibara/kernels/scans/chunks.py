"""Cuts rows into chunks, and follows how a state decays within and between them.

A state belongs to one document: what a token adds to it is forgotten where the next document of a packed row begins.
Shape letters: B rows, T tokens, n chunks, C tokens of a chunk, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Decays(NamedTuple):
    """Factors of a state S with S_t = exp(d_t) S_(t-1) + u_t, for each chunk; 0 across documents.

    Attributes:
      within: [n, B, H, C, C], of what token j adds to the state that token i reads; 0 where j comes after i.
      into: [n, B, H, C], of the chunk's initial state in that of token i.
      out: [n, B, H, C], of what token j adds to the chunk's final state.
      whole: [n, B, H], of the initial state in the final one.
    """

    within: jax.Array
    into: jax.Array
    out: jax.Array
    whole: jax.Array


def cut(x: jax.Array, size: int) -> jax.Array:
    """[B, T, H, ...] -> [n, B, H, C, ...]; the last chunk is filled with zeros."""
    B, T = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -T % size), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(B, -1, size, *x.shape[2:])
    return jnp.moveaxis(jnp.swapaxes(x, 0, 1), 2, 3)


def joined(x: jax.Array, length: int) -> jax.Array:
    """The way back, without what filled the last chunk: [n, B, H, C, ...] -> [B, T, H, ...]."""
    x = jnp.swapaxes(jnp.moveaxis(x, 3, 2), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def decays(log_decay_BTH: jax.Array, segment_ids_BT: jax.Array | None, size: int) -> Decays:
    """The decays of chunks of `size` tokens; segment_ids None: each row is one document."""
    log_nBHC = cut(log_decay_BTH, size)
    total_nBHC = jnp.cumsum(log_nBHC, axis=-1)
    causal_CC = jnp.tril(jnp.ones((size, size), bool))
    # Sums of the tokens after j up to i: differences of sums from the chunk's beginning would cancel after strong decays.
    after_CC = jnp.tril(jnp.ones((size, size), bool), -1)
    sums = jnp.cumsum(jnp.where(after_CC, log_nBHC[..., :, None], 0), axis=-2)
    # Exponents are masked before exp: above the diagonal their gradient would be no number.
    exponent = jnp.where(causal_CC, sums, -jnp.inf)
    within, into = jnp.exp(exponent), jnp.exp(total_nBHC)
    out, whole = within[..., -1, :], jnp.exp(total_nBHC[..., -1])
    if segment_ids_BT is None:
        return Decays(within, into, out, whole)
    same = documents(segment_ids_BT, size)
    return Decays(
        jnp.where(same.within[:, :, None], within, 0),
        jnp.where(same.into[:, :, None], into, 0),
        jnp.where(same.out[:, :, None], out, 0),
        jnp.where(same.whole[..., None], whole, 0),
    )


class Documents(NamedTuple):
    """Whether two places of a chunk are in one document.

    Attributes:
      within: [n, B, C, C], tokens i and j.
      into, out: [n, B, C], a token and the end of the chunk before, and the chunk's own end.
      whole: [n, B], the two ends.
    """

    within: jax.Array
    into: jax.Array
    out: jax.Array
    whole: jax.Array


def documents(segment_ids_BT: jax.Array, size: int) -> Documents:
    """The documents of chunks of `size` tokens."""
    T = segment_ids_BT.shape[1]
    ids = jnp.pad(segment_ids_BT, ((0, 0), (0, -T % size)), mode="edge")
    ids_nBC = jnp.swapaxes(ids.reshape(ids.shape[0], -1, size), 0, 1)
    last_nB1 = ids_nBC[..., -1:]
    before_nB1 = jnp.concatenate([ids_nBC[:1, :, :1], last_nB1[:-1]])
    return Documents(
        ids_nBC[..., :, None] == ids_nBC[..., None, :],
        ids_nBC == before_nB1,
        ids_nBC == last_nB1,
        (last_nB1 == before_nB1)[..., 0],
    )


def begins(segment_ids_BT: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """[B, T], whether a token is the first of a document that begins within its row; None: no document does."""
    first = jnp.zeros(shape, bool)
    if segment_ids_BT is None:
        return first
    return first.at[:, 1:].set(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1])


def one_after_another(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The decay and the addition of two spans of tokens, for an associative scan."""
    return first[0] * second[0], first[1] * second[0] + second[1]


def over(
    step: Callable[[jax.Array, tuple], tuple[jax.Array, jax.Array]], state: jax.Array, chunks: tuple
) -> tuple[jax.Array, jax.Array]:
    """Scans over chunks: (final state, results [n, ...]). A single chunk needs no loop."""
    if jax.tree.leaves(chunks)[0].shape[0] > 1:
        return jax.lax.scan(step, state, chunks)
    state, y = step(state, jax.tree.map(lambda x: x[0], chunks))
    return state, y[None]
