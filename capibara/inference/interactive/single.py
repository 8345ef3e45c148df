"""One prompt, from a flag or standard input, and what is printed for it."""

from __future__ import annotations

import json
import sys

from capibara.inference.engine.engine import Engine
from capibara.inference.interactive import files
from capibara.inference.interactive.chat import Chat
from capibara.inference.interactive.files import Prompt
from capibara.inference.sample import beyond_length
from capibara.inference.thinking.answering import Thinker


def answer(
    engine: Engine, prompt: Prompt, chat: Chat | None, thinker: Thinker | None, length: int, encoder_length: int | None
) -> None:
    """Prints the text of a prompt, and notes on it to standard error.

    Args:
      engine: generates the text.
      prompt: the prompt.
      chat: renders it as a user's turn; None: it is continued.
      thinker: chooses the text among several; None: one is generated.
      length, encoder_length: of the model, in tokens.
    """
    before = "" if encoder_length or chat else prompt.text
    if thinker is not None:
        [item] = files.thought(engine, [prompt], chat, thinker)
        print(before + item["text"])
        how = json.dumps(item["thinking"], ensure_ascii=False)
        print(f"{item['texts']} texts, {item['tokens']} tokens: {how}", file=sys.stderr)
        return
    inputs, ends = (chat.ids(prompt.text), chat.ends) if chat else (prompt.text, ())
    result = engine.submit(inputs, prompt.sampling, ends=ends, adapter=prompt.adapter).result()
    print(files.shown(result, before))
    print(beyond_length(result, prompt.sampling, length, encoder_length), end="", file=sys.stderr)
