"""Several merges in one round: each makes a model of the nodes' models, and the next one is their weighted mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from capibara.consensus.aggregation import Report
from capibara.core.types import Params
from capibara.strategies.consensus.agreement import Combine, along, distances_from

# (share, model): what takes part besides, whatever the nodes have sent.
Standing = tuple[jax.Array, Params]


def combining(merges: Mapping[str, tuple[float, Combine]], standing: Sequence[Standing] = ()) -> Combine:
    """Makes a merge of several: (models [nodes, ...], agreed model, key) -> (mean of their models, report), traceable.

    The merges are made in their order, so that a node which one of them masks has no part in those after it: the one that masks
    most comes first. The report's weights are those of the first merge that has any, its spare faults those of the last.

    Args:
      merges: (share, merge) by name; the shares are not negative, and one is positive.
      standing: models that take part with a share of their own, such as the soup.
    """
    used = [(share, merge) for share, merge in merges.values() if share > 0]

    def combine(sent: Params, agreed: Params, key: jax.Array | None) -> tuple[Params, Report]:
        created, is_masked, left = [], jnp.zeros(len(jax.tree.leaves(sent)[0]), bool), sent
        for share, merge in used:
            model, report = merge(left, agreed, key)
            created.append((share, model, report))
            is_masked |= report.is_masked
            # What is not finite has no part in the next merge.
            left = jax.tree.map(lambda x, masked=is_masked: jnp.where(along(~masked, x), x, jnp.nan), left)
        parts = [(jnp.float32(share), model) for share, model, _ in created] + list(standing)
        total = sum(share for share, _ in parts)

        def mean(like: jax.Array, *models: jax.Array) -> jax.Array:
            sums = sum(share * x.astype(jnp.float32) for (share, _), x in zip(parts, models, strict=True))
            return (sums / total).astype(like.dtype)

        mixed = jax.tree.map(mean, agreed, *(model for _, model in parts))
        reports = [report for *_, report in created]
        return mixed, Report(
            is_masked=is_masked,
            spare_faults=reports[-1].spare_faults,
            distances=distances_from(mixed, sent, is_masked),
            weights=next((report.weights for report in reports if report.weights is not None), None),
        )

    return combine
