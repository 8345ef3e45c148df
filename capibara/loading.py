"""A model to use, from wherever it lies: a run folder of ours, a Hugging Face folder or a .gguf file."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from capibara import config
from capibara.data.chat import ChatJsonlSource
from capibara.data.chat_template import ChatTemplate
from capibara.data.vocabulary import TOKENIZER_FILE, SentencePieceVocabulary, TokenizerJsonVocabulary, Vocabulary
from capibara.interop import checkpoint, hf_config
from capibara.models import api
from capibara.training import run_folder
from capibara.types import Params, UserError

# A foreign model may see much more; a slot takes memory for all of it.
_FOREIGN_LENGTH = {api.EncoderDecoderConfig: 512}
_LENGTH = 2048


class Loaded(NamedTuple):
    """What it takes to use a model.

    Attributes:
      model: without adapters.
      params: on one device, adapters merged into them.
      vocabulary: its tokenizer.
      template: its chat template; None: it has none.
      length: tokens of a row: as in training, or of a foreign model at most 2048.
      encoder_length: the same of an encoder-decoder's encoder; else None.
      name: of the folder or file.
    """

    model: api.Model
    params: Params
    vocabulary: Vocabulary
    template: ChatTemplate | None
    length: int
    encoder_length: int | None
    name: str


def load(
    path: str, gin_files: Sequence[str] = (), bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> Loaded:
    """Loads a model; Gin knows its run's configuration (of a foreign model none), `gin_files` and `bindings` then.

    Args:
      path: a run folder (its newest checkpoint, averaged where it keeps an average), a Hugging Face folder with its
        tokenizer, or a .gguf file.

    Raises:
      UserError: it is none of these, cannot be read, or has no tokenizer.
    """
    name = os.path.basename(os.path.normpath(path)).removesuffix(".gguf")
    if not path.endswith(".gguf") and run_folder.is_run(path):
        trainer, model, params = run_folder.load(path, gin_files, bindings, search_paths)
        data = trainer.dataset
        vocabulary, template = data.get_vocabulary(), None
        if isinstance(data.source, ChatJsonlSource):
            template = data.source.template
        elif isinstance(vocabulary, TokenizerJsonVocabulary):
            template = _template(vocabulary.folder)
        return Loaded(model, params, vocabulary, template, data.length, data.encoder_length, name)
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "config.json")):
        raise UserError(f"{path} is neither a run folder (config.gin) nor a Hugging Face folder (config.json)")
    config.parse(gin_files, bindings, search_paths)
    foreign = checkpoint.open_model(path)
    # bfloat16 is slow on CPUs.
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = api.build(hf_config.from_hf(foreign.config, dtype=dtype))
    folder = path if os.path.isdir(path) else _written(foreign.tokenizer)
    vocabulary, template = _vocabulary(path, folder, foreign.tokenizer), _template(folder)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: here, model.abstract_params)
    params = checkpoint.load_params(foreign, model, shardings, dtype=jax.numpy.dtype(dtype))
    seen = model.config.max_length or hf_config.text_part(foreign.config).get("max_position_embeddings") or _LENGTH
    length = min(int(seen), _FOREIGN_LENGTH.get(type(model.config), _LENGTH))
    encoder_length = length if isinstance(model.config, api.EncoderDecoderConfig) else None
    return Loaded(model, params, vocabulary, template, length, encoder_length, name)


def _written(files: Mapping[str, bytes]) -> str:
    """A folder with these files, for as long as the process lives."""
    folder = tempfile.mkdtemp(prefix="capibara-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in files.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    return folder


def _vocabulary(path: str, folder: str, files: Mapping[str, bytes]) -> Vocabulary:
    if TOKENIZER_FILE in files:
        return TokenizerJsonVocabulary(path=folder, size_multiple=1)
    for name in ("tokenizer.model", "spiece.model"):
        if name in files:
            return SentencePieceVocabulary(path=os.path.join(folder, name), size_multiple=1)
    raise UserError(f"{path} has no tokenizer ({TOKENIZER_FILE}, tokenizer.model): put the model's own beside it")


def _template(folder: str) -> ChatTemplate | None:
    given = {} if config.is_bound("ChatTemplate.tokenizer") else {"tokenizer": folder}
    if not os.path.exists(os.path.join(folder, TOKENIZER_FILE)) and given:
        return None
    template = config.build(ChatTemplate, **given)
    return template if template.is_there else None
