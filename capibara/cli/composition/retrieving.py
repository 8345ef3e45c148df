"""Opens indices with the models that embed their queries: what prepare, evaluate, train and `capibara.index` share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from capibara import config
from capibara.cli.composition import models
from capibara.core.types import UserError
from capibara.inference.calls.dialect import writes_calls
from capibara.inference.engine.reading import Pooling
from capibara.inference.interactive.chat import Chat
from capibara.retrieval.embedding import TextEmbedder
from capibara.retrieval.index import Index, IndexFolder
from capibara.retrieval.tool import IndexSearch, SearchTool

if TYPE_CHECKING:
    from capibara.evaluation.tasks import EvalTask, Item
    from capibara.training.trainer import Trainer


def embedder(path: str, pooling: Pooling) -> TextEmbedder:
    """Loads the model that embeds texts; errors as in `models.load`."""
    with models.PARSING, config.isolated():
        loaded = models.load(path)
    return TextEmbedder(path, loaded.model, loaded.params, loaded.tokenizer, loaded.dataset.length, pooling)


def index(path: str, model: str | None = None) -> Index:
    """Opens an index.

    Args:
      path: the folder.
      model: the path of the model that has embedded it; None: where that was.

    Raises:
      UserError: it is no index, a file of it has changed, or the model is another one.
    """
    folder = IndexFolder.open(path)
    return Index(folder, embedder(model or folder.model, folder.pooling))


def search_of(settings: SearchTool, talk: Chat | None) -> IndexSearch:
    """The search tool of a server, whose model must be able to call it.

    Args:
      settings: of the tool.
      talk: the model's chat; None: it has none.

    Raises:
      UserError: the model's chat template writes no calls, the index cannot be opened, or there are several processes.
    """
    import jax

    if (count := jax.process_count()) > 1:
        raise UserError(f"--index={settings.index} is searched by one process, and there are {count}: start one alone")
    if talk is None or not writes_calls(talk, IndexSearch.schema):
        raise UserError(
            f"--index={settings.index} needs a model that calls tools, and the chat template of this one writes no tools, calls "
            "and results: serve another model, or leave --index out"
        )
    return IndexSearch(index(settings.index, settings.model), settings.k, settings.result_chars)


def items(name: str, task: EvalTask, limit: int | None) -> list[Item]:
    """The items of a task, with what its index has for each; errors as in `tasks.read_items` and `index`."""
    from capibara.evaluation.tasks import read_items

    retrieval = task.retrieval
    return read_items(name, task, limit, None if retrieval is None else index(retrieval.index, retrieval.model))


def with_open_index(trainer: Trainer) -> Trainer:
    """A run whose environment, if that is a `Search`, has its index open."""
    from capibara.strategies.environments.search import Search
    from capibara.strategies.grpo import Grpo

    loss = trainer.loss
    if not isinstance(loss, Grpo) or not isinstance(search := loss.environment, Search):
        return trainer
    environment = search.of_index(index(search.index, search.model))
    return dataclasses.replace(trainer, loss=dataclasses.replace(loss, environment=environment))
