"""Direct preference optimisation (DPO): prefers chosen to rejected answers, relative to a reference model.

The reference model has the initial weights of the run. Its log-probabilities are computed once, before the first step:

reference.train.npz, reference.validation.npz    in the run folder: log-probabilities [pairs, 2] of chosen and rejected
                                                 answers, with fingerprints of the data and of the weights
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
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
from capibara.config import configurable
from capibara.core import tree
from capibara.core.types import Batch, Params, UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import DataFormat
from capibara.models.api import Model, Stats
from capibara.multihost import hosts
from capibara.objectives.base import Metrics, Objective, Totals, log_probabilities
from capibara.objectives.batches import BatchProvider, RunParts
from capibara.objectives.loss import Loss
from capibara.sharding import Plan, RematPolicy
from capibara.storage import stores

_AHEAD = 8  # batches that may be queued on the devices
_TOLD_EVERY_S = 10.0
_T = TypeVar("_T")


class Kind(enum.StrEnum):
    """The loss of a pair, as a function of the margin h = log(pi / ref)(chosen) - log(pi / ref)(rejected).

    SIGMOID: -log sigmoid(beta * h), DPO (Rafailov et al. 2023, arXiv:2305.18290).
    HINGE: max(0, 1 - beta * h) (SLiC, Zhao et al. 2023, arXiv:2305.10425).
    IPO: (h - 1 / (2 * beta))**2, which bounds the margin also for deterministic preferences (Azar et al. 2023,
      arXiv:2310.12036). As in the paper, h is of sums over the tokens of an answer.
    IPO_MEAN: the same with means over the tokens, independent of their number: TRL's "ipo".
    ROBUST: as SIGMOID, but with label smoothing it is an unbiased estimate of the loss on pairs without flipped labels
      (Chowdhury et al. 2024, arXiv:2403.00409).
    """

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO = "ipo"
    IPO_MEAN = "ipo_mean"
    ROBUST = "robust"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo(Loss):
    """Trains on preference pairs; the reference model has the initial weights of the run.

    Attributes:
      kind: the loss of a pair.
      beta: strength of the constraint to the reference; with a larger one the model stays closer.
      label_smoothing: assumed fraction of pairs with flipped labels: the loss of the swapped pair is added with this
        weight (cDPO, Mitchell 2023), or subtracted by "robust". (TRL's "sigmoid", "hinge" and "ipo" ignore
        label_smoothing.)
      sft_weight: coefficient of the chosen answer's negative log-likelihood per token (Pang et al. 2024,
        arXiv:2404.19733); 0: none.
    """

    kind: Kind = Kind.SIGMOID
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    data_format = DataFormat.PREFERENCES
    means = (
        *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
        *("log_prob_chosen", "log_prob_rejected", "log_ratio", "nll_chosen"),
    )

    def __post_init__(self) -> None:
        if not 0 < self.beta < float("inf"):
            raise UserError(f"Dpo.beta is {self.beta}, must be above 0: try 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"Dpo.label_smoothing is {self.label_smoothing}, must be from 0 to below 0.5: try 0.1")
        if self.sft_weight < 0:
            raise UserError(f"Dpo.sft_weight is {self.sft_weight}, must be at least 0 (0: none)")

    def check(self, dataset: Dataset, batch_size: int) -> None:
        del batch_size
        if dataset.data_format is not DataFormat.PREFERENCES:
            raise UserError(
                f"Trainer.loss (@Dpo()) is for preference pairs, and Dataset.source holds {dataset.data_format}: set "
                "Dataset.source = @PreferenceJsonlSource(), or leave Trainer.loss out"
            )

    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, int], np.dtype]]:
        spec = dataset.batch_spec(rows)
        return {("reference" if key == "numbers" else key): value for key, value in spec.items()} | {
            "reference": ((rows, dataset.length), np.dtype(np.float32))
        }

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        def sums(
            params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            log_p_BT, stats = log_probabilities(model, params, batch, remat, step)
            loss, totals = self.totals(log_p_BT, batch, dataset.most_pairs)
            # The balancing loss of experts is a sum over tokens, the loss a sum over pairs.
            loss = loss + model.layer_loss(stats) * (totals.weight / jnp.maximum(totals.tokens, 1.0))
            return loss, jax.lax.stop_gradient(totals), stats

        def metrics(totals: Totals, weight: jax.Array) -> Metrics:
            return totals.means(weight) | {"pairs": totals.weight}

        return Objective(sums, metrics)

    def batch_provider(self, run: RunParts) -> ReferenceTables:
        return ReferenceTables(run, self.objective(run.model, run.dataset))

    def totals(self, log_p_BT: jax.Array, batch: Batch, pairs: int) -> tuple[jax.Array, Totals]:
        """The loss as a sum over pairs, and the metrics' sums.

        Args:
          log_p_BT: log-probability of every target.
          batch: with the entry `reference`, whose sum over an answer is the reference's log-probability of it.
          pairs: the largest number of pairs in a row.
        """
        weights_BT, segments_BT = batch["weights"], batch["segment_ids"]
        log_p_BK2, reference_BK2, tokens_BK2 = (
            answer_sums(x, segments_BT, pairs) for x in (log_p_BT * weights_BT, batch["reference"], weights_BT)
        )
        is_pair_BK = (jnp.min(tokens_BK2, axis=-1) > 0).astype(jnp.float32)
        ratio_BK2 = log_p_BK2 - reference_BK2
        gain_BK = ratio_BK2[..., 0] - ratio_BK2[..., 1]
        means_BK2 = ratio_BK2 / jnp.maximum(tokens_BK2, 1.0)
        of_loss_BK = means_BK2[..., 0] - means_BK2[..., 1] if self.kind is Kind.IPO_MEAN else gain_BK
        straight, turned = self._shares()
        nll_BK = -log_p_BK2[..., 0] / jnp.maximum(tokens_BK2[..., 0], 1.0)
        loss_BK = straight * self._loss(of_loss_BK) + self.sft_weight * nll_BK
        if turned:
            loss_BK = loss_BK + turned * self._loss(-of_loss_BK)
        values = {
            "loss": loss_BK,
            "reward_chosen": self.beta * ratio_BK2[..., 0],
            "reward_rejected": self.beta * ratio_BK2[..., 1],
            "reward_margin": self.beta * gain_BK,
            "reward_accuracy": (gain_BK > 0).astype(jnp.float32),
            "log_prob_chosen": log_p_BK2[..., 0],
            "log_prob_rejected": log_p_BK2[..., 1],
            "log_ratio": jnp.sum(ratio_BK2, axis=-1) / jnp.maximum(jnp.sum(tokens_BK2, axis=-1), 1.0),
            "nll_chosen": nll_BK,
        }
        summed = {name: jnp.sum(value * is_pair_BK) for name, value in values.items()}
        return summed["loss"], Totals(summed, jnp.sum(is_pair_BK), jnp.sum(tokens_BK2))

    def _shares(self) -> tuple[float, float]:
        """The weights of the loss of a pair and of the swapped pair."""
        turned = self.label_smoothing
        if self.kind is Kind.ROBUST:
            return (1 - turned) / (1 - 2 * turned), -turned / (1 - 2 * turned)
        return 1 - turned, turned

    def _loss(self, gain: jax.Array) -> jax.Array:
        match self.kind:
            case Kind.HINGE:
                return jax.nn.relu(1 - self.beta * gain)
            case Kind.IPO | Kind.IPO_MEAN:
                return jnp.square(gain - 1 / (2 * self.beta))
        return -jax.nn.log_sigmoid(self.beta * gain)


class ReferenceTables(BatchProvider):
    """Adds the reference's log-probabilities to the batches of preference pairs.

    A run that resumes reads them from its folder. If they are missing or of other data, they are computed again with the
    weights at `Trainer.init_from`, which must still be the initial weights of the run.

    Args:
      run: parts of a run on preference pairs.
      objective: the objective of its steps.
    """

    def __init__(self, run: RunParts, objective: Objective):
        self._run = run
        self._tables: dict[str, np.ndarray] = {}
        self._weights: str | None = None
        self._totals = make_totals(objective, run.plan, run.mesh)

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
            run.reporter.took("reference", time.perf_counter() - begin_s)

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        run = self._run
        return sharding.global_batch(run.batch_sharding, self._filled("train", next(run.batches)))

    def evaluate(self, params: Params) -> dict[str, float]:
        run = self._run
        with run.validation() as batches:
            filled = (self._filled("validation", batch) for batch in batches)
            found = list(_each(functools.partial(self._totals, params), filled, run.batch_sharding))
        if not found:
            raise UserError("the validation split has no preference pair: add data, or set Evaluation.every = 0")
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


def answer_sums(values_BT: jax.Array, segment_ids_BT: jax.Array, pairs: int) -> jax.Array:
    """Sums over each answer of a row, [B, pairs, 2]: chosen and rejected."""
    is_in = segment_ids_BT[..., None] == jnp.arange(1, 2 * pairs + 1, dtype=segment_ids_BT.dtype)
    sums = jnp.sum(jnp.where(is_in, values_BT[..., None], jnp.zeros((), values_BT.dtype)), axis=1)
    return sums.reshape(len(values_BT), pairs, 2)


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


def make_totals(objective: Objective, plan: Plan, mesh: Mesh) -> Callable[[Params, Batch], Totals]:
    """Makes a jitted function (params, batch) -> the sums of an objective's metrics over the batch."""

    def totals(params: Params, batch: Batch) -> Totals:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return objective.sums(params, batch, None, None)[1]

    return jax.jit(totals)


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


def _each(step: Callable[[Batch], _T], batches: Iterable[Batch], batch_sharding: NamedSharding) -> Iterator[_T]:
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


def _read(path: epath.Path, key: Mapping[str, Any]) -> np.ndarray | None:
    """The table of a file, if it exists and has this key; otherwise None."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:
            return file["table"] if json.loads(str(file["key"])) == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _write(path: epath.Path, key: Mapping[str, Any], table: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, table=table, key=np.array(json.dumps(key)))
    stores.of(path).make_folder(path.parent)
    stores.of(path).write_atomic(path, content.getvalue())
