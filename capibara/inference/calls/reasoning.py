"""Tags around a model's thoughts."""

from __future__ import annotations

import enum
from typing import NamedTuple

from capibara.inference.calls.forms.form import Evidence


class ReasoningIn(enum.StrEnum):
    """Where thoughts are in a reply: apart in `reasoning_content`, or inline in the content, as the model wrote them."""

    APART = "apart"
    INLINE = "inline"


class Tags(NamedTuple):
    """Around a thought.

    Attributes:
      open: before it.
      close: after it.
      answer: what may stand around the answer after it.
      others: further pairs that a prompt may open instead.
      token: a special token by which a template shows them; empty: `close`.
    """

    open: str
    close: str
    answer: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    token: str = ""

    def after(self, prompt: str) -> Tags:
        """The pair that a prompt has opened last."""
        pairs = ((self.open, self.close), *self.others)
        pair = next((pair for pair in pairs if prompt.rstrip().endswith(pair[0].rstrip())), pairs[0])
        return self._replace(open=pair[0], close=pair[1])


_TAGS = (
    Tags("<think>", "</think>", ("<response>", "</response>")),  # of most; Granite 3.3 and Ernie 4.5 have the others
    Tags("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Tags("<seed:think>", "</seed:think>"),
    # Command R7B and Command A.
    Tags(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Tags("<|channel>thought\n", "<channel|>"),  # Gemma 4
    Tags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Tags("<mm:think>", "</mm:think>"),  # MiniMax M3
    Tags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    # K2 Horizon, by its effort
    Tags(
        "<ifm|think>",
        "</ifm|think>",
        others=(("<ifm|think_fast>", "</ifm|think_fast>"), ("<ifm|think_faster>", "</ifm|think_faster>")),
    ),
    # Kimi K3, whose template puts its tags together
    Tags(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        token="<|close|>",
    ),
    Tags("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    Tags("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel
)


def tags_of(model: Evidence) -> Tags | None:
    """The tags of a model's thoughts; None: its template has none that is known."""
    for tags in _TAGS:
        if tags.token and model.mentions(tags.token):
            return tags
        if model.mentions(tags.close) or (model.has_token(tags.open) and model.has_token(tags.close)):
            return tags._replace(answer=tuple(mark for mark in tags.answer if model.mentions(mark)))
    return None
