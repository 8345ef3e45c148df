"""Evaluation between two steps: the loss over the validation split, metrics of tasks, and sample texts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.core.interrupt import Interrupted
from capibara.core.types import Batch, HostBatch, Params, UserError
from capibara.data.pipeline.loader import unigram_bits_per_byte
from capibara.kernels.cross_entropy.dispatch import cross_entropy
from capibara.kernels.cross_entropy.terms import LossSums
from capibara.models.api import Model, Stats
from capibara.multihost import hosts
from capibara.objectives.batches import BatchProvider, Reporter
from capibara.sharding import Plan
from capibara.training.base.callbacks import Callback
from capibara.training.feed import each_task, open_loader, validation_batches, validation_loader
from capibara.training.metrics import evaluation_metrics
from capibara.training.trainer import Trainer

_AHEAD = 8  # batches that may be queued on the devices
_ASK_EVERY = 8  # batches between two exchanges of whether to stop, with several hosts
EvalSums = tuple[LossSums, jax.Array, Stats]
EvalStep = Callable[[Params, Batch], EvalSums]
LayerMetrics = Callable[[Stats], Mapping[str, jax.Array]]
Sampler = Callable[[Params], Iterable[tuple[str, str]]]  # parameters -> (prompt, text) pairs


class Judge(Protocol):
    """Computes metrics of tasks after each evaluation; implemented in capibara.evaluation and passed to the loop."""

    def prepare(self) -> None:
        """Called before the first step; raises early if the tasks have errors."""

    def __call__(self, params: Params, tell: Callable[[str], None]) -> Iterable[tuple[str, Mapping[str, float]]]:
        """Yields each task with its metrics, on every process.

        It calls `tell` often, equally often on every process; `tell` may raise.
        """


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates the parameters of a run between two steps and calls its callbacks.

    Attributes:
      trainer, mesh: of the run.
      eval_step: from `make_eval_step`.
      batch_sharding: of every array of a batch.
      reporter, callbacks: of the loop.
      provider: its `evaluate` replaces the loss of the validation split, if the loss has a provider.
      sampler: generates texts after each evaluation.
      judge: computes metrics of tasks, which are added to those of the evaluation.
      layer_metrics: of the model.
    """

    trainer: Trainer
    mesh: Mesh
    eval_step: EvalStep
    batch_sharding: NamedSharding
    reporter: Reporter
    callbacks: Callback = Callback()
    provider: BatchProvider | None = None
    sampler: Sampler | None = None
    judge: Judge | None = None
    layer_metrics: LayerMetrics = lambda stats: {}

    def prepare(self) -> None:
        """Called before the first step; raises early if the judge's tasks have errors."""
        if self.judge is not None:
            self.judge.prepare()

    def due(self, step: int, first_step: int, owed: bool, last: bool) -> bool:
        """Whether to evaluate after `step`: every `Evaluation.every` steps, and pretrained weights before the first step.

        Args:
          step: completed steps.
          first_step: completed steps at this start.
          owed: the previous start stopped before the evaluation of `first_step`.
          last: no step follows.
        """
        is_pretrained = step == 0 and self.trainer.init_from is not None
        return (step > first_step or is_pretrained or owed) and is_due(step, self.trainer.evaluation.every, last)

    def evaluate(self, step: int, params: Params) -> float | None:
        """Evaluates, judges and samples; returns the loss, or None if the run must stop before that."""
        loss = None
        with contextlib.suppress(Interrupted):
            metrics = self.metrics(params)
            if self.judge is not None:
                metrics = with_tasks(metrics, self.judge(params, self._telling()))
            loss = metrics["loss"]
            self.callbacks.on_evaluate(step, metrics)
            self._sample(step, params)
        self.reporter.progress("")
        if loss is None:
            self.reporter.status(f"step {step}: the evaluation is postponed until the run resumes")
        return loss

    def metrics(self, params: Params) -> dict[str, float]:
        """Metrics over the validation split, with the unigram baseline if it is configured; raises Interrupted.

        For a SeqIO mixture also the metrics of each task, as "TASK/METRIC".
        """
        if self.provider is not None:
            return self.provider.evaluate(params)
        sums = {}
        for task, trainer in each_task(self.trainer).items():
            with validation(trainer, self.mesh, self.reporter) as batches:
                sums[task] = sums_of(self.eval_step, params, batches, self.batch_sharding)
        metrics = metrics_of([item for of_task in sums.values() for item in of_task], self.layer_metrics)
        if len(sums) > 1:
            of_tasks = ((task, metrics_of(of_task, self.layer_metrics)) for task, of_task in sums.items())
            metrics = with_tasks(metrics, of_tasks)
        if self.trainer.evaluation.unigram_batches:
            metrics["unigram_bits_per_byte"] = self._unigram_bits_per_byte
        return metrics

    def _sample(self, step: int, params: Params) -> None:
        samples = iter(self.sampler(params)) if self.sampler else iter(())
        for done in itertools.count():
            self.reporter.check(done)
            self.reporter.progress(f"sampling: {done} texts")
            if (sample := next(samples, None)) is None:
                break
            self.callbacks.on_sample(step, *sample)

    def _telling(self) -> Callable[[str], None]:
        """A function for a judge that shows its progress, and raises Interrupted if the run must stop."""
        done = itertools.count()

        def tell(text: str) -> None:
            self.reporter.check(next(done), every=_ASK_EVERY)
            self.reporter.progress(text)

        return tell

    @functools.cached_property
    def _unigram_bits_per_byte(self) -> float:
        trainer, most = self.trainer, self.trainer.evaluation.unigram_batches
        seen = open_loader(trainer, self.mesh, "train", trainer.plan.batch_size)
        with contextlib.closing(seen), contextlib.closing(validation_loader(trainer, self.mesh)) as unseen:
            return unigram_bits_per_byte(
                _reported(seen, most, "counting tokens for the unigram model", self.reporter),
                _reported(unseen, validation_batches(trainer), "evaluating the unigram model", self.reporter),
                trainer.dataset.get_vocabulary().token_bytes(),
                self._of_all_hosts,
            )

    def _of_all_hosts(self, counts: np.ndarray) -> np.ndarray:
        """The sum over all shards of the batches; all processes call it."""
        shards = sharding.host_shards(self.mesh, self.trainer.plan.rules)
        result = hosts.gathered(counts.tolist())
        return np.sum([result[shards.index(shard)] for shard in set(shards)], axis=0)


