"""Loss over a whole validation split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.core.types import Batch, Params, UserError
from capibara.kernels.cross_entropy import LossSums, cross_entropy
from capibara.models.api import Model
from capibara.sharding import Plan
from capibara.training.metrics import evaluation_metrics


class Judge(Protocol):
    """What else is told of a run's parameters after each evaluation, of some tasks: made elsewhere, given to the loop."""

    def prepare(self) -> None:
        """Before the first step: what can be wrong shows now."""

    def __call__(self, params: Params, tell: Callable[[str], None]) -> Iterable[tuple[str, Mapping[str, float]]]:
        """Each task with its metrics, on every process; `tell` is called often, alike on every process, and may raise."""


_AHEAD = 8  # batches that may wait on the devices at a time
EvalStep = Callable[[Params, Batch], tuple[LossSums, jax.Array]]


def make_eval_step(model: Model, plan: Plan, mesh: Mesh, token_bytes: np.ndarray) -> EvalStep:
    """(parameters, batch) -> (sums over its real tokens, UTF-8 bytes they stand for), jitted.

    Args:
      token_bytes: [vocabulary] bytes of each token id.
    """
    bytes_V = np.zeros(model.config.vocab_size, np.float32)
    bytes_V[: len(token_bytes)] = token_bytes

    def eval_step(params: Params, batch: Batch) -> tuple[LossSums, jax.Array]:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            batch = sharding.balanced(batch)
            hidden, _ = model.hidden(params, batch)
            head, cap = model.head(params), model.config.logit_soft_cap
            _, sums = cross_entropy(hidden, head, batch["targets"], batch["weights"], soft_cap=cap)
        return sums, jnp.sum(jnp.asarray(bytes_V)[batch["targets"]] * batch["weights"])

    return jax.jit(eval_step)


def evaluate(
    eval_step: EvalStep, params: Params, batches: Iterable[Batch], batch_sharding: NamedSharding
) -> dict[str, float]:
    """Runs over `batches` and returns loss, perplexity, bits_per_byte, token_accuracy and tokens.

    Raises:
      UserError: there is no batch.
    """
    return metrics_of(sums_of(eval_step, params, batches, batch_sharding))


def sums_of(
    eval_step: EvalStep, params: Params, batches: Iterable[Batch], batch_sharding: NamedSharding
) -> list[tuple[LossSums, jax.Array]]:
    """What the step gives of each batch, on the host.

    Raises:
      UserError: there is no batch.
    """
    results: list[tuple[LossSums, jax.Array]] = []
    for batch in batches:
        results.append(eval_step(params, sharding.global_batch(batch_sharding, batch)))
        if len(results) % _AHEAD == 0:
            jax.block_until_ready(results[-1])
    if not results:
        raise UserError("the validation split has no document: give it more text, or set Evaluation.every = 0")
    return jax.device_get(results)


def metrics_of(sums: list[tuple[LossSums, jax.Array]]) -> dict[str, float]:
    """The metrics of all batches together."""
    total, target_bytes = jax.tree.map(lambda *of_batches: sum(map(float, of_batches)), *sums)
    return evaluation_metrics(total, target_bytes)


def with_tasks(metrics: Mapping[str, float], judged: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Metrics with those of tasks under their names, "TASK/METRIC"; one that is there already becomes "TASK/judged/METRIC"."""
    joined = dict(metrics)
    for task, found in judged:
        for name, value in found.items():
            joined[f"{task}/judged/{name}" if f"{task}/{name}" in joined else f"{task}/{name}"] = value
    return joined
