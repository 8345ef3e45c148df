"""Runs a model over data and sums what each of its experts does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from capibara import sharding
from capibara.core.types import Batch, HostBatch, Params, UserError
from capibara.interop.experts import statistics
from capibara.interop.experts.statistics import Statistics
from capibara.models.api import Model, Stats, TransformerConfig, usage
from capibara.sharding import Plan


def check(config: TransformerConfig, model: str) -> None:
    """Raises UserError if a model has no experts that tokens choose; `model` is its path."""
    if config.moe is None:
        raise UserError(
            f"{model} has no experts, its layers have MLPs: `capibara experts upcycle` makes experts of them"
        )
    if config.moe.routing != "token_choice":
        raise UserError(
            f"{model} has Moe.routing = {str(config.moe.routing)!r}, must be 'token_choice': statistics are those of tokens that "
            "choose experts"
        )
    if config.moe.hash_layers:
        raise UserError(
            f"{model} has Moe.hash_layers = {config.moe.hash_layers}, must be 0: statistics are those of tokens that choose experts"
        )


def make_sums(model: Model, plan: Plan, mesh: Mesh, domains: int) -> Callable[[Params, Batch], Stats]:
    """A jitted function: (parameters, batch) -> what models.layers.usage sums, of each layer with experts."""

    def sums(params: Params, batch: Batch) -> Stats:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)), usage.measured(domains):
            _, stats = model.hidden(params, sharding.balanced(batch))
        return {name: value for name, value in stats.items() if name.startswith(usage.PREFIX)}

    return jax.jit(sums)


def measure(
    model: Model,
    params: Params,
    batches: Iterable[HostBatch],
    plan: Plan,
    mesh: Mesh,
    *,
    path: str,
    domains: Sequence[str] = (),
    show: Callable[[int], None] = lambda batch: None,
) -> Statistics:
    """How a model uses its experts on data; the same on every mesh, up to rounding.

    Args:
      model: with experts that tokens choose.
      params: its parameters, on the mesh.
      batches: rows [B, T] with `tokens`, `positions`, `segment_ids` and optionally `domains`.
      plan, mesh: how the rows lie on the devices.
      path: of the model, for the statistics and for errors.
      domains: names of the batches' domains, from number 1.
      show: reports the number of each batch.

    Raises:
      UserError: the model has no such experts, or there is no text.
    """
    check(model.config, path)
    step = make_sums(model, plan, mesh, len(domains))
    placed, total = sharding.batch_sharding(mesh, plan.rules), dict[str, np.ndarray]()
    for number, batch in enumerate(batches, 1):
        show(number)
        for name, value in jax.device_get(step(params, sharding.global_batch(placed, batch))).items():
            name = name.removeprefix(usage.PREFIX)
            total[name] = total.get(name, 0.0) + np.asarray(value, np.float64)
    if not total:
        raise UserError(f"the data for {path} has no text: name a file with some, --data=texts.jsonl")
    return statistics.of_sums(total, path, model.config, domains)
