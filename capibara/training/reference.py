"""What the model that a run begins from makes of its preference pairs: computed once, before the first step, and kept.

reference.train.npz, reference.validation.npz    in the run folder: log-probabilities [pairs, 2] of chosen and rejected
                                                 answers, with fingerprints of the data and of the weights
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core import tree
from capibara.core.multihost import hosts
from capibara.core.types import Batch, Params, UserError
from capibara.models.api import Model
from capibara.objectives.base import Objective, Supply, Totals, log_probabilities
from capibara.sharding import Plan
from capibara.storage import durable
from capibara.training import initialization
from capibara.training.loaders import open_loader, validation_loader
from capibara.training.setup import Run

_AHEAD = 8  # batches that may wait on the devices at a time
_TOLD_EVERY_S = 10.0


class ReferenceTables(Supply):
    """Fills the reference's log-probabilities into the batches of preference pairs.

    A run that resumes takes them from its folder. Where they are not there, or of other data, they are computed anew
    from `Trainer.init_from`, which must still hold the weights that the run began from.

    Args:
      run: of pairs.
      objective: what its steps minimise.
    """

    def __init__(self, run: Run, objective: Objective):
        self._run, self._tables = run, {}
        self._weights: str | None = None
        self._totals = make_totals(objective, run.trainer.plan, run.mesh)

    def begin(self, params: Params, step: int, saved: Mapping[str, Any] | None) -> None:
        if self._tables:
            return  # the run went back
        begin_s, run = time.perf_counter(), self._run
        self._weights = saved["weights"] if saved is not None else weights_fingerprint(params)
        try:
            first = functools.cache(lambda: params if step == 0 else self._first_params())
            for split in ("train", "validation") if run.trainer.evaluation.every else ("train",):
                key = {"weights": self._weights, "data": _data_fingerprint(run, split)}
                path = durable.folder_of(run.trainer.model_dir) / f"reference.{split}.npz"
                table = _read(path, key)
                if not all(hosts.gathered(table is not None)):
                    table = self._computed(split, first())
                    if jax.process_index() == 0:
                        _write(path, key, table)
                self._tables[split] = table
        finally:
            run.spent["reference"] = time.perf_counter() - begin_s

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        run = self._run
        return sharding.global_batch(run.batch_sharding, self._filled("train", next(run.batches)))

    def evaluate(self, params: Params) -> dict[str, float]:
        run = self._run
        with contextlib.closing(validation_loader(run.trainer, run.mesh)) as loader:
            filled = (self._filled("validation", batch) for batch in run.each_validation_batch(loader))
            found = list(_each(functools.partial(self._totals, params), filled, run.batch_sharding))
        if not found:
            raise UserError("the validation split has no preference pair: give it more, or set Evaluation.every = 0")
        sums = jax.tree.map(lambda *parts: float(np.sum(parts)), *found)
        return {name: value / max(sums.weight, 1.0) for name, value in sums.values.items()} | {
            "pairs": sums.weight,
            "tokens": sums.tokens,
        }

    def state(self) -> dict[str, Any]:
        return {"weights": self._weights}

    def _filled(self, split: str, batch: Batch) -> dict[str, np.ndarray]:
        numbers = batch["numbers"]
        known = self._tables[split].reshape(-1)
        reference = np.where(numbers > 0, known[np.maximum(numbers, 1) - 1], np.float32(0))
        return {key: value for key, value in batch.items() if key != "numbers"} | {"reference": reference}

    def _first_params(self) -> Params:
        """Those that the run began from."""
        params = first_params(self._run)
        if weights_fingerprint(params) != self._weights:
            raise UserError(
                f"Trainer.init_from ({self._run.trainer.init_from!r}) no longer holds the weights that this run began "
                "from, and their log-probabilities of its preference pairs are not in its folder: restore these weights, "
                "or set another MODEL_DIR for a new run"
            )
        return params

    def _computed(self, split: str, params: Params) -> np.ndarray:
        """Log-probabilities [pairs, 2] by the number of the pair; not a number for pairs that are in no row."""
        run = self._run
        dataset = dataclasses.replace(run.trainer.dataset, shuffle=False, workers=0)
        trainer = dataclasses.replace(run.trainer, dataset=dataset)
        table = np.full((len(dataset.source.open(split)), 2), np.nan, np.float32)
        known, told_s, done = table.reshape(-1), 0.0, 0
        step = functools.partial(make_answers(run.model, trainer.plan, run.mesh, dataset.most_pairs), params)
        rows = trainer.plan.batch_size // trainer.plan.accumulation
        with contextlib.closing(open_loader(trainer, run.mesh, split, rows, epochs=1)) as loader:
            for count, (numbers, sums) in enumerate(_each(step, loader, run.batch_sharding)):
                run.check(count, every=_AHEAD)
                known[numbers[numbers > 0] - 1] = sums[numbers > 0]
                if not np.isfinite(sums).all():
                    raise UserError(
                        f"the weights at Trainer.init_from ({run.trainer.init_from!r}) give preference pairs no finite "
                        "log-probability: begin from others, or set the model's dtype to 'bfloat16'"
                    )
                done += int((numbers > 0).sum()) // 2
                if time.monotonic() - told_s > _TOLD_EVERY_S:
                    told_s = time.monotonic()
                    run.status(f"reference log-probabilities: {done} of {len(table)} {split} pairs")
        run.status(f"reference log-probabilities: {done} of {len(table)} {split} pairs, the others are in no row")
        return table


def answer_sums(values_BT: jax.Array, segment_ids_BT: jax.Array, pairs: int) -> jax.Array:
    """Sums over each answer of a row: [B, pairs, 2] of chosen and rejected ones."""
    is_in = segment_ids_BT[..., None] == jnp.arange(1, 2 * pairs + 1, dtype=segment_ids_BT.dtype)
    sums = jnp.sum(jnp.where(is_in, values_BT[..., None], jnp.zeros((), values_BT.dtype)), axis=1)
    return sums.reshape(len(values_BT), pairs, 2)


def first_params(run: Run) -> Params:
    """The parameters that a run began from, made again: of adapters those without effect."""
    trainer = run.trainer
    read = initialization.reader_again(trainer, run.load)
    loaded = None if trainer.init_from is None else initialization.load_params(trainer, run.model, run.mesh, read)
    return run.init(jax.random.key(trainer.seed), given=loaded).params


def weights_fingerprint(params: Params) -> str:
    """Equal for equal weights, however they lie on a mesh."""
    sums = weighed(jax.tree.leaves(params))
    names = "".join(f"{name} " for name in tree.path_names(params))
    return hashlib.blake2b(names.encode() + np.asarray(sums).tobytes(), digest_size=8).hexdigest()


@jax.jit
def weighed(arrays: list[jax.Array]) -> jax.Array:
    """The sum of each array's words, each by its place, modulo 2**32: uint32 [arrays]."""
    return jnp.stack(list(map(_weighed, arrays)))


