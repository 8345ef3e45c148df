"""The prompts of a memory agent as token ids, with the tokens of question, memory and chunk as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.interactive.chat import Chat
from capibara.inference.memory_agent.agent import MemoryAgent

_MARKS = {name: f"\ue000{name}\ue000" for name in ("question", "memory", "chunk")}
_SPLIT = re.compile("\ue000(question|memory|chunk)\ue000")
Ids = Sequence[int]


class Prompts:
    """Makes the prompts of an agent's conversations.

    What stands around the placeholders is tokenized once, and what takes their places by itself. So the memory has the tokens
    that the model wrote, and a prompt's length is the sum of its parts.

    Args:
      agent: its templates.
      dataset: of the model: its tokenizer, and the length of rows.
      chat: renders a prompt as a user's message; None: prompts are texts to continue.

    Attributes:
      agent: as above.
      vocabulary: the tokenizer.
      length: tokens of a row, for a prompt and what follows it.
      encode: text of a question, a memory or a document -> its token ids.
      ends: ids of tokens that end what the model writes, beside the tokenizer's.

    Raises:
      UserError: the model is an encoder-decoder, or the chat template rejects the messages or does not write them as they are.
    """

    def __init__(self, agent: MemoryAgent, dataset: Dataset, chat: Chat | None):
        if dataset.encoder_length is not None:
            raise UserError("reading with a memory needs a decoder, and the model is an encoder-decoder: use a decoder")
        self.agent, self.vocabulary, self.length = agent, dataset.get_vocabulary(), dataset.length
        self.ends, self.encode = (chat.ends, chat.content_ids) if chat else ((), self.vocabulary.encode)
        self._update = _parts("update", agent.update, self.vocabulary, chat)
        self._answer = _parts("answer", agent.answer, self.vocabulary, chat)

    def update(self, question: Ids, memory: Ids, chunk: Ids) -> list[int]:
        """The prompt of a chunk."""
        return _filled(self._update, {"question": question, "memory": memory, "chunk": chunk})

    def answer(self, question: Ids, memory: Ids) -> list[int]:
        """The prompt of the answer."""
        return _filled(self._answer, {"question": question, "memory": memory})


def _parts(name: str, template: str, vocabulary: Vocabulary, chat: Chat | None) -> list[list[int] | str]:
    """The tokens of a template, and between them the names of its placeholders."""
    text, encode = template.format(**_MARKS), vocabulary.encode
    if chat is not None:
        message = Conversation([{"role": "user", "content": text}])
        text, encode = chat.text_after(message, f"MemoryAgent.{name}"), chat.ids_of
    pieces = _SPLIT.split(text)
    if sorted(pieces[1::2]) != sorted(key for key, mark in _MARKS.items() if mark in template.format(**_MARKS)):
        raise UserError(
            f"the chat template does not write MemoryAgent.{name} once and as it is, which reading with a memory needs: use another "
            "ChatTemplate.template"
        )
    parts = _encoded(pieces, encode)
    return parts if chat is not None else [[*vocabulary.begin_ids], *parts]


def _encoded(pieces: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int] | str]:
    return [piece if i % 2 else encode(piece) if piece else [] for i, piece in enumerate(pieces)]


def _filled(parts: Sequence[list[int] | str], ids: dict[str, Ids]) -> list[int]:
    return [token for part in parts for token in (ids[part] if isinstance(part, str) else part)]
