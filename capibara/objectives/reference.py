"""Losses that compare the model with a reference model, which has the initial weights of the run.

Its log-probabilities are computed once, before the first step:

reference.train.npz, reference.validation.npz    in the run folder: log-probabilities [pairs, 2] of both answers of each
                                                 pair, with fingerprints of the data and of the weights
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Batch, HostBatch, Params, UserError
from capibara.data.dataset import Dataset
from capibara.models.api import Model
from capibara.multihost import hosts
from capibara.objectives.base import Objective, log_probabilities
from capibara.objectives.batches import BatchProvider, RunParts, make_totals
from capibara.objectives.pairs import PairLoss, answer_sums
from capibara.sharding import Plan
from capibara.storage import stores

_AHEAD = 8  # batches that may be queued on the devices
_TOLD_EVERY_S = 10.0
_T = TypeVar("_T")


class ReferenceLoss(PairLoss):
    """A loss whose batches have the entry `reference`: its sum over an answer is the reference's log-probability of it."""

    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        spec = dataset.batch_spec(rows)
        return {("reference" if key == "numbers" else key): value for key, value in spec.items()} | {
            "reference": ((rows, dataset.length), np.dtype(np.float32))
        }

    def batch_provider(self, run: RunParts) -> ReferenceTables:
        return ReferenceTables(run, self.objective(run.model, run.dataset))


class ReferenceTables(BatchProvider):
    """Adds the reference's log-probabilities to batches of pairs.

    A run that resumes reads them from its folder. If they are missing or of other data, they are computed again with the
    weights at `Trainer.init_from`, which must still be the initial weights of the run.

    Args:
      run: parts of a run on pairs.
      objective: the objective of its steps.
    """

    def __init__(self, run: RunParts, objective: Objective):
        self._run = run
        self._tables: dict[str, np.ndarray] = {}
        self._weights: str | None = None
        self._objective, self._totals = objective, make_totals(objective, run.plan, run.mesh)

    def begin(self, params: Params, step: int, saved: Mapping[str, Any] | None) -> None:
        if self._tables:
            return  # after a roll-back
        begin_s, run = time.perf_counter(), self._run
        self._weights = saved["weights"] if saved is not None else weights_fingerprint(params)
        try:
            first = functools.cache(lambda: params if step == 0 else self._first_params())
            for split in ("train", "validation") if run.evaluates else ("train",):
                key = {"weights": self._weights, "data": _data_fingerprint(run.dataset, split)}
                path = stores.folder_of(run.model_dir) / f"reference.{split}.npz"
                table = _read(path, key)
                known = hosts.gathered(table is not None)  # a collective: all processes call it
                if table is None or not all(known):
                    table = self._computed(split, first())
                    if jax.process_index() == 0:
                        _write(path, key, table)
                self._tables[split] = table
        finally:
            run.reporter.timed("reference", time.perf_counter() - begin_s)

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        run = self._run
        return sharding.global_batch(run.batch_sharding, self._filled("train", next(run.batches)))

    def evaluate(self, params: Params) -> dict[str, float]:
        run = self._run
        with run.validation() as batches:
            filled = (self._filled("validation", batch) for batch in batches)
            result = list(_each(functools.partial(self._totals, params), filled, run.batch_sharding))
        if not result:
            raise UserError("the validation split has no answer: add data, or set Evaluation.every = 0")
        sums = jax.tree.map(lambda *parts: float(np.sum(parts)), *result)
        return {name: float(value) for name, value in self._objective.metrics(sums, max(sums.weight, 1.0)).items()}

    def state(self) -> dict[str, Any]:
        return {"weights": self._weights}

    def _filled(self, split: str, batch: HostBatch) -> dict[str, np.ndarray]:
        numbers = batch["numbers"]
        known = self._tables[split].reshape(-1)
        reference = np.where(numbers > 0, known[np.maximum(numbers, 1) - 1], np.float32(0))
        return {key: value for key, value in batch.items() if key != "numbers"} | {"reference": reference}

    def _first_params(self) -> Params:
        """The initial weights of the run."""
        params = self._run.initial_params()
        if weights_fingerprint(params) != self._weights:
            raise UserError(
                f"Trainer.init_from ({self._run.init_from!r}) no longer has the initial weights of this run, and the "
                "reference's log-probabilities are not in its folder: restore these weights, or set another MODEL_DIR for "
                "a new run"
            )
        return params

    def _computed(self, split: str, params: Params) -> np.ndarray:
        """Log-probabilities [pairs, 2] by the number of the pair; NaN for pairs that are in no row."""
        run = self._run
        dataset = dataclasses.replace(run.dataset, shuffle=False, workers=0)
        table = np.full((len(dataset.documents(split)), 2), np.nan, np.float32)
        known, told_s, done = table.reshape(-1), 0.0, 0
        step = functools.partial(make_answers(run.model, run.plan, run.mesh, dataset.most_pairs), params)
        rows = run.plan.batch_size // run.plan.micro_batches
        with contextlib.closing(run.open_once(dataset, split, rows)) as loader:
            for count, (numbers, sums) in enumerate(_each(step, loader, run.batch_sharding)):
                run.reporter.check(count, every=_AHEAD)
                known[numbers[numbers > 0] - 1] = sums[numbers > 0]
                if not np.isfinite(sums).all():
                    raise UserError(
                        f"the log-probability of preference pairs with the weights at Trainer.init_from ({run.init_from!r}) "
                        "is not finite: start from others, or set the model's dtype to 'bfloat16'"
                    )
                done += int((numbers > 0).sum()) // 2
                if time.monotonic() - told_s > _TOLD_EVERY_S:
                    told_s = time.monotonic()
                    run.reporter.status(f"reference log-probabilities: {done} of {len(table)} {split} pairs")
        run.reporter.status(
            f"reference log-probabilities: {done} of {len(table)} {split} pairs, the others are in no row"
        )
        return table


