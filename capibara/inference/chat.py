"""A user's turn as a model that was trained on conversations reads it."""

from __future__ import annotations

import os
from collections.abc import Callable

from capibara import config
from capibara.data.chat import ChatJsonlSource
from capibara.data.chat_formats import Conversation
from capibara.data.chat_template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.vocabulary import TokenizerJsonVocabulary
from capibara.types import UserError


def renderer(dataset: Dataset) -> Callable[[str], list[int]]:
    """What makes ids of a user's turn: the template that the run was trained with, or that beside its tokenizer.

    A turn that spells a special token has its letters, not its id.

    Args:
      dataset: of the run.

    Raises:
      UserError: the run has no chat template.
    """
    vocabulary, source = dataset.get_vocabulary(), dataset.source
    if isinstance(source, ChatJsonlSource):
        template = source.template
    elif isinstance(vocabulary, TokenizerJsonVocabulary):
        folder = vocabulary.path if os.path.isdir(vocabulary.path) else os.path.dirname(vocabulary.path)
        template = config.build(
            ChatTemplate, **({} if config.is_bound("ChatTemplate.tokenizer") else {"tokenizer": folder})
        )
    else:
        raise UserError(
            f"--chat needs a tokenizer with a chat template, and Dataset.vocabulary is {type(vocabulary).__name__}: leave "
            "--chat out, or use a model whose tokenizer has one"
        )

    def ids(turn: str) -> list[int]:
        conversation = Conversation([{"role": "user", "content": turn}])
        text = template.render(conversation, "the prompt", add_generation_prompt=True).text
        return vocabulary.encode_rendered(text)[0].tolist()

    return ids
