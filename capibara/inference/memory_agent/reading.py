"""Reads documents chunk by chunk: the conversations of each, and many documents together."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from capibara.core.types import UserError
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.stream import Completion, Stream
from capibara.inference.memory_agent.prompts import Prompts
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.sampling.seeds import draw_seed


@dataclasses.dataclass(frozen=True)
class Turn:
    """A conversation: its prompt, and what the model wrote."""

    prompt: list[int]
    completion: Completion


class Reading:
    """One document that is read: what is asked next, given what was written.

    Args:
      prompts: how it is read.
      document: its text.
      question: about it.
      sampling: of the answer; the memory is drawn at the same temperature, without the answer's stop strings and grammar.
      where: the document's name, for errors.
      records: whether `turns` are recorded.

    Attributes:
      prompt: the next prompt, of a chunk or of the answer.
      turns: the conversations that have ended, the answer's last.

    Raises:
      UserError: the document is empty, a conversation does not fit a row, or the sampling has several texts.
    """

    def __init__(
        self, prompts: Prompts, document: str, question: str, sampling: Sampling, *, where: str, records: bool = False
    ):
        check_sampling(sampling)
        self._agent, self._prompts, self._sampling = prompts.agent, prompts, sampling
        # A list of a long document's ids would be ten times as large.
        self._document = np.array(prompts.encode(document), np.int32)
        if not len(self._document):
            raise UserError(f"{where}: the document is empty: there is nothing to read")
        self._question, self._memory = prompts.encode(question), prompts.encode(self._agent.empty_memory)
        self._position, self._number, self._records = 0, 0, records
        self._check(where)
        self.turns: list[Turn] = []
        self.prompt = self._next_prompt()

    @property
    def sampling(self) -> Sampling:
        """Of the next completion."""
        if self._answers:
            return self._sampling
        return dataclasses.replace(
            self._sampling, max_new_tokens=self._agent.memory_tokens, min_new_tokens=0, allowed_ids=None, grammar=None, stop=(),
            seed=draw_seed(self._sampling.seed, self._number),
        )  # fmt: skip

    def add(self, completion: Completion) -> Completion | None:
        """Adds what the model wrote after `prompt`; returns it if it is the answer."""
        if self._records:
            self.turns.append(Turn(self.prompt, completion))
        if self._answers:
            return completion
        self._memory = completion.tokens
        self._position, self._number = self._position + self._agent.chunk_tokens, self._number + 1
        self.prompt = self._next_prompt()
        return None

    @property
    def ends(self) -> Sequence[int]:
        """Ids of tokens that end what the model writes, beside the tokenizer's."""
        return self._prompts.ends

    @property
    def tokens(self) -> int:
        """The number of tokens of the document."""
        return len(self._document)

    @property
    def chunks(self) -> int:
        """The number of chunks of the document."""
        return -(-len(self._document) // self._agent.chunk_tokens)

    @property
    def _answers(self) -> bool:
        return self._position >= len(self._document)

    def _next_prompt(self) -> list[int]:
        if self._answers:
            return self._prompts.answer(self._question, self._memory)
        chunk = self._document[self._position : self._position + self._agent.chunk_tokens]
        return self._prompts.update(self._question, self._memory, chunk.tolist())

    def _check(self, where: str) -> None:
        """Raises UserError unless the longest conversation fits a row: none is then cut off."""
        agent, question = self._agent, self._question
        memory = max(agent.memory_tokens, len(self._memory))
        chunk = min(agent.chunk_tokens, len(self._document))
        update = len(self._prompts.update(question, [0] * memory, [0] * chunk)) + agent.memory_tokens
        answer = len(self._prompts.answer(question, [0] * memory)) + self._sampling.max_new_tokens
        for name, tokens, fix in (
            ("a chunk", update, "lower MemoryAgent.chunk_tokens or memory_tokens"),
            ("the answer", answer, "lower MemoryAgent.memory_tokens or Sampling.max_new_tokens"),
        ):
            if tokens > self._prompts.length:
                raise UserError(
                    f"{where}: the conversation of {name} needs {tokens} tokens, must fit Dataset.length "
                    f"({self._prompts.length}): {fix}, or raise that"
                )


def check_sampling(sampling: Sampling) -> None:
    """Raises UserError for options that a reading with a memory does not have."""
    for name, nothing in (("beams", None), ("num_decodes", 1), ("thinking_tokens", None)):
        if (value := getattr(sampling, name)) != nothing:
            raise UserError(f"Sampling.{name} is {value}, which reading with a memory does not support: leave it out")


def read(
    engine: Engine,
    readings: Iterable[Reading],
    adapter: str | None = None,
    show: Callable[[int], None] = lambda turns: None,
) -> Iterator[Completion]:
    """Yields the answers in order; the engine's slots read as many documents at a time.

    Args:
      engine: the engine.
      readings: the documents; one is opened when a slot is free.
      adapter: as in `Engine.submit`.
      show: called with the number of conversations that have ended.
    """
    left, turns, yielded = enumerate(readings), 0, 0
    pending: deque[tuple[int, Reading, Stream]] = deque()
    answers: dict[int, Completion] = {}

    def submit(number: int, reading: Reading) -> None:
        stream = engine.submit(reading.prompt, reading.sampling, ends=reading.ends, adapter=adapter)
        pending.append((number, reading, stream))

    while True:
        while len(pending) < engine.slots and (more := next(left, None)) is not None:
            submit(*more)
        if not pending:
            return
        # A conversation of each document, so that the next prompts are prefilled together.
        for _ in range(len(pending)):
            number, reading, stream = pending.popleft()
            if (answer := reading.add(stream.result())) is None:
                submit(number, reading)
            else:
                answers[number] = answer
            turns += 1
        show(turns)
        while yielded in answers:
            yield answers.pop(yielded)
            yielded += 1
