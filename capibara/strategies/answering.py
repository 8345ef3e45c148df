"""Generates answers to prompts and computes their rewards; the processes split the work and exchange the results."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from capibara.core.types import HostBatch, Params, UserError
from capibara.data.chat.formats import read_prompt
from capibara.data.dataset import Dataset
from capibara.inference.calls.dialect import Dialect, dialect_of
from capibara.inference.engine.requests.stream import Completion, Finish
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.memory_agent.reading import Reading
from capibara.inference.sampling.sampling import Sampling
from capibara.multihost import hosts
from capibara.objectives.batches import RunParts
from capibara.strategies.dialogues import Dialogue, Dialogues, Opening, episode_of
from capibara.strategies.environments.environment import Environment
from capibara.strategies.generating import Generating, Generator, Prompt, tokens_of
from capibara.strategies.readings import Readings
from capibara.strategies.rewards import reward as judge
from capibara.strategies.rewards.reward import Reward
from capibara.strategies.rewards.reward_sum import RewardSum, Total


class Exchange(NamedTuple):
    """A prompt and what the model wrote after it: token ids, and the log-probabilities with which they were drawn."""

    prompt: list[int]
    tokens: list[int]
    drawn: list[float]


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
      earlier: what the model wrote before, in conversations of their own that share the reward.
    """

    prompt: list[int]
    tokens: list[int]
    drawn: list[float]
    reward: float
    parts: tuple[float, ...]
    truncated: bool
    is_own: list[bool] | None = None
    earlier: tuple[Exchange, ...] = ()

    def packed(self) -> dict[str, Any]:
        """The answer as a JSON value, without loss of precision."""
        earlier = [_packed(item) for item in self.earlier]
        return {**dataclasses.asdict(self), **_packed(self), "earlier": earlier}

    @staticmethod
    def of(packed: dict[str, Any]) -> Answer:
        """The answer from `packed`."""
        earlier = tuple(Exchange(**_unpacked(item)) for item in packed["earlier"])
        return Answer(**{**packed, **_unpacked(packed), "parts": tuple(packed["parts"]), "earlier": earlier})


class Finished(NamedTuple):
    """What the model has written last, and the reading of whose document it is the answer; None: of a prompt."""

    completion: Completion
    reading: Reading | None = None


class Answering(Generating, Protocol):
    """Options of generation and rewards: a `grpo.Grpo`."""

    @property
    def rewards(self) -> tuple[Reward, ...]: ...
    @property
    def reward_weights(self) -> tuple[float, ...] | None: ...
    @property
    def environment(self) -> Environment | None: ...
    @property
    def memory(self) -> MemoryAgent | None: ...
    @property
    def max_chunks(self) -> int | None: ...


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


