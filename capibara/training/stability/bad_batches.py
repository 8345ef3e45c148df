"""Counts skipped updates on the host, and records the documents of their batches."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax

from capibara.core.background import Worker
from capibara.core.types import UserError
from capibara.data.pipeline.loader import Loader, Position
from capibara.storage import stores
from capibara.training.stability.anomalies import Anomalies, OnSpike
from capibara.training.stability.loss_scale import LossScaling

_CLOSE_S = 60.0  # for reading a few documents again
_READ = ("loss", "grad_norm", "skipped", "loss_spikes", "loss_scale", "window_mean", "window_spread")


class BadBatches:
    """Checks the steps since the last log, when the host waits for the devices anyway.

    A skipped update becomes a line of bad_batches.jsonl in the run folder (bad_batches.N.jsonl for process N): step, reason,
    loss, grad_norm, and the documents of each of this process's rows, from row `first_row` of the batch on. A thread reads
    these documents again, from the data's position before the batch.

    Args:
      model_dir: the run folder.
      anomalies: the options.
      scaling: the loss scaling of a float16 run, otherwise None.
      batches: the training split.
    """

    def __init__(self, model_dir: str, anomalies: Anomalies, scaling: LossScaling | None, batches: Loader):
        index = jax.process_index()
        self._path = stores.folder_of(model_dir) / f"bad_batches{f'.{index}' if index else ''}.jsonl"
        self._anomalies, self._scaling, self._batches = anomalies, scaling, batches
        self._pending: list[tuple[int, Position, dict[str, jax.Array]]] = []
        self._thread = Worker("capibara-bad-batches")
        self._in_a_row = 0
        self.spike: int | None = None  # the first spike for which the run must still roll back

    def add(self, step: int, position: Position, metrics: Mapping[str, jax.Array]) -> None:
        """Records a step's metrics, still on the devices, and the data's position before its batch."""
        if "skipped" in metrics:
            self._pending.append((step, position, {name: metrics[name] for name in _READ if name in metrics}))

    def read(self) -> None:
        """Checks the steps since the last call.

        Raises:
          UserError: too many updates in a row were skipped.
        """
        pending, self._pending = self._pending, []
        values = jax.device_get([metrics for _, _, metrics in pending])
        for (step, position, _), numbers in zip(pending, values, strict=True):
            self._look(step, position, {name: float(number) for name, number in numbers.items()})

    def rolled_back(self) -> None:
        """Resets after a roll-back."""
        self.spike, self._in_a_row = None, 0

    def close(self) -> None:
        """Waits until all lines are written, up to a time limit."""
        if not self._thread.close(_CLOSE_S):
            logging.getLogger(__name__).warning(
                "%s lacks lines: the documents of bad batches could not be read within %.0f s", self._path, _CLOSE_S
            )

    def _look(self, step: int, position: Position, numbers: dict[str, float]) -> None:
        if not numbers["skipped"]:
            self._in_a_row = 0
            return
        if self._scaling and math.isfinite(numbers["loss"]) and numbers["loss_scale"] > self._scaling.minimum:
            if not numbers.get("loss_spikes"):
                return  # the loss scale still adapts
        why = explained(numbers, self._anomalies.window)
        self._thread.submit(functools.partial(self._write, step, why, numbers, position))
        if numbers.get("loss_spikes") and self._anomalies.on_spike is OnSpike.ROLL_BACK:
            self.spike = step if self.spike is None else self.spike
            return
        self._in_a_row += 1
        if self._in_a_row >= self._anomalies.most_in_a_row:
            raise UserError(
                f"{self._in_a_row} updates in a row were skipped, the last at step {step}: {why}: earlier checkpoints are "
                f"kept; lower Schedule.learning_rate, set Optimizer.clip_norm, or look at the documents in {self._path} "
                "(Anomalies.most_in_a_row)"
            )

    def _write(self, step: int, why: str, numbers: dict[str, float], position: Position) -> None:
        """Writes a line, in the thread. An error is logged, and does not end the run."""
        record: dict[str, Any] = {"step": step, "why": why}
        record |= {name: numbers[name] if math.isfinite(numbers[name]) else None for name in ("loss", "grad_norm")}
        try:
            record |= self._batches.documents_after(position)
        except Exception as error:
            record |= {"first_row": None, "rows": None, "error": str(error)}
        try:
            stores.of(self._path).append(self._path, json.dumps(record))
        except OSError as error:
            logging.getLogger(__name__).warning("%s cannot be written: %s: %s", self._path, error, json.dumps(record))


def explained(numbers: Mapping[str, float], window: int) -> str:
    """Why the update of a step with these metrics was skipped."""
    loss = numbers["loss"]
    if numbers.get("loss_spikes"):
        mean, sigmas = numbers["window_mean"], (loss - numbers["window_mean"]) / numbers["window_spread"]
        return f"loss {loss:.4g} is {sigmas:.1f} sigma above the mean {mean:.4g} of {window} steps"
    if not math.isfinite(loss):
        return f"loss is {loss}"
    return f"gradients are not finite (their norm is {numbers['grad_norm']}, the loss {loss:.4g})"
