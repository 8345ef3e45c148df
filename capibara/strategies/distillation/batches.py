"""The batch provider of a distillation: draws answers where they are not given, and asks the teacher."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from capibara import sharding
from capibara.core.types import HostBatch, Params, UserError
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.sampling.seeds import draw_seed
from capibara.models.api import Model
from capibara.multihost import hosts
from capibara.objectives.base import Objective
from capibara.objectives.batches import BatchProvider, RunParts, make_totals
from capibara.strategies.distillation.stored import StoredReader
from capibara.strategies.distillation.teacher import Teacher, make_teacher
from capibara.strategies.generating import Generating, Generator, Prompt, tokens_of
from capibara.strategies.rows import text_rows


class Distilling(Generating, Protocol):
    """Options of the batches: a `loss.Distillation`."""

    @property
    def teacher(self) -> Teacher | None: ...
    @property
    def stored(self) -> str | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def on_policy(self) -> float: ...
    @property
    def teacher_draws(self) -> bool: ...
    @property
    def sampling(self) -> Sampling: ...

    def vocab_size(self, model: Model) -> int: ...


class TeacherBatches(BatchProvider):
    """Batches with the teacher's log-probabilities, of given answers or of answers that are drawn for a step.

    Args:
      run: parts of the run.
      options: of the distillation.
      objective: of its steps.
    """

    def __init__(self, run: RunParts, options: Distilling, objective: Objective):
        self._run, self._options, self._objective = run, options, objective
        self._totals = make_totals(objective, run.plan, run.mesh)
        self._stored = None if options.stored is None else StoredReader(options.stored)
        self._student = Generator(run, options) if options.on_policy else None
        self._teacher: Generator | None = None
        self._params: Params | None = None  # of the teacher
        self._drawn: list[float] = []  # 1: the batch's answers were drawn by the student

    def begin(self, params: Params, step: int, saved: Mapping[str, object] | None) -> None:
        options, run = self._options, self._run
        if options.teacher is None or self._params is not None:
            return
        begin_s = time.perf_counter()
        run.reporter.status(f"reading the teacher, {options.teacher.path}")
        model, self._params = run.load_model(options.teacher.path, options.teacher.model)
        self._log_probs = make_teacher(
            model, run.plan, run.mesh, run.batch_sharding, vocab_size=options.vocab_size(run.model),
            temperature=options.temperature, top_k=options.top_k,
        )  # fmt: skip
        if options.teacher_draws:
            self._teacher = Generator(run, options, model)
            self._teacher.load(self._params)
        run.reporter.timed("teacher", time.perf_counter() - begin_s)

    def takes_long(self, step: int) -> bool:
        return self._generator(step) is not None

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        rows, generator = next(self._run.batches), self._generator(step)
        if self._student is not None:
            self._drawn.append(float(generator is self._student))
        if generator is not None:
            if generator is self._student:
                generator.load(params)
            rows = self._with_drawn_answers(generator, rows, step)
        return self._with_teacher(rows)

    def evaluate(self, params: Params) -> dict[str, float]:
        """On the given answers, whatever training draws."""
        total = None
        with self._run.validation() as batches:
            for batch in batches:
                sums = jax.device_get(self._totals(params, self._with_teacher(batch)))
                total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
        if total is None:
            raise UserError("the validation split has no document: add data, or set Evaluation.every = 0")
        return {name: float(value) for name, value in self._objective.metrics(total, max(total.weight, 1.0)).items()}

    def state(self) -> dict[str, Any]:
        return {}

    def metrics(self) -> dict[str, float]:
        drawn, self._drawn = self._drawn, []
        return {"on_policy": sum(drawn) / len(drawn)} if drawn else {}

    def _with_teacher(self, rows: HostBatch) -> dict[str, jax.Array]:
        """The global batch with the teacher's log-probabilities."""
        if self._stored is not None:
            return sharding.global_batch(self._run.batch_sharding, self._stored.filled(rows))
        assert self._params is not None, "the teacher is read before the first batch"
        batch = sharding.global_batch(self._run.batch_sharding, rows)
        return batch | self._log_probs(self._params, batch)

    def _generator(self, step: int) -> Generator | None:
        """Who draws the answers of a step; None: they are given. Alike on all processes, and after an interruption."""
        share = draw_seed(self._run.seed, step, "on_policy") / 2**32
        return self._student if share < self._options.on_policy else self._teacher

    def _with_drawn_answers(self, generator: Generator, rows: HostBatch, step: int) -> dict[str, np.ndarray]:
        """This process's rows with answers that are drawn in the place of those given."""
        first = self._first_row(len(rows["tokens"]))
        prompts = [Prompt(first + row, 0, ids) for row, ids in _prompts(rows)]
        everyone = {row: Prompt(row, 0, ids) for part in hosts.gathered(prompts) for row, _, ids in part}
        length = self._run.dataset.length
        asked = [item for item in everyone.values() if len(item.ids) < length]

        def samplings(row: int) -> list[Sampling]:
            most = min(self._options.sampling.max_new_tokens, length - len(everyone[row].ids))
            seed = draw_seed(self._run.seed, step, row)
            return [dataclasses.replace(self._options.sampling, max_new_tokens=most, seed=seed)]

        streams = generator.streams(generator.share(asked), samplings, f"answers for step {step}")
        answers: dict[int, list[int]] = {}
        mine = lambda: [(item.row, tokens_of(streams[item.row][0].result())[0]) for item in hosts.share(asked)]  # noqa: E731
        for part in hosts.each(mine):
            answers |= dict(part)
        drawn = [(prompt.row - first, answers[prompt.row]) for prompt in prompts if prompt.row in answers]
        texts = [[(everyone[first + row].ids, answer)] for row, answer in drawn]
        at, replaced = [row for row, _ in drawn], {name: value.copy() for name, value in rows.items()}
        for name, value in text_rows(texts, self._run.dataset).items():
            replaced[name][at] = value
        return replaced

    def _first_row(self, rows: int) -> int:
        """The number of this process's first row in the global batch."""
        return sharding.host_shards(self._run.mesh, self._run.plan.rules)[jax.process_index()] * rows


def _prompts(rows: HostBatch) -> list[tuple[int, list[int]]]:
    """Rows, and their tokens up to the first with loss."""
    pairs = []
    for row, weights_T in enumerate(rows["weights"]):
        if (weights_T > 0).any():
            pairs.append((row, rows["tokens"][row, : int(np.argmax(weights_T > 0)) + 1].tolist()))
    return pairs
