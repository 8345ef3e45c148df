"""The loss mask of a rendered conversation: the characters that the assistant generates.

At inference the assistant gets the text before its turn with the template's generation prompt, and generates the rest of
the turn up to the special tokens that end it. If the template marks this text with {% generation %} blocks, they are used,
provided that the last one includes such an end. Otherwise both ends are found by rendering variants of the conversation,
and an error is raised if these do not agree with the text:

- The turn begins where the generation prompt ends, as the template renders it after the messages before the turn. If that
  is not a prefix of the text (some templates drop earlier reasoning, or put the tools before the last question), the
  text after the message before the turn must agree.
- The message's text ends where the rendered text stops to depend on it: its last words are changed, and the common suffix
  of the two texts belongs to the template. The first special tokens of the suffix end the turn, if they are also there
  when the conversation ends with this turn; otherwise they would belong to the next message.

So reasoning that a template drops from earlier turns is in neither the text nor the ranges, and text that a template adds
to a turn (the <think></think> of Qwen3) has loss unless the generation prompt contains it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation, Message
from capibara.data.chat.template import AfterTurn, ChatTemplate, Rendered, TemplateFails

Range = tuple[int, int]
# Each turn needs a few renderings of all messages; beyond this limit they take about ten seconds.
_MOST_WORK, _PER_MESSAGE = 1_000_000, 1000
_FIX = "mark the assistant's text with {% generation %} blocks in ChatTemplate.template"


def assistant_ranges(
    template: ChatTemplate, conversation: Conversation, rendered: Rendered, chosen: Sequence[int], where: str
) -> list[Range]:
    """The ranges of characters that the assistant generates, including the end of each turn.

    Args:
      template: the chat template.
      conversation: the conversation, guarded (`ChatTemplate.guarded`).
      rendered: the conversation as the template renders it, without a generation prompt.
      chosen: indices of the assistant's messages with loss, ascending.
      where: file and line, for errors.

    Returns:
      Half-open ranges of `rendered.text`, ascending, none empty.

    Raises:
      UserError: the ends of a turn cannot be found with certainty.
    """
    messages = len(conversation.messages)
    if rendered.generated is None and len(chosen) * max(messages, len(rendered.text) / _PER_MESSAGE) > _MOST_WORK:
        raise UserError(
            f"{where} has {messages} messages and {len(rendered.text)} characters, too many to find the assistant's text in "
            f"{len(chosen)} of them: split it, or {_FIX}"
        )
    finder = _Finder(template, conversation, rendered, where)
    if rendered.generated is not None:
        ranges = finder.generated(chosen)
    else:
        ranges = [finder.turn(k) for k in chosen]
    stop = 0
    for first, last in ranges:
        if not stop <= first < last:
            raise UserError(f"{where}: the template does not keep the order of the messages: {_FIX}")
        stop = last
    return ranges


class _Finder:
    """Renders parts and variants of one conversation."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, rendered: Rendered, where: str):
        self._template, self._where = template, where
        self._conversation, self._messages = conversation, conversation.messages
        self._rendered, self._text = rendered, rendered.text
        words = map("Qz{0}qYw{0}".format, range(10**6, 10**7))
        self._probes = list(itertools.islice((word for word in words if word not in self._text), 2))
        self._ready: list[tuple[Sequence[Message], bool, Rendered | TemplateFails]] = []

    def generated(self, chosen: Sequence[int]) -> list[Range]:
        """The {% generation %} blocks of the chosen messages."""
        assert self._rendered.generated is not None
        ranges = list(self._rendered.generated)
        turns = [k for k, message in enumerate(self._messages) if message["role"] == "assistant"]
        if list(chosen) != turns:
            # A message's blocks are those that appear when it is added to the conversation.
            spans = [(self._blocks(k), self._blocks(k + 1)) for k in chosen]
            ranges = [item for first, stop in spans for item in ranges[first:stop]]
        ranges = [(first, last) for first, last in ranges if first < last]
        if not ranges:
            raise UserError(
                f"{self._where}: the template's {{% generation %}} blocks are empty: put them around the assistant's text"
            )
        if self._template.turn_ends.search(self._text, *ranges[-1]) is None:
            raise UserError(
                f"{self._where}: the template's {{% generation %}} block ends before the end of the turn, which is "
                f"{_shown(self._text[ranges[-1][1] :])}: a model that learns this never stops; move {{% endgeneration %}} "
                "after it, or set ChatTemplate.end_of_turn"
            )
        return ranges

    def _blocks(self, count: int) -> int:
        if not count:
            return 0
        generated = self._render(self._messages[:count]).generated
        assert generated is not None, "the template has such blocks"
        return len(generated)

    def turn(self, k: int) -> Range:
        """The range of characters that the assistant generates for message `k`."""
        self._prepare(k)
        start, end = self._start(k), self._said_until(k)
        if end < start:
            raise self._not_found(k, "it comes before the generation prompt")
        self._check_said(k, self._text[start:end])
        return start, self._end(k, end)

    def _prepare(self, k: int) -> None:
        """Renders the variants that message `k` nearly always needs in one batch."""
        messages = self._messages
        prompts = [(_replaced(messages, k, changed), False) for changed in _variants(messages[k], self._probes)]
        if k:
            prompts.append((messages[:k], True))
        if k + 1 < len(messages):
            prompts.append((messages[: k + 1], False))
        result = self._template.render_each(
            [(self._conversation._replace(messages=[*m]), prompt) for m, prompt in prompts], self._where
        )
        self._ready = [(m, prompt, item) for (m, prompt), item in zip(prompts, result, strict=True)]

    def _start(self, k: int) -> int:
        if not k:
            raise UserError(
                f"{self._where} begins with a message of the assistant: put a message of the user before it"
            )
        prompt = self._render(self._messages[:k], add_generation_prompt=True).text
        if self._text.startswith(prompt):
            return len(prompt)
        before = self._messages[k - 1]
        if before.get("tool_calls"):
            raise self._not_found(k, "its generation prompt is not a prefix of the text")
        changed, probe = _with_probe(before, self._probes)
        whole = self._render(_replaced(self._messages, k - 1, changed)).text
        alone = self._render(_replaced(self._messages[:k], k - 1, changed), add_generation_prompt=True).text
        if whole.count(probe) != 1 or alone.count(probe) != 1:
            times = f"{whole.count(probe)} times in the text, {alone.count(probe)} times in its prompt"
            raise self._not_found(k, f"the message before it is {times}")
        follows, prompt = whole.partition(probe)[2], alone.partition(probe)[2]
        if not follows.startswith(prompt) or not self._text.endswith(follows):
            raise self._not_found(k, f"the generation prompt is {_shown(prompt)}, but the text has {_shown(follows)}")
        return len(self._text) - len(follows) + len(prompt)

    def _said_until(self, k: int) -> int:
        """The position from which the text does not depend on message `k`."""
        return len(self._text) - self._unchanged(self._messages, k, self._text)

    def _unchanged(self, messages: Sequence[Message], k: int, text: str) -> int:
        """The length of the suffix of `text`, rendered from `messages`, that does not depend on message `k`'s end."""
        lengths = []
        for changed in _variants(messages[k], self._probes):
            other = self._render(_replaced(messages, k, changed)).text
            if other != text:
                lengths.append(_common_end(text, other))
        if not lengths and messages[k].get("tool_calls"):
            raise UserError(
                f"{self._where}: the template omits the tool calls of message {k}: set ChatTemplate.template to one that "
                "renders them, or use conversations without tools"
            )
        if not lengths:
            raise self._not_found(k, "the template omits it")
        return min(lengths)

    def _check_said(self, k: int, text: str) -> None:
        message = self._messages[k]
        content = message["content"]
        # A reasoning template splits the content, and may move the parts or omit the first.
        parts = [content.strip(), content.rpartition("</think>")[2].strip()]
        calls = message.get("tool_calls", ())
        if calls:
            parts = [""]  # Llama 3.1's template omits the content of a message with a tool call
        if not any(part in text for part in parts) or not all(call["function"]["name"] in text for call in calls):
            raise self._not_found(k, f"the text has {_shown(text)} instead")

    def _end(self, k: int, at: int) -> int:
        follows = self._text[at:]
        if k + 1 < len(self._messages):
            messages = self._messages[: k + 1]
            alone = self._render(messages).text
            if alone[:at] == self._text[:at]:
                rest = alone[at:]
            else:
                rest = alone[len(alone) - self._unchanged(messages, k, alone) :]
            follows = follows[: _common_beginning(follows, rest)]
        result, turn_end = self._template.turn_ends.search(follows), self._template.end_of_turn
        if result is None and turn_end is not None and self._text.startswith(turn_end, at):
            return at + len(turn_end)  # gpt-oss: <|end|>, and <|return|> after the last turn
        if result is None:
            raise UserError(
                f"{self._where}: no special token ends message {k}, the text has {_shown(self._text[at:])} after it: "
                "a model that learns this never stops; set ChatTemplate.end_of_turn, or add one to the template"
            )
        end = at + result.end()
        if self._template.after_turn is AfterTurn.ALL and k + 1 == len(self._messages):
            return len(self._text)
        said_too = self._template.after_turn is not AfterTurn.NOTHING
        return end + (said_too and follows[result.end() :].startswith("\n"))

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> Rendered:
        for known, prompt, result in self._ready:
            if prompt == add_generation_prompt and known == messages:
                if isinstance(result, TemplateFails):
                    raise result
                return result
        return self._template.render(
            self._conversation._replace(messages=list(messages)),
            self._where,
            add_generation_prompt=add_generation_prompt,
            guard=False,
        )

    def _not_found(self, k: int, reason: str) -> UserError:
        return UserError(f"{self._where}: the assistant's text of message {k} cannot be located ({reason}): {_FIX}")


