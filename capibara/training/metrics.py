"""Averages the steps' device scalars into the metrics of a log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from capibara.kernels.cross_entropy.terms import LossSums

_MEANS = ("loss", "smoothed_loss", "z_loss", "token_accuracy", "mtp_loss", "mtp_acceptance")
_COUNTS = {"skipped", "loss_spikes"}  # 0 or 1 for a step; a log has their sums


class Meter:
    """Collects the metrics of the steps between two logs; only reading them waits for the devices.

    Args:
      tokens_per_step: positions in a batch.
      means: further metrics to average.

    Attributes:
      steps: the metrics of each step that the last `read` has read.
    """

    def __init__(self, tokens_per_step: int, means: Sequence[str] = ()):
        self._tokens_per_step, self._means = tokens_per_step, (*_MEANS, *means)
        self._pending: list[Mapping[str, jax.Array]] = []
        self._data_wait_s = 0.0
        self._spent: dict[str, float] = {}
        self._since = time.perf_counter()
        self.steps: list[Mapping[str, float]] = []

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """A context whose time is not counted as time of the steps, but reported by `name` ("evaluate", "save")."""
        jax.block_until_ready(self._pending)  # the steps before it count
        begin_s = time.perf_counter()
        yield
        spent_s = time.perf_counter() - begin_s
        self._since += spent_s
        self._spent[name] = self._spent.get(name, 0.0) + spent_s

    def spent(self) -> dict[str, float]:
        """Seconds of pauses since the last call, by name."""
        spent, self._spent = self._spent, {}
        return spent

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the loop waits for a batch."""
        begin_s = time.perf_counter()
        yield
        self._data_wait_s += time.perf_counter() - begin_s

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        """Adds one step's metrics, still on the devices."""
        self._pending.append(metrics)

    def read(self) -> dict[str, float]:
        """Reads the metrics since the last call: losses are averaged with weights of real tokens, or pairs.

        Steps whose update was skipped are excluded from the means, unless there are no others; the learning rate is that of
        the last update that was made. A metric of a part, as
        hint_accuracy/DOMAIN, is NaN in a step without this part: the last step that has it counts, and if there is none, the
        log does not have it, either.

        Returns:
          The last step's metrics, with means, or sums for tokens, skipped updates and loss spikes; and step_s, tokens_per_s
          (including padding), data_wait_s (per step), evaluate_s and save_s (in total since the last call, if any).
        """
        steps = self.steps = jax.device_get(self._pending)
        count = len(steps)
        created = [s for s in steps if not s.get("skipped")] or steps
        weight = "pairs" if "pairs" in steps[-1] else "tokens"
        total = sum(float(s[weight]) for s in created)
        elapsed = time.perf_counter() - self._since
        of_parts = {name for name in steps[-1].keys() - {*self._means} if "/" in name}
        result = {name: float(value) for name, value in steps[-1].items() if name not in of_parts}
        for name in sorted(of_parts):
            there = [step[name] for step in steps if not math.isnan(step.get(name, math.nan))]
            if there:
                result[name] = float(there[-1])
        for name in (name for name in self._means if name in result):
            result[name] = sum(float(s[name]) * float(s[weight]) for s in created) / max(total, 1.0)
        if "learning_rate" in result:
            result["learning_rate"] = float(created[-1]["learning_rate"])
        result["grad_norm"] = sum(float(s["grad_norm"]) for s in created) / len(created)
        for name in _COUNTS & result.keys():
            result[name] = sum(float(s[name]) for s in steps)
        for name in {"tokens", weight}:
            result[name] = sum(filter(math.isfinite, (float(s[name]) for s in steps)))
        result["step_s"] = elapsed / count
        result["tokens_per_s"] = count * self._tokens_per_step / elapsed
        result["data_wait_s"] = self._data_wait_s / count
        result |= {f"{name}_s": seconds for name, seconds in self.spent().items()}
        self._pending, self._data_wait_s = [], 0.0
        self._since = time.perf_counter()
        return result


def evaluation_metrics(sums: LossSums, target_bytes: float) -> dict[str, float]:
    """Loss in nats per token, perplexity, bits per byte of the text, and token accuracy.

    Args:
      sums: over all real tokens of the split.
      target_bytes: number of UTF-8 bytes of these tokens; 0: unknown, and there are no bits per byte.
    """
    weight = max(float(sums.weight), 1.0)
    loss = float(sums.nll) / weight
    metrics = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "token_accuracy": float(sums.correct) / weight,
        "tokens": float(sums.weight),
    }
    if target_bytes > 0:
        metrics["bits_per_byte"] = float(sums.nll) / math.log(2) / target_bytes
    return metrics


class EarlyStopping:
    """Stops when the evaluation loss has not improved for `patience` evaluations; None: never."""

    def __init__(self, patience: int | None, state: Mapping[str, Any] | None = None):
        self._patience = patience
        self._best = math.inf if not state or state["best"] is None else float(state["best"])
        self._bad = int(state["bad"]) if state else 0

    @property
    def stop(self) -> bool:
        return self._patience is not None and self._bad >= self._patience

    def update(self, loss: float) -> None:
        """Records the loss of an evaluation."""
        if loss < self._best:
            self._best, self._bad = loss, 0
        else:
            self._bad += 1

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        return {"best": None if math.isinf(self._best) else self._best, "bad": self._bad}
