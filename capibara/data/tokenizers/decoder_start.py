"""The first input of an encoder-decoder's decoder, which stands in files beside its tokenizer."""

from __future__ import annotations

import os

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.tokenizers.files import GENERATION_FILE, MODEL_FILE, START_ID, folder_of, read_json
from capibara.data.tokenizers.vocabulary import Vocabulary


def start_id(vocabulary: Vocabulary) -> int:
    """The token with which decoding begins, of generation_config.json, else of config.json; padding where neither says it.

    Raises:
      UserError: a file cannot be read, or has no token's number there.
    """
    path = getattr(vocabulary, "path", None)
    if path is None:
        return vocabulary.pad_id
    folder = folder_of(path)
    for name in (GENERATION_FILE, MODEL_FILE):
        stated = (read_json(os.path.join(folder, name)) or {}).get(START_ID)
        if stated is None:
            continue
        if type(stated) is not int or not 0 <= stated < vocabulary.size:
            raise UserError(
                f"{os.path.join(folder, name)} has {START_ID} = {limits.shortened(stated)}, must be a token's number below "
                f"{vocabulary.size}: correct it"
            )
        return stated
    return vocabulary.pad_id
