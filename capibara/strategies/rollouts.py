"""Rollouts: the batch provider of GRPO, which turns prompts into batches of the model's own answers with advantages."""

from __future__ import annotations

import dataclasses
import functools
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
from capibara.models.api import Model
from capibara.objectives.base import DrawnFrom, log_probabilities_of, values_of
from capibara.objectives.batches import BatchProvider, ReadAhead, RunParts
from capibara.objectives.reference import weights_fingerprint
from capibara.sharding import Plan
from capibara.strategies.ahead import AheadDrawer
from capibara.strategies.answering import Answer, prompts_of
from capibara.strategies.drawer import Drawer, DrawOptions
from capibara.strategies.policy.advantages import KlIn
from capibara.strategies.rewards.reward_sum import name_of


class RollingOut(DrawOptions, Protocol):
    """Options of rollouts: a `grpo.Grpo`."""

    @property
    def kl(self) -> float: ...
    @property
    def kl_in(self) -> KlIn: ...
    @property
    def reads_values(self) -> bool: ...
    @property
    def entries(self) -> tuple[str, ...]: ...

    def shaped(self, rewards_PG: np.ndarray, parts_PGK: np.ndarray) -> np.ndarray: ...

    def penalties(self, lengths_PG: np.ndarray, truncated_PG: np.ndarray) -> dict[str, np.ndarray]: ...

    def rows(
        self, groups: Sequence[Sequence[Answer]], rewards_PG: np.ndarray, dataset: Dataset
    ) -> dict[str, np.ndarray]: ...

    def estimates(self, rewards_PG: np.ndarray, rows: Mapping[str, np.ndarray], kl: float) -> dict[str, np.ndarray]: ...

    def next_kl(self, kl: float, divergence: float, answers: int) -> float: ...

    def drawing(self, dataset: Dataset) -> Dataset: ...

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
        self._run, self._grpo = run, grpo
        drawing = dataclasses.replace(run, dataset=grpo.drawing(run.dataset))
        self._drawer = AheadDrawer(drawing, grpo) if grpo.rollout_devices else Drawer(drawing, grpo)
        self._step = 0  # the current step
        self._rows: dict[str, np.ndarray] = {}  # rows of its answers; empty: no rollout yet
        self._reference: Params | None = None  # trained parameters of the reference
        self._weights: str | None = None
        self._reported: list[dict[str, float]] = []
        self._kl = grpo.kl  # its current coefficient
        drawn_from = grpo.drawn_from(run.model, run.dataset)
        self._log_p = make_log_probabilities(run.model, run.plan, run.mesh, **drawn_from)

    def begin(self, params: Params, step: int, saved: Mapping[str, Any] | None) -> None:
        rows = (saved or {}).get("rows") or {}
        self._step, self._kl = step, (saved or {}).get("kl", self._grpo.kl)
        self._rows = {name: _array(value, self._run.dataset.length) for name, value in rows.items()}
        self._drawer.begin(step)
        count = self._run.plan.batch_size * self._grpo.mini_batches
        if self._within(step) and not (
            {*self._grpo.entries} <= self._rows.keys() and len(self._rows["weights"]) == count
        ):
            name = type(self._grpo).__name__
            raise UserError(
                f"{name}.updates, mini_batches ({self._grpo.mini_batches}) or the use of a reference was changed within the "
                f"rollout of step {step}: set them back until a step that {self._grpo.steps_of_rollout} divides"
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
                "restore them, or set another MODEL_DIR for a new run"
            )
        self._reference = run.model.trained(first)
        run.reporter.timed("reference", time.perf_counter() - begin_s)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"weights": self._weights}
        if self._kl != self._grpo.kl:  # a controller changed it
            state["kl"] = self._kl
        if self._within(self._step):  # the parameters that generated these answers are gone
            state["rows"] = {name: _packed(value) for name, value in self._rows.items()}
        return state

    def takes_long(self, step: int) -> bool:
        return not self._within(step - 1)

    def _within(self, step: int) -> bool:
        """Whether the answers of this step are used again."""
        return step % self._grpo.steps_of_rollout > 0

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        if self.takes_long(step):
            self._rows = self._rolled_out(step, params)
        self._step, size = step, self._run.plan.batch_size
        first = (step - 1) % self._grpo.steps_of_rollout % self._grpo.mini_batches * size
        rows = {name: self._local_rows(value[first : first + size]) for name, value in self._rows.items()}
        return sharding.global_batch(self._run.batch_sharding, rows)

    def evaluate(self, params: Params) -> dict[str, float]:
        run, answers = self._run, []
        greedy = dataclasses.replace(self._grpo.sampling, temperature=0.0)
        with run.validation() as batches, self._drawer.evaluating(params):
            for number, batch in enumerate(batches, 1):
                answers += self._drawer.answerer.answers(
                    "validation", prompts_of(batch), lambda row: [greedy], f"evaluating, batch {number}"
                )
        if not answers:
            raise UserError("the validation split has no prompt: add data, or set Evaluation.every = 0")
        totals = self._summary(np.array([[answer.reward] for (answer,) in answers]), [item for (item,) in answers])
        del totals["reward_std"], totals["groups_without_signal"]
        return {"loss": -totals["reward"], **totals, "answers": float(len(answers))}

    def metrics(self) -> dict[str, float]:
        totals, self._reported = self._reported, []
        means = {name: sum(item[name] for item in totals) / len(totals) for name in (totals[0] if totals else ())}
        return means | self._drawer.metrics()

    @property
    def read_ahead(self) -> ReadAhead | None:
        return self._drawer.read_ahead

    def close(self) -> None:
        self._drawer.close()

    def _rolled_out(self, step: int, params: Params) -> dict[str, np.ndarray]:
        """The rows of a rollout, on the host."""
        grpo = self._grpo
        groups, drawn, _ = self._drawer.draw(step, params)
        answers = [answer for group in groups for answer in group]
        rewards, lengths = _numbers(groups, lambda item: item.reward), _numbers(groups, lambda item: len(item.tokens))
        totals = self._summary(rewards, answers)
        if grpo.resample:
            totals["groups_drawn"] = float(drawn)
        shaped = grpo.shaped(rewards, _numbers(groups, lambda item: item.parts))
        for name, penalty_PG in grpo.penalties(lengths, _numbers(groups, lambda item: item.truncated)).items():
            shaped, totals[name] = shaped + penalty_PG, float(penalty_PG.mean())
        rows = grpo.rows(groups, shaped, self._run.dataset)
        rows |= self._references(params, rows)
        rows |= grpo.estimates(shaped, rows, self._kl)
        if grpo.kl and grpo.kl_in is not KlIn.LOSS:
            divergence = float((rows["old"] - rows["reference"]).sum())
            totals |= {"kl": divergence / max(float(rows["weights"].sum()), 1.0), "kl_coefficient": self._kl}
            self._kl = grpo.next_kl(self._kl, divergence / len(answers), len(answers))
        self._reported.append(totals)
        return {name: value for name, value in rows.items() if name in self._names}

    @functools.cached_property
    def _names(self) -> set[str]:
        return {*self._run.dataset.batch_spec(1)} - {"numbers"} | {*self._grpo.entries}

    def _references(self, params: Params, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Log-probabilities of the answers under the current policy and under the reference, where they count.

        The current one wrote them, unless they were drawn ahead: importance weights then are from it to that one.
        """
        grpo, further = self._grpo, {}
        in_reward = bool(grpo.kl) and grpo.kl_in is not KlIn.LOSS
        if "old" in grpo.entries or in_reward or grpo.reads_values:
            further["old"], values = self._log_p_of(params, rows)
            if grpo.reads_values:
                further["values"] = values
        if "reference" in grpo.entries or in_reward:
            reference = tree.joined(self._reference, self._run.model.frozen(params))
            further["reference"], _ = self._log_p_of(reference, rows)
        return further

    def _summary(self, rewards: np.ndarray, answers: Sequence[Answer]) -> dict[str, float]:
        """Metrics of rewards [prompts, group] and their answers."""
        totals = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "groups_without_signal": float(np.mean(np.ptp(rewards, axis=1) == 0)),
            "answer_length": float(np.mean([len(answer.tokens) for answer in answers])),
            "answers_cut_off": float(np.mean([answer.truncated for answer in answers])),
        }
        if memories := [len(item.tokens) for answer in answers for item in answer.earlier]:
            totals["memory_length"] = float(np.mean(memories))
        if len(self._grpo.rewards) > 1:
            parts = np.mean([answer.parts for answer in answers], axis=0)
            totals |= {f"reward_{name_of(item)}": float(part) for item, part in zip(self._grpo.rewards, parts)}
        return totals

    def _log_p_of(self, params: Params, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The log-probabilities of the answers' tokens and the values before them, 0 elsewhere; in batches of a step's size."""
        names = self._run.dataset.batch_spec(1).keys() - {"numbers"}
        parts = self._run.plan.micro_batches * self._grpo.mini_batches
        result = np.zeros((2, *rows["weights"].shape), np.float32)
        for part in range(parts):
            self._run.reporter.check(part)
            batch = {name: self._local_rows(rows[name][part::parts]) for name in names}
            result[:, part::parts] = self._log_p(params, sharding.global_batch(self._run.batch_sharding, batch))
        log_p, values = np.where(rows["weights"] > 0, result, np.float32(0))
        return log_p, values

    def _local_rows(self, rows: np.ndarray) -> np.ndarray:
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
    """Makes a jitted function (params, batch) -> log-probability of every target and value before it [2, B, T], on every process.

    Values are 0 without a value head.

    `temperature`, `usable`: the distribution of the targets, as in `log_probabilities`.
    """

    def log_p(params: Params, batch: Batch) -> jax.Array:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            batch = sharding.balanced(batch)
            hidden, _ = model.hidden(params, batch)
            log_p_BT = log_probabilities_of(model, params, hidden, batch, temperature=temperature, usable=usable)
            values_BT = values_of(model, params, hidden) if model.config.value_head else jnp.zeros_like(log_p_BT)
            both = jnp.stack([log_p_BT, values_BT])
        return both[:, :, np.argsort(batch["row_positions"])] if "row_positions" in batch else both

    return jax.jit(log_p, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _numbers(groups: Sequence[Sequence[Answer]], of: Callable[[Answer], float | tuple[float, ...]]) -> np.ndarray:
    """A number, or several, of each answer, [prompts, group, ...]."""
    return np.array([[of(answer) for answer in group] for group in groups])


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
