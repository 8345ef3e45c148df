"""Finds the parts of a conversation that a chat template leaves out of its text."""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation

_TRAIN_THOUGHTS = "train on each turn alone (ChatJsonlSource.train_on = 'each') "
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class Dropped(enum.StrEnum):
    """What happens if a template leaves out a part of a conversation: a warning with counts, or an error."""

    WARN = "warn"
    REFUSE = "refuse"


class DroppedParts:
    """Counts the conversations of which a template has left out parts, and warns of the 1st, 10th, 100th, ...

    Args:
      policy: what happens then.
    """

    def __init__(self, policy: Dropped):
        self._policy = policy
        self._rendered, self._counts = 0, collections.Counter[str]()

    def check(self, conversation: Conversation, text: str, where: str, thoughts_from: int = 0) -> None:
        """Compares a conversation with its rendered text.

        Args:
          conversation: what was rendered.
          text: what became of it.
          where: its file and line.
          thoughts_from: the first message whose thoughts have to be in the text.

        Raises:
          UserError: a part is not in the text, and that is refused.
        """
        self._rendered += 1
        for part in dict.fromkeys(dropped(conversation, text, thoughts_from)):
            self._counts[part] += 1
            if self._policy is Dropped.REFUSE:
                raise UserError(
                    f"{where}: the chat template leaves out {part}: use a template with it, remove it from the data, "
                    f"{_TRAIN_THOUGHTS if 'thought' in part else ''}or set ChatTemplate.dropped = 'warn'"
                )
            if (count := self._counts[part]) == 10 ** (len(str(count)) - 1):
                line = "%s: the chat template leaves out %s; so far of %d conversations of %d rendered ones"
                logging.getLogger(__name__).warning(
                    f"{line} (ChatTemplate.dropped)", where, part, count, self._rendered
                )


def dropped(conversation: Conversation, text: str, thoughts_from: int = 0) -> Iterator[str]:
    """The parts of a conversation that are not in its text, which may have other white space or JSON's escapes."""
    text = _plain(text)
    if conversation.tools and not any(_names(tool) in text for tool in conversation.tools):
        yield "the tools"
    for number, message in enumerate(conversation.messages):
        role, content = message["role"], message["content"]
        thoughts = [*_THOUGHT.findall(content), *filter(None, [message.get("reasoning_content")])]
        if number >= thoughts_from and not all(_plain(thought) in text for thought in thoughts):
            yield f"a thought (<think>) of a message of the {role}"
        if not _has_content(text, content):
            yield f"the content of a message of the {role}"
        if not all(_names(call) in text for call in message.get("tool_calls", ())):
            yield f"a tool call of a message of the {role}"


def unread(conversation: Conversation, text: str, render: Callable[[Conversation], str]) -> list[int]:
    """The numbers of the messages whose contents a template does not read.

    It may write a content in another way, such as with HTML's escapes or without what is before </think>. So contents
    that are not in the text are rendered once more, as words that each template leaves as they are.

    Args:
      conversation: what was rendered.
      text: what became of it.
      render: the template.
    """
    text = _plain(text)
    missing = [
        number for number, message in enumerate(conversation.messages) if not _has_content(text, message["content"])
    ]
    words = {number: f"content{number}of{len(conversation.messages)}" for number in missing}
    messages = [
        {**message, "content": words[number]} if number in words else message
        for number, message in enumerate(conversation.messages)
    ]
    with contextlib.suppress(UserError):  # a template that refuses another content reads it
        text = render(conversation._replace(messages=messages)) if missing else text
        return [number for number in missing if words[number] not in text]
    return []


def _has_content(text: str, content: str) -> bool:
    return all(_plain(part) in text for part in _THOUGHT.split(content)[::2])


def _names(tool: Mapping[str, Any]) -> str:
    return _plain(str((tool.get("function") or tool).get("name", "")))


def _plain(text: str) -> str:
    """Without white space, backslashes and their n and t: equal for a text and its spelling in JSON or HTML's quotes."""
    return re.sub(r'\\[nt]|[\s\\"]', "", text)
