"""The calibration text of a quantization, as rows of tokens."""

from __future__ import annotations

import codecs
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.chat.formats import read_conversation
from capibara.data.chat.template import ChatTemplate
from capibara.data.text import disk
from capibara.data.tokenizers.files import TOKENIZER_FILE
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary, Vocabulary
from capibara.storage import packed

_CHARACTERS_PER_TOKEN = 16  # more than any tokenizer's average: enough text to read


def rows(
    path: str, tokenizer: Mapping[str, bytes], vocabulary: Vocabulary | None, *, length: int, most: int
) -> np.ndarray:
    """Tokens [R, length] of a text: its documents, each with the end token, concatenated.

    Args:
      path: a .jsonl file whose lines are objects with a `text`, or conversations (data.chat); any other file is one
        text.
      tokenizer: files of the model's tokenizer, by name.
      vocabulary: the model's; None: that of tokenizer.json.
      length: of a row.
      most: most rows.

    Raises:
      UserError: the file cannot be read, or has less than one row.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in tokenizer.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)
        if vocabulary is None:
            if TOKENIZER_FILE not in tokenizer:
                raise UserError(f"--calibration={path} needs the model's tokenizer: put {TOKENIZER_FILE} beside it")
            with _tokenizer_errors(folder):
                vocabulary = TokenizerJsonVocabulary(path=folder)
        tokens: list[int] = []
        with _tokenizer_errors(folder):
            for document in _documents(path, folder, vocabulary, length * most * _CHARACTERS_PER_TOKEN):
                tokens += [*document, vocabulary.eos_id]
                if len(tokens) >= length * most:
                    break
    count = min(len(tokens) // length, most)
    if not count:
        raise UserError(
            f"--calibration={path} has {len(tokens)} tokens, must have at least {length}, better {length * most}: add text"
        )
    return np.asarray(tokens[: count * length], np.int32).reshape(count, length)


@contextlib.contextmanager
def _tokenizer_errors(folder: str) -> Iterator[None]:
    """Attributes errors in the copied tokenizer to the model that it came from."""
    try:
        yield
    except UserError as error:
        if folder not in str(error):
            raise
        message, _, _ = str(error).replace(folder, TOKENIZER_FILE).partition(": name it with")
        raise UserError(
            f"the tokenizer of --from cannot be used: {message}: put the model's own files beside it"
        ) from None


def _documents(path: str, folder: str, vocabulary: Vocabulary, characters: int) -> Iterator[list[int]]:
    try:
        if not packed.plain_name(path).endswith(disk.RECORDS.endings):
            yield vocabulary.encode(_beginning(path, characters))
            return
        for number, line in packed.lines(path):
            yield _of_record(line, f"{path}:{number}", folder, vocabulary)
    except (OSError, UnicodeDecodeError, packed.Unreadable) as error:
        raise UserError(
            f"--calibration={path} cannot be read ({error}): name a text file in UTF-8, or .jsonl"
        ) from None


def _beginning(path: str, characters: int) -> str:
    """The first characters of a text, at least so many if it has them."""
    text = ""
    with limits.opened(path) as file:
        for part in codecs.iterdecode(packed.blocks(file, path), "utf-8-sig"):
            text += part.replace("\r\n", "\n")
            if len(text) >= characters:
                break
    return text[:characters]


def _of_record(line: bytes, where: str, folder: str, vocabulary: Vocabulary) -> list[int]:
    try:
        record = limits.parse_json(line, finite=False)
    except ValueError as error:
        raise UserError(f"{where} is no JSON ({error}): each line must be an object") from None
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return vocabulary.encode(record["text"])
    if not os.path.exists(os.path.join(folder, TOKENIZER_FILE)):
        raise UserError(
            f"{where} is a conversation, and --from has no {TOKENIZER_FILE} with a template: use plain texts"
        )
    rendered = ChatTemplate(tokenizer=folder).render(read_conversation(record, where), where)
    return vocabulary.encode_rendered(rendered.text)[0].tolist()
