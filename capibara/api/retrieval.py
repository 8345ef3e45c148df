"""Indices of documents, from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from capibara.api.stored import Loaded, path_of, stored_path

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

    settings = settings or IndexPreparation()
    embedder = retrieving.embedder(stored_path(model), settings.pooling)
    patterns = [inputs] if isinstance(inputs, str) else [*inputs]
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
