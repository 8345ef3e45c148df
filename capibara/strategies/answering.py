"""Generates answers to prompts and computes their rewards; the processes split the work and exchange the results."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from capibara.core.types import Batch, Params, UserError
from capibara.data.chat.formats import read_prompt
from capibara.data.dataset import Dataset
from capibara.inference.calls.dialect import Dialect, dialect_of
from capibara.inference.engine.requests.stream import Completion, Finish, Stream
from capibara.inference.sampling.sampling import Sampling
from capibara.multihost import hosts
from capibara.objectives.batches import RunParts
from capibara.strategies import rewards as judge
from capibara.strategies.dialogues import Dialogues, Opening, episode_of
from capibara.strategies.environments.environment import Environment
from capibara.strategies.generating import Generating, Generator, Prompt, tokens_of
from capibara.strategies.rewards import Reward


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer to a prompt.

    Attributes:
      prompt, tokens: token ids of the prompt and of the answer, including its end token.
      drawn: the log-probability of each of its tokens in the distribution from which the engine sampled it.
      reward: the weighted sum of its rewards.
      parts: the rewards.
      truncated: whether it was cut off.
      is_own: whether each of its tokens is the model's, and not an environment's; None: all are.
    """

    prompt: list[int]
    tokens: list[int]
    drawn: list[float]
    reward: float
    parts: tuple[float, ...]
    truncated: bool
    is_own: list[bool] | None = None

    def packed(self) -> dict[str, Any]:
        """The answer as a JSON value, without loss of precision."""
        ids = {name: _text(getattr(self, name), np.int32) for name in ("prompt", "tokens")}
        return {**dataclasses.asdict(self), **ids, "drawn": _text(self.drawn, np.float32)}

    @staticmethod
    def of(packed: dict[str, Any]) -> Answer:
        """The answer from `packed`."""
        ids = {name: _numbers(packed[name], np.int32) for name in ("prompt", "tokens")}
        lists = {"drawn": _numbers(packed["drawn"], np.float32), "parts": tuple(packed["parts"])}
        return Answer(**{**packed, **ids, **lists})


class Answering(Generating, Protocol):
    """Options of generation and rewards: a `grpo.Grpo`."""

    @property
    def rewards(self) -> tuple[Reward, ...]: ...
    @property
    def reward_weights(self) -> tuple[float, ...] | None: ...
    @property
    def environment(self) -> Environment | None: ...


@runtime_checkable
class PromptDocuments(Protocol):
    """Documents whose records are available to rewards."""

    def __getitem__(self, i: int) -> str:
        """The prompt."""

    def __len__(self) -> int:
        """The number of prompts."""

    def record(self, i: int) -> Mapping[str, Any]:
        """The record of document `i`."""

    def where(self, i: int) -> str:
        """The file and line, for errors."""


def prompts_of(batch: Batch) -> list[Prompt]:
    """The prompts of a batch, without rows of padding."""
    result = []
    for row in np.flatnonzero(batch["numbers"][:, 0]).tolist():
        ids = batch["targets"][row][batch["segment_ids"][row] > 0].tolist()
        result.append(Prompt(row, int(batch["numbers"][row, 0]) - 1, ids))
    return result


