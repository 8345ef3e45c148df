"""Documents that a run's model reads with a memory in its rollouts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from capibara.core.types import UserError
from capibara.data.chat.formats import read_prompt
from capibara.data.dataset import Dataset
from capibara.inference.interactive import chat
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.memory_agent.prompts import Prompts
from capibara.inference.memory_agent.reading import Reading, check_sampling
from capibara.inference.sampling.sampling import Sampling


class Records(Protocol):
    """Records of a split: `answering.PromptDocuments`."""

    def __len__(self) -> int: ...

    def record(self, i: int) -> Mapping[str, Any]: ...

    def where(self, i: int) -> str: ...


class Readings:
    """Opens the documents of records.

    Args:
      agent: how documents are read.
      max_chunks: most chunks of a document.
      dataset: of the run.
    """

    def __init__(self, agent: MemoryAgent, max_chunks: int, dataset: Dataset):
        self._agent, self._max_chunks = agent, max_chunks
        self._prompts = Prompts(agent, dataset, chat.of_run(dataset, "Grpo.memory"))

    def open(self, record: Mapping[str, object], where: str, samplings: Sequence[Sampling]) -> list[Reading]:
        """A reading of the record's document for each of the samplings.

        Raises:
          UserError: the record has no document, a prompt of several messages, or a conversation that does not fit a row.
        """
        name, document = self._agent.document, record.get(self._agent.document)
        if not isinstance(document, str):
            raise UserError(
                f"{where} has no text in {name!r}, which Grpo.memory reads: add it, or set MemoryAgent.document"
            )
        messages, tools, variables = read_prompt(record, where)
        if len(messages) != 1 or tools or variables:
            more = " and tools" * bool(tools) + " and chat_template_kwargs" * bool(variables)
            raise UserError(
                f"{where} has {len(messages)} messages{more}, and Grpo.memory asks one question: give a line "
                "'question' and 'document'"
            )
        question = str(messages[0]["content"])
        result = [Reading(self._prompts, document, question, item, where=where, records=True) for item in samplings]
        if (chunks := result[0].chunks) > self._max_chunks:
            raise UserError(
                f"{where} has a document of {result[0].tokens} tokens in {chunks} chunks, must have at most Grpo.max_chunks "
                f"({self._max_chunks}): raise that or MemoryAgent.chunk_tokens"
            )
        return result


def check(
    agent: MemoryAgent, max_chunks: int, dataset: Dataset, records: Records, sampling: Sampling, limit_s: float
) -> None:
    """Raises UserError if a document cannot be read; looks at as many as the time limit allows, and at the first."""
    check_sampling(sampling)
    readings, begin_s = Readings(agent, max_chunks, dataset), time.monotonic()
    for number in range(len(records)):
        readings.open(records.record(number), records.where(number), [sampling])
        if time.monotonic() - begin_s > limit_s:
            return
