"""Renders conversations to prompts with a chat template, and finds the tokens that end an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import sys
from collections.abc import Mapping

import numpy as np

from capibara.core.types import UserError
from capibara.data.chat.conversations import TrainOn, render_example
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate, TemplateFails
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary, Vocabulary


@dataclasses.dataclass(frozen=True)
class Chat:
    """A tokenizer with its chat template."""

    vocabulary: Vocabulary
    template: ChatTemplate

    def ids(self, turn: str) -> list[int]:
        """The prompt for an answer to a user's turn; special tokens in the turn are encoded as plain text."""
        return self.ids_after(Conversation([{"role": "user", "content": turn}]), "the prompt")

    def ids_after(self, conversation: Conversation, where: str) -> list[int]:
        """The prompt for the next answer in a conversation; `where` names the conversation in errors.

        Raises:
          UserError: the template rejects it.
        """
        return self.ids_of(self.text_after(conversation, where))

    def text_after(self, conversation: Conversation, where: str) -> str:
        """The prompt's text.

        Raises:
          UserError: the template rejects it.
        """
        return self.template.render(conversation, where, add_generation_prompt=True).text

    def text_to_continue(self, conversation: Conversation, where: str) -> str:
        """The text up to the end of the last message's content, from where the model writes that message on.

        Raises:
          UserError: the template rejects it, or does not write the content as it is.
        """
        *before, last = conversation.messages
        mark = secrets.token_hex(8)
        marked = conversation._replace(messages=[*before, {**last, "content": f"{last['content']}{mark}"}])
        text, is_there, _ = self.template.render(marked, where).text.rpartition(mark)
        if not is_there:
            raise UserError(
                f"{where}: the chat template does not write the last message as it is: nothing can follow it"
            )
        return text

    def text_so_far(self, conversation: Conversation, where: str) -> str:
        """The text of the conversation, without the beginning of an answer; raises UserError: the template rejects it."""
        return self.template.render(conversation, where).text

    def ids_of(self, text: str) -> list[int]:
        """The token ids of a rendered prompt."""
        return self.vocabulary.encode_rendered(text)[0].tolist()

    def content_ids(self, text: str) -> list[int]:
        """The token ids of a text inside a message: special tokens that it spells are encoded as plain text."""
        guarded = self.template.guarded(Conversation([{"role": "user", "content": text}]))
        return self.ids_of(guarded.messages[0]["content"])

    def with_variables(self, variables: Mapping[str, object]) -> Chat:
        """The same chat, with more variables of its template."""
        changed = Chat(self.vocabulary, self.template.with_variables(variables))
        changed.__dict__["ends"] = self.ends  # which no variable changes
        return changed

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The special tokens with which the template ends an answer; may include the vocabulary's end token."""
        conversation = Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
        with contextlib.suppress(UserError):  # the template's answers cannot be located: the end token must do
            example = render_example(self.template, conversation, TrainOn.ASSISTANT, "an answer")
            ids, offsets = self.vocabulary.encode_rendered(example.text)
            assert example.loss is not None, "it is rendered"
            begin, end = example.loss[-1]
            inside = ids[(offsets[:, 1] > begin) & (offsets[:, 0] < end)]
            return tuple(int(i) for i in np.unique(inside) if not self.vocabulary.bytes_of([i]))
        return ()


def of_served(dataset: Dataset, template: ChatTemplate | None = None) -> Chat | None:
    """Like `of_run`, but warns on standard error and returns None if there is no usable template; tells how others begin."""
    if dataset.encoder_length is None:
        dataset.get_vocabulary().tell_beginning()
    try:
        talk = of_run(dataset, template=template)
        talk.ids("Hello")
    except TemplateFails as error:
        if error.is_bound:
            print(f"warning: no chat: {error}", file=sys.stderr, flush=True)
            return None
    except UserError as error:
        print(f"warning: no chat: {error}", file=sys.stderr, flush=True)
        return None
    return talk


def of_run(dataset: Dataset, flag: str = "--chat", *, template: ChatTemplate | None = None) -> Chat:
    """The run's tokenizer with the chat template of training, else with another one.

    Args:
      dataset: the run's data.
      flag: what needs the template, for errors.
      template: if training has none; None: the one beside the tokenizer.

    Raises:
      UserError: the run has no chat template.
    """
    vocabulary, trained = dataset.get_vocabulary(), getattr(dataset.source, "template", None)
    if trained is not None:
        return Chat(vocabulary, trained)
    if not isinstance(vocabulary, TokenizerJsonVocabulary):
        raise UserError(
            f"{flag} needs a tokenizer with a chat template, and Dataset.vocabulary is {type(vocabulary).__name__}: leave "
            "that out, or use a model whose tokenizer has one"
        )
    return Chat(vocabulary, template or ChatTemplate(tokenizer=vocabulary.folder))
