"""What a distance rule sees of the nodes: their inner products.

Shape letters of this folder:
  N nodes, R candidates (the nodes, or what pre-aggregation made of them), P points: the candidates and, as the last one, the
  reference; S elements of a leaf, C coordinates of a block.

A weighted sum of points whose weights sum to 1 needs only their inner products to know its distance to each point, and these
can be taken about any centre. So a rule never sees a vector, and far-away means cost no precision.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST  # a TPU would round the factors to bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Points:
    """The candidates of an aggregation and the reference.

    Attributes:
      gram_PP: float32, inner products of the points about a common centre; rows and columns of masked candidates are 0.
      is_alive_R: bool, which candidates are not masked.
      faults: int32, how many of those may still be faulty.
      assumed_faults: how many may be faulty before any is masked; known when a program is compiled.
    """

    gram_PP: jax.Array
    is_alive_R: jax.Array
    faults: jax.Array
    assumed_faults: int

    @property
    def count(self) -> jax.Array:
        """Candidates that are not masked, int32."""
        return jnp.sum(self.is_alive_R, dtype=jnp.int32)

    @property
    def honest(self) -> jax.Array:
        """Candidates that are surely not faulty, int32: n - f."""
        return self.count - self.faults

    @property
    def gram_RR(self) -> jax.Array:
        """Inner products of the candidates alone."""
        return self.gram_PP[:-1, :-1]

    @property
    def squared_RR(self) -> jax.Array:
        """Squared distances between candidates; infinite where one is masked, 0 from each to itself."""
        squared = squared_distances(self.gram_RR)
        both = self.is_alive_R[:, None] & self.is_alive_R[None, :]
        return jnp.where(both, squared, jnp.inf)

    @property
    def from_reference_R(self) -> jax.Array:
        """Distances of the candidates from the reference; 0 for masked ones."""
        return jnp.where(self.is_alive_R, jnp.sqrt(squared_distances(self.gram_PP)[:-1, -1]), 0.0)

    def uniform(self, chosen_R: jax.Array) -> jax.Array:
        """Weights [P] that are equal on the chosen candidates, masked ones apart, and 0 elsewhere."""
        chosen_R = chosen_R & self.is_alive_R
        shares = chosen_R / jnp.maximum(jnp.sum(chosen_R), 1).astype(jnp.float32)
        return self.without_reference(shares)

    def without_reference(self, weights_R: jax.Array) -> jax.Array:
        """Weights [P] of the points from those of the candidates."""
        return jnp.append(weights_R.astype(jnp.float32), 0.0)

    def squared_from(self, weights_P: jax.Array) -> jax.Array:
        """Squared distances [P] of the points from a weighted sum of them; the weights sum to 1."""
        to_sum_P = matmul(self.gram_PP, weights_P)
        return jnp.maximum(jnp.diag(self.gram_PP) - 2 * to_sum_P + weights_P @ to_sum_P, 0.0)

    def mixed(self, mixing_QP: jax.Array, is_alive_R: jax.Array) -> Points:
        """The points that the rows of a matrix mix from these.

        Args:
          mixing_QP: float32; each row sums to 1, and the last one leaves the reference as it is.
          is_alive_R: which of the new candidates, the rows but the last, are not masked.
        """
        gram = matmul(matmul(mixing_QP, self.gram_PP), mixing_QP.T)
        return dataclasses.replace(self, gram_PP=gram, is_alive_R=is_alive_R)


def squared_distances(gram: jax.Array) -> jax.Array:
    """Squared distances between all points of a Gram matrix."""
    norms = jnp.diag(gram)
    return jnp.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """A float32 product that is float32 on every platform."""
    return jnp.matmul(a, b, precision=_EXACT, preferred_element_type=jnp.float32)


def ranks(keys: jax.Array) -> jax.Array:
    """The position, int32, that each key has when its row (the last axis) is sorted; the earlier of equal keys is first."""
    first, second = keys[..., :, None], keys[..., None, :]
    index = jnp.arange(keys.shape[-1])
    is_before = (second < first) | ((second == first) & (index[None, :] < index[:, None]))
    return jnp.sum(is_before, axis=-1, dtype=jnp.int32)
