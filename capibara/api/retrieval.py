"""Indices of documents, from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from capibara.api.stored import Loaded, path_of, stored_path
from capibara.core.types import UserError

if TYPE_CHECKING:
    from capibara.retrieval.index import Index
    from capibara.retrieval.settings import IndexPreparation


def prepare_index(
    inputs: str | Sequence[str], out: str, model: Loaded | str, settings: IndexPreparation | None = None
) -> dict[str, Any]:
    """Makes an index of documents, as `capibara prepare index` does; returns its manifest.

    Args:
      inputs: files, folders, globs and addresses of documents.
      out: the output folder.
      model: embeds the chunks: a path or name, as for `load`, or a loaded model, which is read again from its path.
      settings: how; None: the defaults.

    Raises:
      UserError: there is no document, the model embeds no texts, or no index reaches the goal.
    """
    from capibara.cli.composition import retrieving
    from capibara.retrieval import build
    from capibara.retrieval.settings import IndexPreparation

    settings = IndexPreparation() if settings is None else settings
    if not isinstance(settings, IndexPreparation):
        raise UserError(f"settings is {settings!r}, must be cb.IndexPreparation(...), or None: the defaults")
    patterns = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(patterns, Sequence) or not all(isinstance(item, str) for item in patterns):
        raise UserError(f"inputs is {inputs!r}, must be a file, folder, glob or address, or a list of them: try 'docs'")
    embedder = retrieving.embedder(stored_path(model), settings.pooling)
    return build.prepare(patterns, out, settings, embedder, lambda topic, detail: None).as_json()


def index(path: str | os.PathLike[str], model: Loaded | str | None = None) -> Index:
    """Opens an index: `capibara.index("data/docs").search("how are files locked?", k=4)`.

    Args:
      path: a folder of `capibara prepare index`.
      model: the model that has embedded it; None: where it was then.

    Raises:
      UserError: it is no index, a file of it has changed, or the model is another one.
    """
    from capibara.cli.composition import retrieving

    return retrieving.index(path_of(path), None if model is None else stored_path(model))
