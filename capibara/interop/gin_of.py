"""A model's configuration as Gin text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from capibara.config import written
from capibara.data.tokenizers.files import SENTENCEPIECE_FILES, TOKENIZER_FILE
from capibara.models.api import EncoderDecoderConfig, TransformerConfig


def run(config: TransformerConfig, folder: str, tokenizer: Mapping[str, bytes], length: int = 1024) -> str:
    """A run file for the model in `folder`: enough to sample from it, and to start a new run from it.

    Args:
      tokenizer: tokenizer files in the folder.
      length: tokens of a row, if the model allows that many.
    """
    class_name = type(config).__name__
    length = min(length, config.max_length or length)
    data = [f'Dataset.kind = "{config.data_kind}"', f"Dataset.length = {length}", "Dataset.source = @StdlibSource()"]
    if isinstance(config, EncoderDecoderConfig):
        data.append(f"Dataset.encoder_length = {length}")
    parts = [
        [
            "# The model alone, in checkpoints/0. A new run starts from it with",
            f"#   Trainer.init_from = {json.dumps(folder)}",
        ],
        written.bindings(config),
        [f"Trainer.model_dir = {json.dumps(folder)}", "Trainer.steps = 1", f"Trainer.model = @{class_name}()"],
        ["Trainer.plan = @Plan()", "Plan.batch_size = 8", "Trainer.optimizer = @Optimizer()"],
        ["Trainer.dataset = @Dataset()", *data],
        _vocabulary(folder, tokenizer),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _vocabulary(folder: str, tokenizer: Mapping[str, bytes]) -> list[str]:
    folder = os.path.abspath(folder)
    if TOKENIZER_FILE in tokenizer:  # with what the files beside it say
        return _bound("TokenizerJsonVocabulary", {"path": json.dumps(folder), "size_multiple": "1"})
    for name in SENTENCEPIECE_FILES:
        if name in tokenizer:
            path = json.dumps(os.path.join(folder, name))
            return _bound("SentencePieceVocabulary", {"path": path, "size_multiple": "1"})
    return ["Dataset.vocabulary = @ByteVocabulary()  # the model came without a tokenizer"]


def _bound(kind: str, values: Mapping[str, str]) -> list[str]:
    return [f"Dataset.vocabulary = @{kind}()", *(f"{kind}.{name} = {value}" for name, value in values.items())]