class Answerer:
    """Answers prompts with the current parameters, and computes the rewards of the answers.

    One process computes the rewards of an answer and sends them to the others.

    Args:
      run: parts of a run on prompts.
      grpo: options of generation and rewards.
    """

    def __init__(self, run: RunParts, grpo: Answering):
        self._run, self._grpo, self._generator = run, grpo, Generator(run, grpo)
        splits = ("train", "validation") if run.evaluates else ("train",)
        self._documents = {split: prompt_documents(run.dataset, split) for split in splits}

    @functools.cached_property
    def _dialect(self) -> Dialect:
        return dialect_of(self._generator.chat)

    def load(self, params: Params) -> None:
        """Loads parameters into the engine; all processes call it."""
        self._generator.load(params)

    def answers(
        self, split: str, prompts: Sequence[Prompt], samplings: Callable[[int], list[Sampling]], what: str
    ) -> list[list[Answer]]:
        """The answers to each prompt, the same on all processes.

        Args:
          split, prompts: the prompts.
          samplings: row of a prompt -> sampling options of each of its answers.
          what: their purpose, for the progress.

        Raises:
          Interrupted: the run must stop.
          UserError: a reward on any process is not a number.
        """
        for prompt in prompts:
            check_record(self._grpo.rewards, self._documents[split], prompt.number)
        if self._grpo.environment is not None:
            return self._dialogues(self._grpo.environment, split, prompts, samplings, what)
        streams = self._generator.streams(prompts, samplings, what)
        count = sum(len(samplings(prompt.row)) for prompt in prompts)
        return self._judged_by_turns(split, prompts, streams, f"{what}: {{}} of {count} rewards")

    def _judged_by_turns(
        self, split: str, prompts: Sequence[Prompt], streams: dict[int, list[Stream]], progress: str
    ) -> list[list[Answer]]:
        mine, judged = hosts.share(prompts), list[list[Answer]]()
        for turn in range(-(-len(prompts) // jax.process_count())):  # a reward may take long, too
            self._run.reporter.check(turn)
            self._run.reporter.progress(progress.format(sum(map(len, judged))))
            part = mine[turn : turn + 1]
            result = hosts.each(lambda: [(p.row, self._judged(split, p, streams[p.row])) for p in part])
            for row, answers in itertools.chain.from_iterable(result):
                assert row == prompts[len(judged)].row, "a prompt was answered twice, or by nobody"
                judged.append([Answer.of(answer) for answer in answers])
        return judged

    def _judged(self, split: str, prompt: Prompt, streams: Sequence[Stream]) -> list[dict[str, Any]]:
        return [self._answer(split, prompt, stream.result()).packed() for stream in streams]

    def _dialogues(
        self,
        environment: Environment,
        split: str,
        prompts: Sequence[Prompt],
        samplings: Callable[[int], list[Sampling]],
        what: str,
    ) -> list[list[Answer]]:
        """As `answers`, of one process, where the model speaks with an environment."""
        documents, openings = self._documents[split], []
        for prompt in prompts:
            record = documents.record(prompt.number)
            conversation = read_prompt(record, documents.where(prompt.number))
            for sampling in samplings(prompt.row):
                openings.append(Opening(prompt, conversation, episode_of(environment, record), sampling))
        talk, dialect = self._generator.chat, self._dialect
        generate = functools.partial(self._generator.streams, what=what, dialect=dialect)
        answers: dict[int, list[Answer]] = {prompt.row: [] for prompt in prompts}
        for item in Dialogues(environment, talk, dialect, generate).held(openings):
            prompt, spoken = item.opening.prompt, {"dialogue": item.messages}
            total, parts = self._rewards(split, prompt, item.text, spoken)
            answer = Answer(prompt.ids, item.tokens, item.drawn, total, parts, item.truncated, item.is_own)
            answers[prompt.row].append(answer)
        return [answers[prompt.row] for prompt in prompts]

    def _answer(self, split: str, prompt: Prompt, completion: Completion) -> Answer:
        total, parts = self._rewards(split, prompt, completion.text, {})
        tokens, drawn = tokens_of(completion)
        return Answer(prompt.ids, tokens, drawn, total, parts, completion.finish is Finish.LENGTH)

    def _rewards(
        self, split: str, prompt: Prompt, answer: str, more: Mapping[str, Any]
    ) -> tuple[float, tuple[float, ...]]:
        """The weighted sum of an answer's rewards, and the rewards; `more`: what they read beside the record."""
        grpo, documents = self._grpo, self._documents[split]
        record, text = {**documents.record(prompt.number), **more}, documents[prompt.number]
        parts = []
        for reward in grpo.rewards:
            value = reward(text, answer, record)
            if not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
                raise UserError(
                    f"Grpo.rewards: {name_of(reward)} returned {value!r} for an answer to "
                    f"{documents.where(prompt.number)}: it must return a finite number"
                )
            parts.append(float(value))
        weights = grpo.reward_weights or (1.0,) * len(parts)
        return sum(weight * part for weight, part in zip(weights, parts)), tuple(parts)


def check_records(rewards: Sequence[Reward], dataset: Dataset, split: str, limit_s: float) -> None:
    """Raises UserError if a ready reward cannot judge answers to a prompt; looks at as many as the time limit allows.

    `Answerer` checks the others before it answers them.
    """
    documents, begin_s = prompt_documents(dataset, split), time.monotonic()
    for number in range(len(documents)):
        if time.monotonic() - begin_s > limit_s:
            return
        check_record(rewards, documents, number)


def check_record(rewards: Sequence[Reward], documents: PromptDocuments, number: int) -> None:
    """Raises UserError that names the file and line if a ready reward cannot judge answers to a prompt."""
    for reward in rewards:
        try:
            judge.check_record(reward, documents.record(number))
        except UserError as error:
            raise UserError(f"{documents.where(number)}: {error}") from None


def prompt_documents(dataset: Dataset, split: str) -> PromptDocuments:
    """The prompts of a split, with their records."""
    result = dataset.documents(split)
    if not isinstance(result, PromptDocuments):
        raise UserError(
            f"Dataset.source ({type(dataset.source).__name__}) has no records, which rewards need: set "
            "Dataset.source = @PromptJsonlSource()"
        )
    return result


def name_of(reward: object) -> str:
    """The name of a reward function."""
    return getattr(reward, "__name__", type(reward).__name__)


def _text(numbers: Sequence[float], dtype: type[np.number]) -> str:
    return base64.b64encode(np.array(numbers, dtype).tobytes()).decode()


def _numbers(text: str, dtype: type[np.number]) -> list[int] | list[float]:
    return np.frombuffer(base64.b64decode(text), dtype).tolist()
