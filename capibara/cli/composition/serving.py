"""What a server serves: a model with its engine, in rows of the model's own length, or a reward model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from capibara import config
from capibara.cli.arguments.flags import Arguments
from capibara.cli.composition import models, retrieving
from capibara.core.types import UserError
from capibara.inference.engine.cache import pages
from capibara.inference.engine.cache.batching import EngineConfig, WhenFull
from capibara.inference.interactive import chat
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server.service.service import Served, ServerConfig, check_streams
from capibara.interop.open_model import LoadedModel
from capibara.models.api import Head, paged
from capibara.monitoring.status import StatusLine
from capibara.retrieval.tool import SearchTool
from capibara.sharding import platform

_PAGE = 32
# A turn of a CPU's loop over pages costs as much as reading 100 tokens.
_PAGE_ON_CPU = 128


def load(args: Arguments, *, first: bool = True) -> tuple[Served, ServerConfig]:
    """The model of the command line with its engine, built alike in all processes, and the server's limits.

    Args:
      args: of the command line.
      first: whether this is process 0.

    Raises:
      UserError: the model cannot be loaded, or an option does not fit it.
    """
    path = os.path.normpath(args.model_dir or args.model)
    name = args.name or os.path.basename(path).removesuffix(".gguf")
    loaded = models.load_served(args, name)
    takes = config.build(ServerConfig)
    further = models.adapter_settings(args.adapter_folder)
    if loaded.model.config.head is Head.SCORE:
        check_scores(args.index, takes, name, further.folders)
        return _reward_model(loaded, name), takes
    sampling, batching = config.build(Sampling), config.build(EngineConfig)
    data, vocabulary = loaded.dataset, loaded.tokenizer
    talk = chat.of_served(data, models.chat_template(data)) if first else None
    search = None
    if args.index or config.is_bound("SearchTool.index"):
        search = config.build(SearchTool, **({"index": args.index} if args.index else {}))
    check_texts(sampling, takes, search)
    config.check_used()
    judge = models.reward_model(takes.thinking, "the reward model") if first else None
    tool = None if search is None or not first else retrieving.search_of(search, talk)
    check_folders(further.folders)
    folders = models.adapter_folders(loaded, further)
    length, batching = served_rows(loaded, batching)
    engine = models.engine_of(loaded, batching, length, models.adapter_slots(further))
    if takes.warm_up:
        with StatusLine() as line:
            engine.warm_up(lambda at, of: line.show("compiling", f"{at} of {of}") if first else None, background=True)
    served = Served(
        engine, vocabulary, talk, length, data.encoder_length, name, sampling,
        read_adapter=None if folders is None else folders.read, judge=judge, tool=tool,
    )  # fmt: skip
    return served, takes


def check_texts(sampling: Sampling, takes: ServerConfig, search: SearchTool | None) -> None:
    """Raises UserError if the texts of requests that set nothing cannot be answered."""
    check_streams(sampling)
    if takes.thinking is None:
        return
    takes.thinking.check(sampling)
    if search is not None:
        raise UserError(
            f"ServerConfig.thinking is @{type(takes.thinking).__name__}() and --index={search.index}: strategies draw texts "
            "without calls, leave one out"
        )


def check_folders(folders: Sequence[str]) -> None:
    """Raises UserError if adapters of these folders cannot be loaded while the model is served."""
    import jax

    if folders and (count := jax.process_count()) > 1:
        raise UserError(
            f"Adapters.folders has {folders[0]!r}, and {count} processes serve the model, which load adapters at their start "
            "alone: name them with --adapter"
        )


def check_scores(index: str | None, takes: ServerConfig, name: str, folders: Sequence[str] = ()) -> None:
    """Raises UserError for an option that a reward model does not have."""
    options = (
        (f"--index={index}", index),
        ("ServerConfig.thinking", takes.thinking),
        (f"Adapters.folders = {tuple(folders)!r}", folders),
    )
    for option, is_set in options:
        if is_set:
            raise UserError(f"{option} is for language models, and {name} is a reward model: leave it out")


def _reward_model(loaded: LoadedModel, name: str) -> Served:
    """A reward model, which scores and has no engine."""
    import jax

    if loaded.adapters:
        raise UserError(f"--adapter={loaded.adapters[0].name} is for language models, and {name} is a reward model")
    if (count := jax.process_count()) > 1:
        raise UserError(f"{name} is a reward model, which one process serves, and there are {count}: start one alone")
    scorer = models.scorer_of(loaded, name, models.chat_template(loaded.dataset))
    config.check_used()
    talk, length = chat.Chat(loaded.tokenizer, scorer.template), loaded.dataset.length
    return Served(None, loaded.tokenizer, talk, length, None, name, Sampling(), scorer=scorer)


def served_rows(loaded: LoadedModel, batching: EngineConfig) -> tuple[int, EngineConfig]:
    """The length of the slots of a server, and its batching, with pages if the model can have them.

    A slot has the model's own length, max_length, unless Gin files or flags bind Dataset.length. All slots share the memory that
    they would need with Dataset.length each, and at least that of one whole row.

    Args:
      loaded: the model.
      batching: as configured; a page size that is bound stays, with rows of Dataset.length.
    """
    length, model = loaded.dataset.length, loaded.model
    # A run's recorded Dataset.length is that of its training rows.
    is_set = config.is_given("Dataset.length")
    # Rotary frequencies by the length of rows would be those of the longest one for every request.
    fixed = is_set or model.of_length(length) is not model
    longest = length if fixed else max(length, model.config.max_length or length)
    if config.is_bound("EngineConfig.page_size") or batching.when_full is WhenFull.SLIDE:
        return length, batching
    on_cpu = platform() == "cpu"
    if longest == length and not on_cpu:
        return length, batching
    size = paged.Sizes(0, _PAGE_ON_CPU if on_cpu else _PAGE)
    budget = max(batching.slots * size.of_slot(length), size.of_slot(longest))
    batched = dataclasses.replace(batching, page_size=size.page_size, pages=budget)
    try:
        pages.sizes_of(model.of_length(longest), batched, longest, loaded.dataset.encoder_length)
    except UserError:  # no layer can be paged: whole rows
        return length, batching
    return longest, batched
