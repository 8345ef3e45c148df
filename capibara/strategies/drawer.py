"""Draws the answers of rollouts: those of a step with the parameters before it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import jax

from capibara.core.types import Params
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.sampling.seeds import draw_seed
from capibara.objectives.batches import ReadAhead, RunParts
from capibara.strategies.answering import Answer, Answerer, Answering, prompts_of


class DrawOptions(Answering, Protocol):
    """Options of drawing: a `grpo.Grpo`."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def group(self) -> int: ...
    @property
    def rows_of_a_prompt(self) -> int: ...
    @property
    def mini_batches(self) -> int: ...
    @property
    def resample(self) -> int: ...
    @property
    def steps_of_rollout(self) -> int: ...
    @property
    def rollout_devices(self) -> int: ...
    @property
    def staleness_bound(self) -> int: ...


class Draw(NamedTuple):
    """The answers of a rollout.

    Attributes:
      groups: the answers to each prompt.
      drawn: the number of groups that were drawn; with `resample`, some were left out.
      policy_step: steps of the policy that wrote every token of them.
    """

    groups: list[list[Answer]]
    drawn: int
    policy_step: int


class Drawer:
    """Draws the answers of a rollout when they are needed.

    Args:
      run: parts of a run on prompts.
      grpo: options of generation.
      devices: the devices that draw alone; empty: those that train.

    Attributes:
      answerer: answers the prompts.
    """

    def __init__(self, run: RunParts, grpo: DrawOptions, devices: Sequence[jax.Device] = ()):
        self._run, self._grpo, self.answerer = run, grpo, Answerer(run, grpo, devices)

    @property
    def read_ahead(self) -> ReadAhead | None:
        """As `BatchProvider.read_ahead`."""
        return None

    def begin(self, step: int) -> None:
        """Called after `step` steps, before the first `draw` of this start, and after `close`."""

    def draw(self, step: int, params: Params) -> Draw:
        """The answers of the rollout that begins with a step; `params`: the parameters before it.

        Raises:
          Interrupted: the run must stop.
        """
        self.answerer.load(params)
        return self._drawn(step, step - 1)

    @contextlib.contextmanager
    def evaluating(self, params: Params) -> Iterator[None]:
        """A context in which the answerer has these parameters."""
        self.answerer.load(params)
        yield

    def metrics(self) -> dict[str, float]:
        """Metrics of the draws since the last call."""
        return {}

    def close(self) -> None:
        """Stops drawing; prompts whose answers nobody has had are read again."""

    def _drawn(self, step: int, policy_step: int) -> Draw:
        """Answers with the loaded parameters.

        Groups whose rewards are all equal have no advantages: those of further prompts take their place.
        """
        grpo, drawn = self._grpo, 0
        retained, equal = list[list[Answer]](), list[list[Answer]]()
        count = self._run.plan.batch_size // grpo.rows_of_a_prompt * grpo.mini_batches
        for turn in range(1 + grpo.resample):
            samplings = functools.partial(self._samplings, step, turn * count)
            prompts = prompts_of(next(self._run.batches))
            groups = self.answerer.answers("train", prompts, samplings, f"rollout for step {step}")
            drawn += len(groups)
            if not grpo.resample:
                return Draw(groups, drawn, policy_step)
            for group in groups:
                (retained if len({answer.reward for answer in group}) > 1 else equal).append(group)
            if len(retained) >= count:
                break
        return Draw((retained + equal)[:count], drawn, policy_step)

    def _samplings(self, step: int, first: int, row: int) -> list[Sampling]:
        """The sampling options of each answer to the prompt in a row, of `first` prompts before them in this rollout."""
        grpo = self._grpo
        seeds = (draw_seed(self._run.seed, step, first + row, sample) for sample in range(grpo.group))
        return [dataclasses.replace(grpo.sampling, seed=seed) for seed in seeds]
