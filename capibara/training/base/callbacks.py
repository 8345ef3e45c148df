"""Callbacks of the training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# A number of `on_system`; None: unavailable here. A mapping has the numbers of each local device, a text is a warning.
SystemValue = float | str | Mapping[str, Sequence[float | None]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run for callbacks, fixed before the first step.

    Attributes:
      model_dir: the run folder.
      start_step: steps completed before this start of the program (0 for a new run).
      total_steps: the step at which the run ends.
      param_count: number of parameters.
      tokens_per_step: positions in a global batch, padding included.
      flops_per_step: model FLOPs of one step, on all devices together (6ND plus attention).
      device_count: devices in the mesh.
      device_kind: JAX's name ("TPU v5 lite", "cpu").
      peak_flops: peak FLOP/s of one device in the compute dtype; None: unknown, and no MFU is logged.
      config: the operative Gin configuration.
      arrays: shape and dtype of each array of the train state, by name.
      data: for each split what was read, held out, skipped and left out, as JSON; empty: the data does not say.
    """

    model_dir: str
    start_step: int
    total_steps: int
    param_count: int
    tokens_per_step: int
    flops_per_step: float
    device_count: int
    device_kind: str
    peak_flops: float | None
    config: str
    arrays: Mapping[str, tuple[tuple[int, ...], str]] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


class Callback:
    """Base class: override what you need. Called on process 0 only; metrics are host floats.

    Train metrics: loss, grad_norm, learning_rate, tokens_per_s, step_s, data_wait_s, ...
    Evaluation metrics: loss, perplexity, bits_per_byte, token_accuracy, tokens.
    """

    def on_status(self, text: str) -> None:
        """A line on what takes time during set-up, before `on_train_begin`; later, on postponed work. From any thread."""

    def on_progress(self, text: str) -> None:
        """The progress of long work between two steps (an evaluation, a rollout), called often; "": the work is over."""

    def on_train_begin(self, run: RunInfo) -> None:
        """Before the first step, after a checkpoint was restored, if there is one."""

    def on_spent(self, step: int, seconds: Mapping[str, float]) -> None:
        """After `on_train_begin` and before `on_train_end`: seconds outside of steps, by cause.

        At the beginning "start" (from the start of the process), "set_up" (compiling, opening the data) and "restore".
        """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every `log_every`-th step, when its metrics have reached the host."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation on the validation split."""

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        """After sample text was generated."""

    def on_checkpoint(self, step: int) -> None:
        """After a checkpoint of `step` was handed to the writer."""

    def on_roll_back(self, step: int) -> None:
        """After a loss spike made the run roll back to `step`: metrics of later steps are void."""

    def on_profile(self, step: int, first_step: int, folder: str) -> None:
        """After the steps from `first_step` to `step` were traced into a folder (Trainer.profile)."""

    def on_system(self, step: int, metrics: Mapping[str, SystemValue]) -> None:
        """A sample of what the run uses, between `on_train_begin` and `on_train_end`; from another thread."""

    def on_facts(self, step: int, facts: Mapping[str, object]) -> None:
        """JSON values on machine, packages and git state, once, between begin and end; from another thread."""

    def on_train_end(self, step: int, reason: str) -> None:
        """After the last step; `reason` is that of `loop.Outcome`."""

    def close(self) -> None:
        """The last call of all, also where an error ends the run."""


class Callbacks(Callback):
    """Calls each of several callbacks, in order."""

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = tuple(callbacks)

    def on_status(self, text: str) -> None:
        self._each("on_status", text)

    def on_progress(self, text: str) -> None:
        self._each("on_progress", text)

    def on_train_begin(self, run: RunInfo) -> None:
        self._each("on_train_begin", run)

    def on_spent(self, step: int, seconds: Mapping[str, float]) -> None:
        self._each("on_spent", step, seconds)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each("on_step", step, metrics)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each("on_evaluate", step, metrics)

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        self._each("on_sample", step, prompt, text)

    def on_checkpoint(self, step: int) -> None:
        self._each("on_checkpoint", step)

    def on_roll_back(self, step: int) -> None:
        self._each("on_roll_back", step)

    def on_profile(self, step: int, first_step: int, folder: str) -> None:
        self._each("on_profile", step, first_step, folder)

    def on_system(self, step: int, metrics: Mapping[str, SystemValue]) -> None:
        self._each("on_system", step, metrics)

    def on_facts(self, step: int, facts: Mapping[str, object]) -> None:
        self._each("on_facts", step, facts)

    def on_train_end(self, step: int, reason: str) -> None:
        self._each("on_train_end", step, reason)

    def close(self) -> None:
        self._each("close")

    def _each(self, event: str, *args: object) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(*args)
