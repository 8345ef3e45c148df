"""Loads adapters that are served beside a model, unmerged."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from capibara import config
from capibara.checkpoints.policy import Checkpointing
from capibara.config import configurable
from capibara.core.types import Params, UserError
from capibara.data.tokenizers import files
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.interop.hf import config as hf_config
from capibara.interop.open_model import LoadedModel
from capibara.interop.peft import folder as peft
from capibara.interop.peft import runs as adapters
from capibara.models.api import Adapter, Lora, unmerged
from capibara.training import run_folder

_DECIDING = (files.TOKENIZER_FILE, *files.SENTENCEPIECE_FILES, files.TEMPLATE_FILE)  # how texts are read


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters beside the model, which requests select by name.

    Attributes:
      paths: (name, folder) pairs: a PEFT folder, or a run folder with adapters, whose base is the model.
    """

    paths: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.paths]
        for name, path in self.paths:
            if not name or not path:
                raise UserError(
                    f"Adapters.paths has {name!r} at {path!r}, must be a name and a folder: try ('poet', PATH)"
                )
            if names.count(name) > 1:
                raise UserError(f"Adapters.paths has two adapters {name!r}: use different names")


def beside(loaded: LoadedModel, flags: Sequence[str] = (), base: str | None = None) -> LoadedModel:
    """Adds the adapters of Adapters.paths and of the command line to a model.

    Args:
      loaded: the base model.
      flags: flags, "NAME=PATH" each.
      base: the name of the model itself in requests; None: it has none.

    Raises:
      UserError: an adapter does not exist, cannot be read, or is of another model.
    """
    pairs = [*config.build(Adapters).paths, *(_parsed(one) for one in flags)]
    names = [name for name, _ in pairs]
    for name in names:
        if name == base or names.count(name) > 1:
            other = "the model" if name == base else "another adapter"
            raise UserError(f"--adapter={name}=... has the name of {other}: use another name")
    found = tuple(_read(name, path, loaded) for name, path in pairs)
    return dataclasses.replace(loaded, adapters=found, paths=dict(pairs))


def _parsed(one: str) -> tuple[str, str]:
    name, equals, path = one.partition("=")
    if not (name and equals and path):
        raise UserError(f"--adapter={one} must be NAME=PATH: try --adapter=poet=runs/poet")
    return name, path


def _read(name: str, path: str, loaded: LoadedModel) -> Adapter:
    try:
        found = Adapter(name, *_values(path, loaded))
        unmerged.check(loaded.model, found)
        _tell_own_tokenizer(name, path, loaded)
    except UserError as error:
        raise UserError(f"--adapter={name}={path}: {error}") from None
    return found


def _values(path: str, loaded: LoadedModel) -> tuple[Lora, Params]:
    model = loaded.model
    if adapters.is_adapter(path):
        model_type = hf_config.to_hf(model.config, loaded.like)["model_type"]
        return peft.read_peft(path, model, model_type, adapters.weights(loaded.params, model, model_type))
    if not run_folder.is_run(path):
        raise UserError(f"it is neither a PEFT folder ({peft.CONFIG}) nor a run folder: name one of the two")
    how = config.build(Checkpointing) if loaded.training is None else loaded.training.checkpointing
    found = run_folder.adapters(path, how)
    if found is None:
        raise UserError("it is a run without adapters: serve it as --model_dir")
    return found


def _tell_own_tokenizer(name: str, path: str, loaded: LoadedModel) -> None:
    """Says on standard error that an adapter's own tokenizer or chat template, which differs from the model's, is not used."""
    vocabulary = loaded.tokenizer
    base = files.beside(vocabulary.path) if isinstance(vocabulary, TokenizerJsonVocabulary) else {}
    differing = [
        file for file, content in files.carried(path).items() if file in _DECIDING and base.get(file) != content
    ]
    if differing:
        print(
            f"note: --adapter={name}={path} has a {differing[0]} that differs from the model's and is not used: to use it, "
            "merge the adapter (python -m capibara.convert --plus)",
            file=sys.stderr,
            flush=True,
        )