def prompts_of(batch: HostBatch) -> list[Prompt]:
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
      devices: the engine's, as for `Generator`.
    """

    def __init__(self, run: RunParts, grpo: Answering, devices: Sequence[jax.Device] = ()):
        self._run, self._grpo, self._generator = run, grpo, Generator(run, grpo, devices=devices)
        splits = ("train", "validation") if run.evaluates else ("train",)
        self._documents = {split: prompt_documents(run.dataset, split) for split in splits}

    @functools.cached_property
    def _dialect(self) -> Dialect:
        return dialect_of(self._generator.chat)

    def load(self, params: Params) -> None:
        """Loads parameters into the engine; all processes call it."""
        self._generator.load(params)

    def copied(self, params: Params) -> Params:
        """As `Generator.copied`."""
        return self._generator.copied(params)

    def use(self, copied: Params) -> None:
        """As `Generator.use`."""
        self._generator.use(copied)

    def answers(
        self, split: str, prompts: Sequence[Prompt], samplings: Callable[[int], list[Sampling]], topic: str
    ) -> list[list[Answer]]:
        """The answers to each prompt, the same on all processes.

        Args:
          split, prompts: the prompts.
          samplings: row of a prompt -> sampling options of each of its answers.
          topic: their purpose, for the progress.

        Raises:
          Interrupted: the run must stop.
          UserError: a reward on any process is not a number, or an environment's messages are none.
        """
        for prompt in prompts:
            check_record(self._grpo.rewards, self._documents[split], prompt.number)
        finished: Mapping[int, Sequence[Finished | Dialogue]]
        if self._grpo.environment is not None:
            finished = self._dialogues(self._grpo.environment, split, prompts, samplings, topic)
        elif self._readings is not None:
            finished = self._read(self._readings, split, prompts, samplings, topic)
        else:
            streams = self._generator.streams(self._generator.share(prompts), samplings, topic)
            finished = {row: [Finished(stream.result()) for stream in each] for row, each in streams.items()}
        count = sum(len(samplings(prompt.row)) for prompt in prompts)
        return self._judged_by_turns(split, prompts, finished, f"{topic}: {{}} of {count} rewards")

    @functools.cached_property
    def _readings(self) -> Readings | None:
        memory, max_chunks = self._grpo.memory, self._grpo.max_chunks
        return None if memory is None or max_chunks is None else Readings(memory, max_chunks, self._run.dataset)

    def _read(
        self,
        readings: Readings,
        split: str,
        prompts: Sequence[Prompt],
        samplings: Callable[[int], list[Sampling]],
        topic: str,
    ) -> dict[int, list[Finished]]:
        """The answers about the documents of this process's prompts, with their conversations."""
        documents, opened = self._documents[split], dict[int, list[Reading]]()
        mine = self._generator.share(prompts)

        def open_all() -> None:
            for row, number, _ in mine:
                opened[row] = readings.open(documents.record(number), documents.where(number), samplings(row))

        hosts.each(open_all)
        answers = iter(self._generator.read([reading for each in opened.values() for reading in each], topic))
        return {row: [Finished(next(answers), reading) for reading in each] for row, each in opened.items()}

    def _judged_by_turns(
        self,
        split: str,
        prompts: Sequence[Prompt],
        finished: Mapping[int, Sequence[Finished | Dialogue]],
        progress: str,
    ) -> list[list[Answer]]:
        mine, judged = hosts.share(prompts), list[list[Answer]]()
        with self._reward_sum.threads() as pool:
            pending = {p.row: [self._begin(pool, split, p, item) for item in finished[p.row]] for p in mine}
            for turn in range(-(-len(prompts) // jax.process_count())):  # a reward may take long, too
                self._run.reporter.check(turn)
                self._run.reporter.progress(progress.format(sum(map(len, judged))))
                part = mine[turn : turn + 1]
                result = hosts.each(lambda: [(p.row, [answer().packed() for answer in pending[p.row]]) for p in part])
                for row, answers in itertools.chain.from_iterable(result):
                    assert row == prompts[len(judged)].row, "a prompt was answered twice, or by nobody"
                    judged.append([Answer.of(answer) for answer in answers])
        return judged

    def _dialogues(
        self,
        environment: Environment,
        split: str,
        prompts: Sequence[Prompt],
        samplings: Callable[[int], list[Sampling]],
        topic: str,
    ) -> dict[int, list[Dialogue]]:
        """The dialogues about this process's prompts, in which the model speaks with an environment."""
        documents, openings = self._documents[split], list[Opening]()
        judged = {prompt.row for prompt in hosts.share(prompts)}

        def open_all() -> None:
            for prompt in self._generator.share(prompts):
                record = documents.record(prompt.number)
                conversation = read_prompt(record, documents.where(prompt.number))
                for sampling in samplings(prompt.row):
                    episode = episode_of(environment, record) if prompt.row in judged else None
                    openings.append(Opening(prompt, conversation, episode, sampling))

        hosts.each(open_all)
        generator, dialect = self._generator, self._dialect
        generate = functools.partial(generator.streams, topic=topic, dialect=dialect)
        result: dict[int, list[Dialogue]] = {prompt.row: [] for prompt in prompts}
        for item in Dialogues(environment, generator.chat, dialect, generate, generator.is_together).held(openings):
            result[item.opening.prompt.row].append(item)
        return result

    def _begin(
        self, pool: ThreadPoolExecutor | None, split: str, prompt: Prompt, finished: Finished | Dialogue
    ) -> Callable[[], Answer]:
        """Begins with an answer's rewards; the function waits for them."""
        if isinstance(finished, Dialogue):
            return self._begin_dialogue(pool, split, prompt, finished)
        completion, reading = finished
        turns = [] if reading is None else reading.turns
        more = {} if reading is None else {"memories": [turn.completion.text for turn in turns[:-1]]}
        rewards = self._begin_rewards(pool, split, prompt, completion.text, more)

        def answer() -> Answer:
            total, parts = rewards()
            earlier = tuple(Exchange(turn.prompt, *tokens_of(turn.completion)) for turn in turns[:-1])
            ids = turns[-1].prompt if turns else prompt.ids
            tokens, drawn = tokens_of(completion)
            return Answer(ids, tokens, drawn, total, parts, completion.finish is Finish.LENGTH, earlier=earlier)

        return answer

    def _begin_dialogue(
        self, pool: ThreadPoolExecutor | None, split: str, prompt: Prompt, dialogue: Dialogue
    ) -> Callable[[], Answer]:
        rewards = self._begin_rewards(pool, split, prompt, dialogue.text, {"dialogue": dialogue.messages})

        def answer() -> Answer:
            tokens, drawn = dialogue.tokens, dialogue.drawn
            return Answer(prompt.ids, tokens, drawn, *rewards(), dialogue.truncated, dialogue.is_own)

        return answer

    def _begin_rewards(
        self, pool: ThreadPoolExecutor | None, split: str, prompt: Prompt, answer: str, more: Mapping[str, object]
    ) -> Callable[[], Total]:
        """As `RewardSum.begin`; `more`: what rewards read beside the record."""
        documents = self._documents[split]
        record, where = {**documents.record(prompt.number), **more}, documents.where(prompt.number)
        return self._reward_sum.begin(pool, documents[prompt.number], answer, record, where)

    @functools.cached_property
    def _reward_sum(self) -> RewardSum:
        return RewardSum(self._grpo.rewards, self._grpo.reward_weights)


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


def _packed(item: Exchange | Answer) -> dict[str, str]:
    ids = {"prompt": _text(item.prompt, np.int32), "tokens": _text(item.tokens, np.int32)}
    return ids | {"drawn": _text(item.drawn, np.float32)}


def _unpacked(packed: Mapping[str, str]) -> dict[str, list]:
    ids = {name: _numbers(packed[name], np.int32) for name in ("prompt", "tokens")}
    return ids | {"drawn": _numbers(packed["drawn"], np.float32)}


def _text(numbers: Sequence[float], dtype: type[np.number]) -> str:
    return base64.b64encode(np.array(numbers, dtype).tobytes()).decode()


def _numbers(text: str, dtype: type[np.number]) -> list[int] | list[float]:
    return np.frombuffer(base64.b64decode(text), dtype).tolist()
