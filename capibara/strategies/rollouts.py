"""Rollouts: the batch provider of GRPO, which turns prompts into batches of the model's own answers with advantages."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Batch, Params, UserError
from capibara.data.dataset import Dataset
from capibara.inference.engine.core import reads_whole
from capibara.inference.engine.engine import check_generates
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import Model
from capibara.objectives.base import DrawnFrom, log_probabilities
from capibara.objectives.batches import BatchProvider, RunParts
from capibara.objectives.reference import weights_fingerprint
from capibara.sharding import Plan
from capibara.strategies.answering import Answer, Answerer, Answering, name_of, prompts_of


class RollingOut(Answering, Protocol):
    """Options of rollouts: a `grpo.Grpo`."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def group(self) -> int: ...
    @property
    def updates(self) -> int: ...
    @property
    def kl(self) -> float: ...
    @property
    def entries(self) -> tuple[str, ...]: ...

    def advantages(self, rewards: np.ndarray) -> np.ndarray: ...

    def drawn_from(self, model: Model, dataset: Dataset) -> DrawnFrom: ...


class Rollouts(BatchProvider):
    """Answers prompts with the current parameters, and makes the step's batch from the answers.

    With several processes, each reads all prompts and answers its part of them; all then have the same batch, of which
    each uses its rows.

    Args:
      run: parts of a run on prompts.
      grpo: options of generation, rewards and loss.
    """

    def __init__(self, run: RunParts, grpo: RollingOut):
        check_generates(run.model)
        if reads_whole(run.model):
            raise UserError(
                "DecoderConfig.inputs_attention is 'bidirectional': GRPO trains on rows without marks of their inputs; set "
                "it to 'causal'"
            )
        self._run, self._grpo, self._answerer = run, grpo, Answerer(run, grpo)
        self._step = 0  # the current step
        self._rows: dict[str, np.ndarray] = {}  # rows of its answers; empty: no rollout yet
        self._reference: Params | None = None  # trained parameters of the reference
        self._weights: str | None = None
        self._told: list[dict[str, float]] = []
        drawn_from = grpo.drawn_from(run.model, run.dataset)
        self._log_p = make_log_probabilities(run.model, run.plan, run.mesh, **drawn_from)

    def begin(self, params: Params, step: int, saved: Mapping[str, Any] | None) -> None:
        rows = (saved or {}).get("rows") or {}
        self._step = step
        self._rows = {name: _array(value, self._run.dataset.length) for name, value in rows.items()}
        if step % self._grpo.updates and not {*self._grpo.entries} <= self._rows.keys():
            raise UserError(
                f"Grpo.updates ({self._grpo.updates}) or Grpo.kl ({self._grpo.kl}) was changed within the rollout of step "
                f"{step}: set both back until a step that Grpo.updates divides"
            )
        if not self._grpo.kl or self._reference is not None:
            return
        begin_s, run = time.perf_counter(), self._run
        if step:
            run.reporter.status("reading the initial weights of the run, its reference")
        first = jax.tree.map(jnp.copy, params) if step == 0 else run.initial_params()
        self._weights = weights_fingerprint(first)
        if saved is not None and saved["weights"] not in (None, self._weights):
            raise UserError(
                f"Trainer.init_from ({run.init_from!r}) no longer has the initial weights of this run, its reference: "
                "restore them, set Grpo.kl = 0, or set another MODEL_DIR for a new run"
            )
        self._reference = run.model.trained(first)
        run.reporter.took("reference", time.perf_counter() - begin_s)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"weights": self._weights}
        if self._step % self._grpo.updates:  # the parameters that generated these answers are gone
            state["rows"] = {name: _packed(value) for name, value in self._rows.items()}
        return state

    def takes_long(self, step: int) -> bool:
        return (step - 1) % self._grpo.updates == 0

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        if self.takes_long(step):
            self._rows = self._rolled_out(step, params)
        self._step = step
        return sharding.global_batch(self._run.batch_sharding, {k: self._own(v) for k, v in self._rows.items()})

    def evaluate(self, params: Params) -> dict[str, float]:
        run, answers = self._run, []
        greedy = dataclasses.replace(self._grpo.sampling, temperature=0.0)
        with run.validation() as batches:
            self._answerer.load(params)
            for number, batch in enumerate(batches, 1):
                answers += self._answerer.answers(
                    "validation", prompts_of(batch), lambda row: [greedy], f"evaluating, batch {number}"
                )
        if not answers:
            raise UserError("the validation split has no prompt: add data, or set Evaluation.every = 0")
        told = self._summary(np.array([[answer.reward] for (answer,) in answers]), [one for (one,) in answers])
        del told["reward_std"], told["groups_without_signal"]
        return {"loss": -told["reward"], **told, "answers": float(len(answers))}

    def metrics(self) -> dict[str, float]:
        told, self._told = self._told, []
        return {name: sum(one[name] for one in told) / len(told) for name in (told[0] if told else ())}

    def _rolled_out(self, step: int, params: Params) -> dict[str, np.ndarray]:
        """The whole batch of a step, on the host."""
        grpo, seed = self._grpo, self._run.seed
        self._answerer.load(params)

        def samplings(row: int) -> list[Sampling]:
            own = (_seed(seed, step, row, sample) for sample in range(grpo.group))
            return [dataclasses.replace(grpo.sampling, seed=one) for one in own]

        prompts = prompts_of(next(self._run.batches))
        groups = self._answerer.answers("train", prompts, samplings, f"rollout for step {step}")
        rewards = np.array([[answer.reward for answer in group] for group in groups])
        answers = [answer for group in groups for answer in group]
        self._told.append(self._summary(rewards, answers))
        rows = self._laid_out(answers, grpo.advantages(rewards).reshape(-1))
        if "old" in grpo.entries:
            rows["old"] = self._log_p_of(params, rows)
        if "reference" in grpo.entries:
            reference = tree.joined(self._reference, self._run.model.frozen(params))
            rows["reference"] = self._log_p_of(reference, rows)
        return rows

    def _summary(self, rewards: np.ndarray, answers: Sequence[Answer]) -> dict[str, float]:
        """Metrics of rewards [prompts, group] and their answers."""
        told = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "groups_without_signal": float(np.mean(np.ptp(rewards, axis=1) == 0)),
            "answer_length": float(np.mean([len(answer.tokens) for answer in answers])),
            "answers_cut_off": float(np.mean([answer.truncated for answer in answers])),
        }
        if len(self._grpo.rewards) > 1:
            parts = np.mean([answer.parts for answer in answers], axis=0)
            told |= {f"reward_{name_of(one)}": float(part) for one, part in zip(self._grpo.rewards, parts)}
        return told

    def _laid_out(self, answers: Sequence[Answer], advantages: np.ndarray) -> dict[str, np.ndarray]:
        """Makes a row of each prompt and answer."""
        dataset = self._run.dataset
        rows = {key: value for key, value in dataset.empty_batch(len(answers)).items() if key != "numbers"}
        rows |= {name: np.zeros((len(answers), dataset.length), np.float32) for name in ("advantages", "drawn")}
        for row, (answer, advantage) in enumerate(zip(answers, advantages, strict=True)):
            ids, first = np.array([*answer.prompt, *answer.tokens], np.int32), len(answer.prompt) - 1
            end = len(ids) - 1
            rows["tokens"][row, :end], rows["targets"][row, :end] = ids[:-1], ids[1:]
            rows["weights"][row, first:end], rows["advantages"][row, first:end] = 1.0, advantage
            rows["drawn"][row, first:end] = answer.drawn
            rows["segment_ids"][row, :end], rows["positions"][row, :end] = 1, np.arange(end)
        return rows

    def _log_p_of(self, params: Params, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """The log-probabilities of the answers' tokens, 0 elsewhere; in batches of a step's size."""
        names, parts = self._run.dataset.batch_spec(1).keys() - {"numbers"}, self._run.plan.micro_batches
        found = np.zeros_like(rows["weights"])
        for part in range(parts):
            self._run.reporter.check(part)
            batch = {name: self._own(rows[name][part::parts]) for name in names}
            found[part::parts] = self._log_p(params, sharding.global_batch(self._run.batch_sharding, batch))
        return np.where(rows["weights"] > 0, found, np.float32(0))

    def _own(self, rows: np.ndarray) -> np.ndarray:
        """This process's part of all rows."""
        index, count = self._share
        return rows[index * len(rows) // count : (index + 1) * len(rows) // count]

    @functools.cached_property
    def _share(self) -> tuple[int, int]:
        shards = sharding.host_shards(self._run.mesh, self._run.plan.rules)
        return shards[jax.process_index()], max(shards) + 1


def make_log_probabilities(
    model: Model, plan: Plan, mesh: Mesh, *, temperature: float = 1.0, usable: int | None = None
) -> Callable[[Params, Batch], jax.Array]:
    """Makes a jitted function (params, batch) -> the log-probability of every target [B, T], on every process.

    `temperature`, `usable`: the distribution of the targets, as in `log_probabilities`.
    """

    def log_p(params: Params, batch: Batch) -> jax.Array:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            batch = sharding.balanced(batch)
            found, _ = log_probabilities(model, params, batch, temperature=temperature, usable=usable)
        return found[:, np.argsort(batch["row_positions"])] if "row_positions" in batch else found

    return jax.jit(log_p, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _seed(*numbers: int) -> int:
    """32 bits that depend on all of the numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _packed(rows: np.ndarray) -> dict[str, Any]:
    """Rows as JSON values, without the zeros at their ends."""
    return {
        "dtype": str(rows.dtype),
        "rows": [np.trim_zeros(row, "b").tolist() for row in rows],
    }


def _array(packed: Mapping[str, Any], length: int) -> np.ndarray:
    rows = np.zeros((len(packed["rows"]), length), packed["dtype"])
    for row, values in zip(rows, packed["rows"], strict=True):
        row[: len(values)] = values
    return rows
