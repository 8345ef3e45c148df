"""The files that came with a run's pretrained weights, kept in its folder for an export to the original format.

origin/config.json    of transformers: the architecture's name, dropout, token ids and all else that we do not compute with
origin/README.md, origin/LICENSE, ...    the model card and the licence
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from capibara.checkpoints import run_manifest
from capibara.data.tokenizers import files as tokenizer_files
from capibara.storage import stores
from capibara.training.base.options import RunOptions

FOLDER = tokenizer_files.ORIGIN


@runtime_checkable
class Described(Protocol):
    """A reader of a foreign model's parameters that also has the files that came with them.

    Attributes:
      origin: files by name, including config.json.
    """

    origin: Mapping[str, bytes]


def read(model_dir: str) -> dict[str, bytes]:
    """The files of a run folder's origin, by name; empty: its initial weights were random."""
    folder = stores.folder_of(model_dir) / FOLDER
    names = stores.of(folder).list(folder) if folder.is_dir() else []
    return {name: (folder / name).read_bytes() for name in names if "/" not in name}


def keep(trainer: RunOptions, reader: object) -> None:
    """Writes the origin of a run's initial weights to its folder, once.

    Args:
      trainer: the run.
      reader: the reader of the weights, which may be `Described`; None: they are of a run folder, whose origin is copied.

    Raises:
      OSError: the folder cannot be written.
    """
    if trainer.init_from is None or tokenizer_files.MODEL_FILE in read(trainer.model_dir):
        return
    result = reader.origin if isinstance(reader, Described) else read(trainer.init_from) if reader is None else {}
    if result:
        write(trainer.model_dir, result)


def write(model_dir: str, files: Mapping[str, bytes]) -> None:
    """Writes the origin of a run folder; config.json last, which marks the copy as complete."""
    last = tokenizer_files.MODEL_FILE
    ordered = {name: files[name] for name in sorted(files, key=lambda name: name == last)}
    run_manifest.replace(
        stores.folder_of(model_dir), {f"{FOLDER}/{name}": content for name, content in ordered.items()}
    )
