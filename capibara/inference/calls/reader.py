"""Splits the text of a model into answer, thoughts and calls, as it arrives."""

from __future__ import annotations

from collections.abc import Iterator

from capibara.inference.calls.forms.form import Form
from capibara.inference.calls.parsing.text import (
    Arguments,
    Broken,
    Call,
    Content,
    Event,
    Malformed,
    Reasoning,
    Steps,
    Text,
)
from capibara.inference.calls.parsing.tools import Tools
from capibara.inference.calls.reasoning import Tags


class Reader:
    """Reads one text.

    White space between thoughts, answer and calls is layout: it is no part of them.

    Args:
      form: of the calls; None: calls are text.
      tools: that may be called.
      tags: of the thoughts; None: they are text.
      thinks: whether the prompt ends inside a thought.

    Attributes:
      thinks: whether the text that was read ends inside a thought.
    """

    def __init__(self, form: Form | None, tools: Tools, tags: Tags | None, thinks: bool = False):
        self.thinks = thinks and tags is not None
        self._form, self._tools, self._tags = form, tools, tags
        self._text, self._spaces = Text(), _Spaces()
        self._steps = self._read()

    def add(self, text: str) -> list[Event]:
        """What the next piece of the text adds."""
        self._text.add(text)
        return [*self._advance()]

    def close(self) -> list[Event]:
        """What the end of the text adds."""
        self._text.ended = True
        return [*self._advance(), *self._spaces.rest()]

    def _advance(self) -> Iterator[Event]:
        for event in self._steps:
            if event is None:
                return
            self.thinks = isinstance(event, Reasoning)
            yield from self._spaces.without(event)

    def _read(self) -> Steps[None]:
        text, form, tags = self._text, self._form, self._tags
        calls, silent = (form.begins, form.silent) if form is not None else ((), ())
        silent += tags.answer if tags is not None else ()
        if self.thinks:
            yield from self._read_thought()
        is_start = True
        while True:
            if is_start:
                yield from self._read_start()
            marker = yield from text.until((*calls, *silent), Content, forget=True)
            if not marker:
                return
            is_start = marker in silent or (yield from self._read_calls(marker, text.at - len(marker)))

    def _read_start(self) -> Steps[None]:
        """Reads thoughts and a bare call, which begin a text or follow what is no answer: elsewhere they are text."""
        while True:
            start = self._text.at
            yield from self._text.spaces()
            tag = (yield from self._text.take(self._tags.open, self._tags.close)) if self._tags is not None else ""
            if self._tags is not None and tag == self._tags.open:
                yield from self._read_thought()
                continue
            if tag:  # the closing tag alone ends a thought without text
                yield Reasoning("")
                self.thinks = False
                continue
            bare = self._form.bare if self._form is not None else ()
            if bare and (marker := (yield from self._text.starts(*bare))):
                yield from self._read_calls(marker, start)
            else:
                self._text.at = start
            return

    def _read_thought(self) -> Steps[None]:
        assert self._tags is not None, "a thought has tags"
        self.thinks = True
        yield from self._text.until((self._tags.close,), Reasoning, forget=True)
        yield Reasoning("")  # also of a thought without text: what follows is an answer
        self.thinks = False

    def _read_calls(self, marker: str, start: int) -> Steps[bool]:
        """Reads calls, which begin at `start`, after their marker; what is malformed is content.

        Returns:
          Whether they are well-formed.
        """
        assert self._form is not None, "only forms have markers"
        text, last = self._text, None
        after = text.at + (marker in self._form.bare)
        accounted = sent = start
        try:
            for event in self._form.read(text, self._tools, marker):
                yield event
                if event is not None:
                    last, sent = event, text.at
                    accounted = accounted if isinstance(event, (Call, Arguments)) else sent
            return True
        except Malformed:
            if last is None:
                text.at = after  # other calls may follow
                yield Content(text.part(start))
            elif isinstance(last, (Call, Arguments)):
                yield Broken(text.part(accounted), text.part(sent))
            else:
                yield Content(text.part(accounted))
            return False


class _Spaces:
    """Drops white space at both ends of thoughts, and where an answer meets thoughts or calls."""

    def __init__(self) -> None:
        self._pending = self._before_call = ""
        self._before: type[Event] | None = None

    def without(self, event: Event) -> Iterator[Event]:
        """The event, with white space between it and the same before it, but without what ends it."""
        kind = type(event)
        if not isinstance(event, (Content, Reasoning)):
            if isinstance(event, Call):
                self._before_call = self._pending
            elif isinstance(event, Broken):  # the call is a part of the answer
                event = Broken(self._before_call + event.text, self._before_call + event.rest)
            self._pending, self._before = "", Content if kind is Broken else kind
            yield event
            return
        is_first = self._before is None and kind is Content
        text = self._pending + event.text if kind is self._before or is_first else event.text.lstrip()
        solid = text.rstrip()
        self._pending = text[len(solid) :]
        if solid or not event.text:
            self._before = kind
        if solid:
            yield Content(solid) if kind is Content else Reasoning(solid)

    def rest(self) -> Iterator[Event]:
        """White space at the end of an answer."""
        if self._pending and self._before in (Content, None):
            yield Content(self._pending)