def _variants(message: Message, probes: Sequence[str]) -> list[Message]:
    """Variants of the message with other last words, of its content or of its last tool call, which may end with its id."""
    if not message.get("tool_calls"):
        return [_with_probe(message, probes)[0]]
    *calls, last = message["tool_calls"]
    other = {"function": {**last["function"], "arguments": {probes[0]: probes[1]}}}
    renamed = {"id": probes[0][:9]}  # 9 letters and digits, as Mistral's templates require
    variants = [{**message, "tool_calls": [*calls, {**last, **change}]} for change in (other, renamed)]
    return [*variants, _with_probe(message, probes)[0]] if message["content"] else variants


def _with_probe(message: Message, probes: Sequence[str]) -> tuple[Message, str]:
    """The message with a word appended to its content that ends differently, and the word."""
    content = message["content"].rstrip()
    probe = next(probe for probe in probes if not content.endswith(probe[-1]))
    return {**message, "content": content + probe}, probe


def _replaced(messages: Sequence[Message], k: int, message: Message) -> list[Message]:
    return [*messages[:k], message, *messages[k + 1 :]]


def _common_end(first: str, second: str) -> int:
    return _longest(min(len(first), len(second)), lambda n: first[len(first) - n :] == second[len(second) - n :])


def _common_beginning(first: str, second: str) -> int:
    return _longest(min(len(first), len(second)), lambda n: first[:n] == second[:n])


def _longest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest n up to `limit` for which a monotone condition holds, by bisection."""
    low = 0
    while low < limit:
        middle = (low + limit + 1) // 2
        if holds(middle):
            low = middle
        else:
            limit = middle - 1
    return low


def _shown(text: str) -> str:
    shown = repr(text[:60])
    return shown if len(text) <= 60 else f"{shown}..."