def _weighed(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize < 2 or "int4" in x.dtype.name or x.dtype == jnp.bool_:
        words = x.astype(jnp.int32).astype(jnp.uint32)
    else:
        words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


def make_totals(objective: Objective, plan: Plan, mesh: Mesh) -> Callable[[Params, Batch], Totals]:
    """(params, batch) -> the sums of an objective's metrics over the batch, jitted."""

    def totals(params: Params, batch: Batch) -> Totals:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return objective.sums(params, batch, None, None)[1]

    return jax.jit(totals)


def make_answers(
    model: Model, plan: Plan, mesh: Mesh, pairs: int
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """(params, batch) -> of every answer of the batch its number and its log-probability, whole on every process; jitted.

    Args:
      model: gives hidden states and head.
      plan, mesh: how parameters and batch lie.
      pairs: most pairs in a row.
    """

    def answers(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            batch = sharding.balanced(batch)
            log_p_BT, _ = log_probabilities(model, params, batch)
            of_each = functools.partial(answer_sums, segment_ids_BT=batch["segment_ids"], pairs=pairs)
            return of_each(batch["numbers"]), of_each(log_p_BT * batch["weights"])

    return jax.jit(answers, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _each(step: Any, batches: Iterable[Batch], batch_sharding: NamedSharding) -> Iterator[Any]:
    """What `step` makes of each batch, on the host; some batches ahead on the devices."""
    pending = []
    for batch in batches:
        pending.append(step(sharding.global_batch(batch_sharding, batch)))
        if len(pending) == _AHEAD:
            yield jax.device_get(pending.pop(0))
    yield from jax.device_get(pending)


def _data_fingerprint(run: Run, split: str) -> dict[str, Any]:
    """Of the pairs and of what decides their tokens, and which are in a row."""
    dataset = run.trainer.dataset
    return {
        "documents": dataset.source.open(split).fingerprint(),
        "vocabulary": dataset.get_vocabulary().fingerprint(),
        "length": dataset.length,
    }


def _read(path: Any, key: Mapping[str, Any]) -> np.ndarray | None:
    """The table of a file, if it is there and of this key."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:
            return file["table"] if json.loads(str(file["key"])) == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _write(path: Any, key: Mapping[str, Any], table: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, table=table, key=np.array(json.dumps(key)))
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write(path, content.getvalue())