def is_due(step: int, every: int, last: bool = False) -> bool:
    """Whether `step` is a multiple of `every`, or the last step; False if `every` is 0."""
    return every > 0 and (step % every == 0 or last)


@contextlib.contextmanager
def validation(trainer: Trainer, mesh: Mesh, reporter: Reporter) -> Iterator[Iterator[HostBatch]]:
    """Opens the batches of one evaluation and reports each; iterating raises Interrupted if the run must stop."""
    with contextlib.closing(validation_loader(trainer, mesh)) as loader:
        yield _reported(loader, validation_batches(trainer), "evaluating", reporter)


def _reported(batches: Iterable[HostBatch], most: int | None, subject: str, reporter: Reporter) -> Iterator[HostBatch]:
    for done, batch in enumerate(itertools.islice(batches, most)):
        reporter.check(done, every=_ASK_EVERY)
        reporter.progress(f"{subject}: {done} batches" if most is None else f"{subject}: {done} of {most} batches")
        yield batch


def make_eval_step(model: Model, plan: Plan, mesh: Mesh, token_bytes: np.ndarray) -> EvalStep:
    """Makes a jitted function: (parameters, batch) -> sums over its real tokens, their UTF-8 bytes, statistics of layers.

    Args:
      model, plan, mesh: of the run.
      token_bytes: [vocabulary] number of bytes of each token id.
    """
    bytes_V = np.zeros(model.config.vocab_size, np.float32)
    bytes_V[: len(token_bytes)] = token_bytes

    def eval_step(params: Params, batch: Batch) -> EvalSums:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            batch = sharding.balanced(batch)
            hidden, stats = model.hidden(params, batch)
            head, cap = model.head(params), model.config.logit_soft_cap
            _, sums = cross_entropy(hidden, head, batch["targets"], batch["weights"], soft_cap=cap)
        return sums, jnp.sum(jnp.asarray(bytes_V)[batch["targets"]] * batch["weights"]), stats

    return jax.jit(eval_step)


def evaluate(
    eval_step: EvalStep, params: Params, batches: Iterable[HostBatch], batch_sharding: NamedSharding
) -> dict[str, float]:
    """Runs over `batches` and returns loss, perplexity, bits_per_byte, token_accuracy and tokens.

    Raises:
      UserError: there is no batch.
    """
    return metrics_of(sums_of(eval_step, params, batches, batch_sharding))


def sums_of(
    eval_step: EvalStep, params: Params, batches: Iterable[HostBatch], batch_sharding: NamedSharding
) -> list[EvalSums]:
    """The results of the evaluation step for each batch, on the host.

    Raises:
      UserError: there is no batch.
    """
    results: list[EvalSums] = []
    for batch in batches:
        results.append(eval_step(params, sharding.global_batch(batch_sharding, batch)))
        if len(results) % _AHEAD == 0:
            jax.block_until_ready(results[-1])
    if not results:
        raise UserError("the validation split has no document: add text, or set Evaluation.every = 0")
    return jax.device_get(results)


def metrics_of(sums: list[EvalSums], layer_metrics: LayerMetrics = lambda stats: {}) -> dict[str, float]:
    """The metrics of all batches together, with those of the layers that are numbers: a domain may have no tokens."""
    total, target_bytes, stats = jax.tree.map(
        lambda *of_batches: np.sum(np.array(of_batches, np.float64), axis=0), *sums
    )
    of_layers = {name: float(value) for name, value in layer_metrics(stats).items()}
    of_layers = {name: value for name, value in of_layers.items() if not math.isnan(value)}
    return {**evaluation_metrics(total, float(target_bytes)), **of_layers}


def with_tasks(metrics: Mapping[str, float], judged: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Adds the metrics of tasks as "TASK/METRIC", or as "TASK/judged/METRIC" if that name is taken."""
    joined = dict(metrics)
    for task, result in judged:
        for name, value in result.items():
            joined[f"{task}/judged/{name}" if f"{task}/{name}" in joined else f"{task}/{name}"] = value
    return joined
