"""A conversation as a model that was trained on some reads it, and where its answer ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os

import numpy as np

from capibara import config
from capibara.data.chat import TrainOn, render_example
from capibara.data.chat_formats import Conversation
from capibara.data.chat_template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.vocabulary import TOKENIZER_FILE, TokenizerJsonVocabulary, Vocabulary
from capibara.types import UserError


@dataclasses.dataclass(frozen=True)
class Chat:
    """A tokenizer with its chat template."""

    vocabulary: Vocabulary
    template: ChatTemplate

    def ids(self, turn: str) -> list[int]:
        """The prompt for an answer to a user's turn; where the turn spells a special token it has its letters."""
        return self.ids_after(Conversation([{"role": "user", "content": turn}]), "the prompt")

    def ids_after(self, conversation: Conversation, where: str) -> list[int]:
        """The prompt for the answer that follows a conversation; `where` names it in errors.

        Raises:
          UserError: the template refuses it.
        """
        text = self.template.render(conversation, where, add_generation_prompt=True).text
        return self.vocabulary.encode_rendered(text)[0].tolist()

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The special tokens with which the template ends an answer; models have an end token besides, or the same."""
        said = Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
        with contextlib.suppress(UserError):  # a template that answers cannot be told in: there is the end token
            example = render_example(self.template, said, TrainOn.ASSISTANT, "an answer")
            ids, offsets = self.vocabulary.encode_rendered(example.text)
            begin, end = example.loss[-1]
            inside = ids[(offsets[:, 1] > begin) & (offsets[:, 0] < end)]
            return tuple(int(i) for i in np.unique(inside) if not self.vocabulary.bytes_of([i]))
        return ()


def template_of(dataset: Dataset) -> ChatTemplate | None:
    """The template that a run was trained with, or that beside its tokenizer; None: there is none."""
    template, vocabulary = getattr(dataset.source, "template", None), dataset.get_vocabulary()
    if template is not None or not isinstance(vocabulary, TokenizerJsonVocabulary):
        return template
    given = {} if config.is_bound("ChatTemplate.tokenizer") else {"tokenizer": vocabulary.folder}
    if given and not os.path.exists(os.path.join(vocabulary.folder, TOKENIZER_FILE)):
        return None
    template = config.build(ChatTemplate, **given)
    return template if template.is_there else None


def of(vocabulary: Vocabulary, template: ChatTemplate | None) -> Chat:
    """A model's own.

    Raises:
      UserError: it has no template.
    """
    if template is None:
        kind = type(vocabulary).__name__
        raise UserError(
            f"chat needs a tokenizer with a chat template, and the model's ({kind}) has none: use a model whose tokenizer "
            "has one, or set ChatTemplate.template"
        )
    return Chat(vocabulary, template)
