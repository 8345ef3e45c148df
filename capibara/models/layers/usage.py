"""What each expert does for the tokens that it gets: sums over tokens that a model adds to its layers' statistics.

Shape letters: d domains, with unknown ones first; E experts; P numbers of a sketch.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

SKETCH = 32
"""Numbers that an expert's mean output is projected to: distances are kept to about 1 / sqrt(SKETCH)."""
PREFIX = "usage/"

_domains: contextvars.ContextVar[int | None] = contextvars.ContextVar("domains", default=None)


@contextlib.contextmanager
def measured(domains: int = 0) -> Iterator[None]:
    """A context for tracing in which every mixture of experts adds `sums` to its statistics, their names after PREFIX.

    Args:
      domains: number of the batch's domains, without unknown ones.
    """
    token = _domains.set(domains)
    try:
        yield
    finally:
        _domains.reset(token)


def domains() -> int | None:
    """The number of domains that are measured; None: nothing is."""
    return _domains.get()


@dataclasses.dataclass(frozen=True)
class Rank:
    """The choices of one rank: each token's best expert, its second best, ...

    Attributes:
      experts: [B, T] int32; the number of experts for none.
      gates: [B, T] float32 weights in the sum of the experts' outputs.
      outputs: [B, T, D] unweighted outputs, 0 where there is no expert.
    """

    experts: jax.Array
    gates: jax.Array
    outputs: jax.Array


def sums(
    ranks: Sequence[Rank], num_experts: int, real_BT: jax.Array, domains_BT: jax.Array | None, domains: int
) -> dict[str, jax.Array]:
    """Sums over real tokens, in float32; they can be added over rows.

    Args:
      ranks: the tokens' choices.
      num_experts: E.
      real_BT: bool; padding is not counted.
      domains_BT: int32 domain of each token, counted from 1; 0 and above `domains`: unknown. None: all are unknown.
      domains: d - 1.

    Returns:
      tokens: [d].
      routed: [d, E] choices.
      gates, norms, activations: [d, E] of the chosen: gates, norms of unweighted outputs, and gates times norms
        (router-weighted expert activation; REAP, Lasby et al. 2025, arXiv:2510.13999).
      outputs: [E, P] random projections of the unweighted outputs.
      pairs: [E, E] tokens that chose both.
    """
    domains_BT = jnp.zeros(real_BT.shape, jnp.int32) if domains_BT is None else domains_BT
    known_BT = jnp.where(domains_BT <= domains, domains_BT, 0)
    of_domain_BTd = ((known_BT[..., None] == jnp.arange(domains + 1)) & real_BT[..., None]).astype(jnp.float32)
    chosen = [((rank.experts[..., None] == jnp.arange(num_experts)) & real_BT[..., None]) for rank in ranks]
    chosen = [item.astype(jnp.float32) for item in chosen]
    result = {"tokens": jnp.sum(of_domain_BTd, (0, 1))}
    with jax.default_matmul_precision("highest"):
        outputs = [rank.outputs.astype(jnp.float32) for rank in ranks]
        norms = [jnp.sqrt(jnp.sum(jnp.square(y_BTD), -1)) for y_BTD in outputs]
        values = {
            "routed": [jnp.ones_like(norm) for norm in norms],
            "gates": [rank.gates for rank in ranks],
            "norms": norms,
            "activations": [rank.gates * norm for rank, norm in zip(ranks, norms, strict=True)],
        }
        for name, of_ranks in values.items():
            parts = [
                jnp.einsum("BTd,BTE->dE", of_domain_BTd, item_BTE * value_BT[..., None])
                for item_BTE, value_BT in zip(chosen, of_ranks, strict=True)
            ]
            result[name] = sum(parts[1:], parts[0])
        sketch_DP = jnp.asarray(_sketch(outputs[0].shape[-1]))
        projected = [
            jnp.einsum("BTE,BTP->EP", item_BTE, y_BTD @ sketch_DP)
            for item_BTE, y_BTD in zip(chosen, outputs, strict=True)
        ]
        every_BTE = sum(chosen[1:], chosen[0])
        result["outputs"] = sum(projected[1:], projected[0])
        result["pairs"] = jnp.einsum("BTE,BTF->EF", every_BTE, every_BTE)
    return {PREFIX + name: value for name, value in result.items()}


def _sketch(width: int) -> np.ndarray:
    """A random projection that keeps distances in expectation (Johnson and Lindenstrauss)."""
    draw = np.random.default_rng(0)
    return draw.standard_normal((width, SKETCH), np.float32) / np.float32(np.sqrt(SKETCH))
