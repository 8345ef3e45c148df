"""Loads adapters that are served beside a model, unmerged."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence

from capibara.checkpoints.policy import Checkpointing
from capibara.config import configurable
from capibara.core import limits
from capibara.core.types import Params, UserError
from capibara.data.tokenizers import files
from capibara.data.tokenizers.vocabulary import SentencePieceVocabulary, TokenizerJsonVocabulary
from capibara.interop import peft_runs
from capibara.interop.hf import config as hf_config
from capibara.interop.merge import tokenizers
from capibara.interop.open_model import LoadedModel
from capibara.interop.peft import folder as peft
from capibara.models.api import Adapter, Lora, unmerged
from capibara.training import run_folder


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters beside the model, which requests select by name.

    Attributes:
      paths: (name, folder) pairs: a PEFT folder, or a run folder with adapters, whose base is the model.
      folders: in which a server's clients may name adapters to load; empty: they may load none.
      slots: most adapters that are loaded so at a time, besides those of `paths`.
      rank: the largest rank of those adapters.
      targets: patterns of the weights that they may change, as in `Lora`.
      max_mib: largest size of the folder of such an adapter.
    """

    paths: tuple[tuple[str, str], ...] = ()
    folders: tuple[str, ...] = ()
    slots: int = 4
    rank: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    max_mib: int = 2048

    def __post_init__(self) -> None:
        for field in ("slots", "rank", "max_mib"):
            if getattr(self, field) < 1:
                raise UserError(f"Adapters.{field} is {getattr(self, field)}, must be at least 1")
        if not self.targets:
            raise UserError('Adapters.targets is empty: try ("all-linear",)')
        for folder in self.folders:
            if not folder or not os.path.isdir(folder):
                raise UserError(f"Adapters.folders has {folder!r}, must be folders on this machine: try 'adapters'")
        names = [name for name, _ in self.paths]
        for name, path in self.paths:
            if not name or not path:
                raise UserError(
                    f"Adapters.paths has {name!r} at {path!r}, must be a name and a folder: try ('poet', PATH)"
                )
            if names.count(name) > 1:
                raise UserError(f"Adapters.paths has two adapters {name!r}: use different names")


def attached(
    loaded: LoadedModel,
    adapters: Adapters,
    checkpointing: Checkpointing,
    flags: Sequence[str] = (),
    base: str | None = None,
) -> LoadedModel:
    """Adds adapters to a model, those of the command line last.

    Args:
      loaded: the base model.
      adapters: the adapters to add.
      checkpointing: how adapters of runs are read, if the base model is no run, which says so itself.
      flags: flags, "NAME=PATH" each.
      base: the name of the model itself in requests; None: it has none.

    Raises:
      UserError: an adapter does not exist, cannot be read, or is of another model.
    """
    pairs = [*adapters.paths, *(_parsed(flag) for flag in flags)]
    names = [name for name, _ in pairs]
    for name in names:
        if name == base or names.count(name) > 1:
            other = "the model" if name == base else "another adapter"
            raise UserError(f"--adapter={name}=... has the name of {other}: use another name")
    result = []
    for name, path in pairs:
        try:
            result.append(read(name, path, loaded, checkpointing))
        except UserError as error:
            raise UserError(f"--adapter={name}={path}: {error}") from None
    return dataclasses.replace(loaded, adapters=tuple(result), paths=dict(pairs))


def _parsed(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UserError(f"--adapter={text} must be NAME=PATH: try --adapter=poet=runs/poet")
    return name, path


def read(name: str, path: str, loaded: LoadedModel, checkpointing: Checkpointing) -> Adapter:
    """The adapter of a folder; arguments and errors as for `attached`. Without parameters, those that need their base are refused."""
    result = Adapter(name, *_values(path, loaded, checkpointing))
    unmerged.check(loaded.model, result)
    _tell_own_tokenizer(name, path, loaded)
    return result


def _values(path: str, loaded: LoadedModel, checkpointing: Checkpointing) -> tuple[Lora, Params]:
    model = loaded.model
    if peft_runs.is_adapter(path):
        model_type = hf_config.to_hf(model.config, loaded.like)["model_type"]
        weights = peft_runs.weights(loaded.params, model, model_type) if loaded.params else None
        return peft.read_peft(path, model, model_type, weights)
    if not run_folder.is_run(path):
        raise UserError(f"it is neither a PEFT folder ({peft.CONFIG}) nor a run folder: name one of the two")
    how = checkpointing if loaded.training is None else loaded.training.checkpointing
    result = run_folder.adapters(path, how)
    if result is None:
        raise UserError("it is a run without adapters: serve it as --model_dir")
    return result


def _tell_own_tokenizer(name: str, path: str, loaded: LoadedModel) -> None:
    """Says on standard error that an adapter's own tokenizer or chat template, which differs from the model's, is not used.

    Tokens and templates are compared, not files: trainers save a tokenizer.json with their padding, and PEFT's folders have
    the template in another file than older models.
    """
    vocabulary, copies = loaded.tokenizer, files.carried(path)
    base: dict[str, bytes] = {}
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        base = files.contents(vocabulary.path)
    elif isinstance(vocabulary, SentencePieceVocabulary):
        base = files.carried(files.folder_of(vocabulary.path))
    template, different = _template(copies), ""
    if template and template != _template(base):
        different = "chat template"
    if any(
        file in copies and copies[file] != base.get(file) for file in (files.TOKENIZER_FILE, *files.SENTENCEPIECE_FILES)
    ):
        tokens = tokenizers.tokens_of(copies, path)
        different = "tokenizer" if tokens != tokenizers.tokens_of(base, "the model") else different
    if different:
        print(
            f"note: --adapter={name}={path} has a {different} that differs from the model's and is not used: to use it, "
            "merge the adapter (python -m capibara.convert --plus)",
            file=sys.stderr,
            flush=True,
        )


def _template(tokenizer: Mapping[str, bytes]) -> object:
    """The chat template in a tokenizer's files, or its several ones; None: there is none."""
    if files.TEMPLATE_FILE in tokenizer:
        return tokenizer[files.TEMPLATE_FILE].decode(errors="replace")
    with contextlib.suppress(ValueError):  # it is not used
        about = limits.parse_json(tokenizer.get(files.CONFIG_FILE, b"{}"))
        return about.get("chat_template") if isinstance(about, dict) else None
    return None