def weights_fingerprint(params: Params) -> str:
    """A fingerprint that is equal for equal weights, with any sharding."""
    sums = weighed(jax.tree.leaves(params))
    names = "".join(f"{name} " for name in tree.path_names(params))
    return hashlib.blake2b(names.encode() + np.asarray(sums).tobytes(), digest_size=8).hexdigest()


@jax.jit
def weighed(arrays: list[jax.Array]) -> jax.Array:
    """The sum of each array's 32-bit words, weighted by their index, modulo 2**32: uint32 [arrays]."""
    return jnp.stack(list(map(_weighed, arrays)))


def _weighed(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize < 2 or "int4" in x.dtype.name or x.dtype == jnp.bool_:
        words = x.astype(jnp.int32).astype(jnp.uint32)
    else:
        words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    index = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(x.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)


def make_answers(
    model: Model, plan: Plan, mesh: Mesh, pairs: int
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """Makes a jitted function (params, batch) -> (number, log-probability) of every answer, replicated on all processes.

    Args:
      model: the model.
      plan, mesh: shardings of parameters and batch.
      pairs: the largest number of pairs in a row.
    """

    def answers(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            batch = sharding.balanced(batch)
            log_p_BT, _ = log_probabilities(model, params, batch)
            of_each = functools.partial(answer_sums, segment_ids_BT=batch["segment_ids"], pairs=pairs)
            return of_each(batch["numbers"]), of_each(log_p_BT * batch["weights"])

    return jax.jit(answers, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _each(step: Callable[[Batch], _T], batches: Iterable[HostBatch], batch_sharding: NamedSharding) -> Iterator[_T]:
    """The results of `step` for each batch, on the host; some batches are queued on the devices."""
    pending = []
    for batch in batches:
        pending.append(step(sharding.global_batch(batch_sharding, batch)))
        if len(pending) == _AHEAD:
            yield jax.device_get(pending.pop(0))
    yield from jax.device_get(pending)


def _data_fingerprint(dataset: Dataset, split: str) -> dict[str, Any]:
    """Identifies the pairs, and the settings that decide their tokens and which of them are in a row."""
    return {
        "documents": dataset.documents(split).fingerprint(),
        "vocabulary": dataset.get_vocabulary().fingerprint(),
        "length": dataset.length,
    }


def _read(path: epath.Path, key: Mapping[str, object]) -> np.ndarray | None:
    """The table of a file, if it exists and has this key; otherwise None."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:
            return file["table"] if json.loads(str(file["key"])) == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _write(path: epath.Path, key: Mapping[str, object], table: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, table=table, key=np.array(json.dumps(key)))
    stores.of(path).make_folder(path.parent)
    stores.of(path).write_atomic(path, content.getvalue())
