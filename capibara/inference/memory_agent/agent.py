"""Configures how a document is read in chunks with a memory."""

from __future__ import annotations

import dataclasses
import string

from capibara.config import configurable
from capibara.core.types import UserError

_UPDATE = """You read a long text part by part to answer a question. You see one part at a time, and of the parts before it only what
your notes say.

Question: {question}

Your notes so far: {memory}

The next part of the text:
{chunk}

Write your notes anew. Keep what helps to answer the question, and add what this part says about it:"""
_ANSWER = """You have read a long text. These are your notes of it: {memory}

Answer the question from the notes alone.
Question: {question}
Answer:"""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryAgent:
    """Reads a document in chunks and rewrites a memory after each (MemAgent, Yu et al. 2025, arXiv:2507.02259).

    Each chunk is a conversation of its own: its prompt has the question, the memory and the chunk, and what the model writes
    replaces the memory. A last conversation answers from the question and the memory. So no prompt, and no memory of the devices,
    grows with the document.

    Attributes:
      chunk_tokens: tokens of the document in a prompt.
      memory_tokens: most tokens of the memory; a longer one is cut off there.
      update: the prompt of a chunk, with {question}, {memory} and {chunk}. In a chat it is the user's message.
      answer: the prompt of the answer, with {question} and {memory}.
      empty_memory: the memory before the first chunk.
      document: the key of a JSON line with the document, for evaluation and training.
    """

    chunk_tokens: int = 2048
    memory_tokens: int = 512
    update: str = _UPDATE
    answer: str = _ANSWER
    empty_memory: str = "nothing yet"
    document: str = "document"

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "memory_tokens"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"MemoryAgent.{name} is {value}, must be at least 1: try 512")
        for name, keys in (("update", ("chunk", "memory", "question")), ("answer", ("memory", "question"))):
            _check_template(name, getattr(self, name), keys)


def _check_template(name: str, text: str, keys: tuple[str, ...]) -> None:
    """Raises UserError unless a template has each of the keys in braces once."""
    try:
        parts = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise UserError(f"MemoryAgent.{name} cannot be read ({error}): write {{{{ for a brace") from None
    if sorted(key or "" for key, _, _ in parts) != list(keys) or any(
        form or conversion for _, form, conversion in parts
    ):
        needed = ", ".join(f"{{{key}}}" for key in keys)
        raise UserError(f"MemoryAgent.{name} must have each of {needed} once, and no others; write {{{{ for a brace")
