"""Conversations for fine-tuning: JSON lines, rendered with a tokenizer's chat template, with loss on the answers."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation, Format, Message, read_conversation
from capibara.data.chat.mask import assistant_ranges
from capibara.data.chat.template import ChatTemplate
from capibara.data.sources.sources import Documents, Example, LineDocuments, Source, open_lines
from capibara.data.text import disk
from capibara.data.tokenizers.vocabulary import GUARD

_WEIGHTS = ("weight", "loss_weight", "loss", "train")  # of a message, 0 or 1
_RENDERED_FIRST = 500  # conversations of a split that are rendered before the run starts, to find errors early


class TrainOn(enum.StrEnum):
    """The parts of a conversation with loss.

    ASSISTANT: the assistant's messages, with the end of each turn, except messages with "weight" (or "loss_weight", or "loss" as
      in ms-swift, or "train" as in Axolotl) 0 or false.
    LAST: only the last of these messages.
    EACH: each of these messages in a document of its own, which ends with it: what a model reads and says at that turn. So
      thoughts have loss that a template drops from the turns before the last.
    ALL: everything but the first token.
    """

    ASSISTANT = "assistant"
    LAST = "last"
    EACH = "each"
    ALL = "all"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatJsonlSource(Source):
    """JSON lines, one conversation per line; Dataset.append_eos is ignored, since the template ends the turns.

    Attributes:
      files: paths or globs of the training files.
      template: the chat template.
      format: the format of a line.
      train_on: the parts with loss.
      validation_files: paths or globs of the validation files; empty: a fraction of the lines is held out.
      validation_fraction: the fraction that is held out if there are no validation files.
      domain: the domain of all conversations.
    """

    files: tuple[FilePath, ...]
    template: ChatTemplate
    format: Format = Format.AUTO
    train_on: TrainOn = TrainOn.ASSISTANT
    validation_files: tuple[FilePath, ...] = ()
    validation_fraction: float = 0.03
    domain: str | None = None

    def __post_init__(self) -> None:
        disk.check_fraction(self.validation_fraction, type(self).__name__)

    @property
    def has_conversations(self) -> bool:
        return True

    def open(self, split: str) -> Documents:
        files, fraction = (self.files, self.validation_files), self.validation_fraction
        chats = open_lines("ChatJsonlSource", files, fraction, split, lambda paths, lines: _Chats(paths, lines, self))
        documents: Documents = _Turns(chats, self) if self.train_on is TrainOn.EACH else chats
        for i in np.unique(np.linspace(0, len(documents) - 1, _RENDERED_FIRST).astype(int)):
            documents.example(i)  # raises here if the template cannot render it
        return documents


class _Chats(LineDocuments):
    """One conversation per line."""

    def __init__(self, paths: Sequence[str], ranges: np.ndarray, source: ChatJsonlSource):
        super().__init__(paths, ranges, [source.domain] * len(paths))
        self._source = source

    def check(self, i: int) -> None:
        _counting(self._conversation(i), self._source.train_on, self.where(i))

    def example(self, i: int) -> Example:
        source = self._source
        return render_example(source.template, self._conversation(i), source.train_on, self.where(i), source.domain)

    def __getitem__(self, i: int) -> str:
        return self.example(i).text.replace(GUARD, "")

    def fingerprint(self) -> dict[str, Any]:
        source = self._source
        rendering = {"format": str(source.format), "train_on": str(source.train_on)}
        return {**super().fingerprint(), **rendering, "template": source.template.fingerprint()}

    def _conversation(self, i: int) -> Conversation:
        return read_conversation(self.record(i), self.where(i), self._source.format)


class _Turns(Documents):
    """One document for each message with loss, up to and with it."""

    def __init__(self, chats: LineDocuments, source: ChatJsonlSource):
        self._chats, self._source = chats, source
        counting = (_counting(self._conversation(i), source.train_on, chats.where(i)) for i in range(len(chats)))
        self._turns = np.array([(i, k) for i, turns in enumerate(counting) for k in turns], np.int64).reshape(-1, 2)
        if not len(self._turns):
            raise UserError("ChatJsonlSource.files have no message with loss: give at least one the weight 1")
        self.counts = chats.counts  # of conversations: turns would not add up with those of the other split

    def __len__(self) -> int:
        return len(self._turns)

    def example(self, i: int) -> Example:
        chat, k = self._turns[i].tolist()
        source, whole, where = self._source, self._conversation(chat), self._chats.where(chat)
        conversation = whole._replace(messages=whole.messages[: k + 1])
        return render_example(source.template, conversation, source.train_on, where, source.domain)

    def __getitem__(self, i: int) -> str:
        return self.example(i).text.replace(GUARD, "")

    def fingerprint(self) -> dict[str, Any]:
        return self._chats.fingerprint()

    def _conversation(self, i: int) -> Conversation:
        return read_conversation(self._chats.record(i), self._chats.where(i), self._source.format)


def render_example(
    template: ChatTemplate,
    conversation: Conversation,
    train_on: TrainOn,
    where: str,
    domain: str | None = None,
) -> Example:
    """Renders a conversation to text and finds the ranges of characters with loss (none if all weights are 0).

    Args:
      template: the chat template.
      conversation: the conversation.
      train_on: the parts with loss.
      where: its file and line, for errors.
      domain: its domain.

    Raises:
      UserError: the template fails, or the assistant's text cannot be located.
    """
    chosen = _counting(conversation, train_on, where)
    chosen = chosen[-1:] if train_on is TrainOn.EACH else chosen  # the others have documents of their own
    conversation = template.guarded(conversation)
    rendered = template.render(conversation, where, guard=False)
    spoken = chosen[0] if train_on is TrainOn.EACH and chosen else 0
    template.dropped_parts.check(conversation, rendered.text, where, thoughts_from=spoken)
    if train_on is TrainOn.ALL:
        ranges = [(0, len(rendered.text))]
    else:
        ranges = assistant_ranges(template, conversation, rendered, chosen, where) if chosen else []
    return Example(rendered.text, domain=domain, loss=tuple(ranges))


def _counting(conversation: Conversation, train_on: TrainOn, where: str) -> list[int]:
    """The indices of the messages with loss."""
    turns = [k for k, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if train_on is TrainOn.ALL:
        return list(range(len(conversation.messages)))
    if not turns:
        roles = ", ".join(message["role"] for message in conversation.messages)
        raise UserError(
            f"{where} has no message of the assistant (its roles: {roles}): remove it, or set "
            "ChatJsonlSource.train_on = 'all'"
        )
    chosen = turns[-1:] if train_on is TrainOn.LAST else turns
    return [k for k in chosen if _weight(conversation.messages[k], where)]


def _weight(message: Message, where: str) -> bool:
    weights = {name: message[name] for name in _WEIGHTS if name in message}
    for name, weight in weights.items():
        if weight not in (0, 1):
            raise UserError(f"{where}: {name} of a message must be 0 or 1, not {weight!r}")
    return all(weights.values())
