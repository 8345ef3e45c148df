"""A model's configuration as Gin text."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

from capibara.config import written
from capibara.core import limits
from capibara.data.tokenizers.files import CONFIG_FILE, named
from capibara.models.api import EncoderConfig, EncoderDecoderConfig, TransformerConfig


def run(config: TransformerConfig, folder: str, tokenizer: Mapping[str, bytes], length: int = 1024) -> str:
    """A run file for the model in `folder`: enough to sample from it, and to start a new run from it.

    Args:
      tokenizer: tokenizer files in the folder.
      length: tokens of a row, if the model allows that many.
    """
    own = type(config).__name__
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
        [f"Trainer.model_dir = {json.dumps(folder)}", "Trainer.steps = 1", f"Trainer.model = @{own}()"],
        ["Trainer.plan = @Plan()", "Plan.batch_size = 8", "Trainer.optimizer = @Optimizer()"],
        ["Trainer.dataset = @Dataset()", *data],
        _vocabulary(folder, tokenizer, isinstance(config, EncoderConfig)),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _vocabulary(folder: str, tokenizer: Mapping[str, bytes], masked: bool) -> list[str]:
    if "tokenizer.json" not in tokenizer:
        for name in ("tokenizer.model", "spiece.model"):
            if name in tokenizer:
                path = json.dumps(os.path.join(os.path.abspath(folder), name))
                return _bound("SentencePieceVocabulary", {"path": path, "size_multiple": "1"})
        return ["Dataset.vocabulary = @ByteVocabulary()  # the model came without a tokenizer"]
    values = {"path": json.dumps(os.path.join(os.path.abspath(folder), "tokenizer.json")), "size_multiple": "1"}
    about: dict[str, str] = {}
    with contextlib.suppress(ValueError):
        values_of = limits.parse_json(tokenizer.get(CONFIG_FILE, b"{}"))
        about = named(values_of) if isinstance(values_of, dict) else {}
    for name in ("bos_token", "eos_token", "pad_token", *(["mask_token"] if masked else [])):
        if token := about.get(name):
            values[name] = json.dumps(token)
    return _bound("TokenizerJsonVocabulary", values)


def _bound(kind: str, values: Mapping[str, str]) -> list[str]:
    return [f"Dataset.vocabulary = @{kind}()", *(f"{kind}.{name} = {value}" for name, value in values.items())]
