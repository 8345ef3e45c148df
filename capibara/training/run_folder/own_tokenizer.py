"""The copy of the tokenizer in a run folder: made when the run starts, and used if the original is gone.

tokenizer/     the files of the vocabulary, with its chat template
paths.json     {path in the Gin configuration: path of its copy in the run folder}
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from typing import TypeGuard, TypeVar

from etils import epath

from capibara.checkpoints import run_manifest
from capibara.core.fields import returned
from capibara.core.types import Dataclass, UserError
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers import files as tokenizer_files
from capibara.data.tokenizers.files import OWN, PATHS, TEMPLATE_FILE
from capibara.data.tokenizers.vocabulary import OwnFiles
from capibara.storage import outputs, stores
from capibara.training.base.options import RunOptions

_T = TypeVar("_T", bound=Dataclass)
_Run = TypeVar("_Run", bound=RunOptions)


def keep(dataset: Dataset, model_dir: str) -> None:
    """Copies the tokenizer of a run's data into its folder, or compares it with the copy of an earlier start.

    Raises:
      UserError: the tokenizer is not the one with which the run started.
      OSError: the folder cannot be written.
    """
    if (taken := check(dataset, model_dir)) is None:
        return
    folder, known = stores.folder_of(model_dir), _paths(model_dir)
    if not _has_copy(known):
        run_manifest.replace(folder, {f"{OWN}/{name}": content for name, content in taken.files.items()})
    if not {*taken.places.items()} <= {*known.items()}:  # last: with it the copy is whole
        run_manifest.replace(folder, {PATHS: (json.dumps(known | dict(taken.places), indent=1) + "\n").encode()})


def check(dataset: Dataset, model_dir: str) -> OwnFiles | None:
    """Compares the tokenizer of a run's data with the copy of an earlier start, if there is one.

    Returns:
      Its files; None: it has none.

    Raises:
      UserError: a file cannot be read, or the tokenizer is not the one with which the run started.
    """
    taken = _taken(dataset)
    if not taken.files:
        return None
    folder = stores.folder_of(model_dir) / OWN
    changed = [name for name in taken.deciding if _read(folder / name) != taken.files.get(name)]
    if changed and _has_copy(_paths(model_dir)):
        paths, names = " and ".join(taken.places), ", ".join(changed)
        raise UserError(
            f"the tokenizer of {paths} is not the one with which this run started ({names} differs from {folder}): restore "
            "it, or start another run with Trainer.init_from and a new MODEL_DIR"
        )
    return taken


def _has_copy(known: dict[str, str]) -> bool:
    return any(place.split("/")[0] == OWN for place in known.values())


def of_run(trainer: _Run, model_dir: str | None = None) -> _Run:
    """A run whose tokenizer is the copy in its folder: always for a run that is loaded; for training if the original is gone.

    Args:
      trainer: the run.
      model_dir: the current path of the folder of a run that is loaded; None: it is trained, in Trainer.model_dir.

    Raises:
      UserError: the run folder's paths.json cannot be read.
    """
    dataset, always, model_dir = trainer.dataset, model_dir is not None, model_dir or trainer.model_dir
    vocabulary, template = dataset.vocabulary, getattr(dataset.source, "template", None)
    known = functools.cache(lambda: _paths(model_dir))

    def moved(value: _T, *names: str) -> _T:
        """Replaces the paths of a vocabulary or template by those of the run's copies."""
        if unknown := [name for name in names if not hasattr(value, name)]:
            raise UserError(f"{type(value).__name__}.path_fields has {unknown[0]!r}, must have names of its fields")
        paths = {name: path for name in names if _is_path(path := getattr(value, name))}
        lost = {
            n: path for n, path in paths.items() if (always or not tokenizer_files.is_there(path)) and path in known()
        }
        copies = {name: _local(model_dir, known()[path]) for name, path in lost.items()}
        return dataclasses.replace(value, **copies) if copies else value

    if vocabulary is not None:
        vocabulary = moved(vocabulary, *vocabulary.path_fields)
    source = dataset.source
    if (
        dataclasses.is_dataclass(source)
        and isinstance(template, ChatTemplate)
        and (local_template := moved(template, "tokenizer", "template")) is not template
    ):
        source = dataclasses.replace(source, template=local_template)
    if vocabulary is dataset.vocabulary and source is dataset.source:
        return trainer
    return dataclasses.replace(trainer, dataset=dataclasses.replace(dataset, vocabulary=vocabulary, source=source))


def _taken(dataset: Dataset) -> OwnFiles:
    """The files of a run's tokenizer and chat template, and the path of each copy in the run folder."""
    vocabulary, template = dataset.vocabulary, getattr(dataset.source, "template", None)
    declared = OwnFiles({}, {}, ())
    if vocabulary is not None:
        declared = returned(vocabulary.own_files(), OwnFiles, f"{type(vocabulary).__name__}.own_files")
    files, places = dict(declared.files), dict(declared.places)
    if isinstance(template, ChatTemplate):
        tokenizer_contents = tokenizer_files.contents(template.tokenizer)
        if all(
            files.get(name, content) == content for name, content in tokenizer_contents.items()
        ):  # it is the vocabulary's
            files |= tokenizer_contents
            places[template.tokenizer] = tokenizer_files.place_of(template.tokenizer)
        if _is_path(template.template):  # in place of the one beside
            files[TEMPLATE_FILE] = tokenizer_files.read_bytes(tokenizer_files.local(template.template))
            places[template.template] = f"{OWN}/{TEMPLATE_FILE}"
    return OwnFiles(files, places, declared.deciding)


def _is_path(value: str | None) -> TypeGuard[str]:
    return value is not None and "{" not in value  # ChatTemplate.template may be the template itself


def _read(path: epath.Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _paths(model_dir: str) -> dict[str, str]:
    path = os.path.join(model_dir, PATHS)
    try:
        result = json.loads(outputs.read(path) or "{}")
        if not isinstance(result, dict) or not all(isinstance(place, str) for place in result.values()):
            raise ValueError("it is no object of paths")
        for place in result.values():
            if os.path.isabs(place) or ".." in place.split("/"):
                raise ValueError(f"{place!r} leads out of the folder")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): copy the run folder again, or remove that file") from None
    return result


def _local(model_dir: str, place: str) -> str:
    """The local path of a file or folder in a run folder, for tokenizers."""
    if stores.of(model_dir).has_local_paths:
        return os.path.normpath(os.path.join(model_dir, place))
    return os.path.join(_fetched(model_dir, OWN if place == OWN else os.path.dirname(place)), place)


@functools.cache
def _fetched(model_dir: str, inner: str) -> str:
    """Copies the tokenizer of a run folder in a bucket to a local folder that lasts until this process ends."""
    target = tempfile.mkdtemp(prefix="capibara-tokenizer-")
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    os.makedirs(os.path.join(target, inner), exist_ok=True)
    folder = stores.folder_of(model_dir) / inner
    names = [path.name for path in folder.iterdir()] if inner == OWN and folder.exists() else tokenizer_files.FILES
    for name in names:
        content = _read(folder / name)
        if content is not None:
            with open(os.path.join(target, inner, name), "wb") as file:
                file.write(content)
    return target
