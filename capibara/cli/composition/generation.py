"""What `capibara infer` writes: the answer about a document, or a file of texts."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from capibara import config
from capibara.cli.arguments.flags import Arguments
from capibara.cli.composition import models
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.placement import footprint
from capibara.inference.interactive import files, single
from capibara.inference.interactive.chat import Chat
from capibara.inference.interactive.files import Prompt
from capibara.inference.memory_agent import reading
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.memory_agent.prompts import Prompts
from capibara.inference.memory_agent.reading import Reading
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.thinking.answering import Thinker
from capibara.inference.thinking.strategy import Thinking
from capibara.interop.open_model import LoadedModel
from capibara.monitoring.status import StatusLine


def open_reading(args: Arguments, dataset: Dataset, chat: Chat | None, sampling: Sampling) -> Reading | None:
    """The document of the flags with its question; None: there is none.

    Raises:
      UserError: the file cannot be read, or a conversation does not fit a row.
    """
    if not args.document:
        return None
    try:
        with open(args.document, encoding="utf-8") as file:
            document = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--document={args.document} cannot be read ({type(error).__name__}): name a text in UTF-8"
        ) from None
    prompts = Prompts(config.build(MemoryAgent), dataset, chat)
    return Reading(prompts, document, args.prompt, sampling, where=f"--document={args.document}")


def read_document(
    engine: Engine, loaded: LoadedModel, batching: EngineConfig, opened: Reading, adapter: str | None
) -> None:
    """Prints the answer, and on standard error a line about the reading."""
    with StatusLine() as status:
        show = lambda turns: status.show("reading", f"{turns} of {opened.chunks + 1} conversations")  # noqa: E731
        (result,) = reading.read(engine, [opened], adapter, show)
    parameters = footprint.parameters_bytes(loaded.model) / 2**20
    state = footprint.state_bytes(loaded.model, batching, loaded.dataset.length) / 2**20
    print(result.text)
    print(
        f"note: read {opened.tokens:,} tokens in {opened.chunks:,} chunks; the devices hold {parameters:,.1f} MiB of parameters and "
        f"{state:,.1f} MiB of keys and values, whatever the length",
        file=sys.stderr,
    )


def thinker_of(args: Arguments, sampling: Sampling, typed: bool) -> Thinker | None:
    """The strategy of Thinking.strategy; None: there is none. `typed`: whether prompts are typed on a terminal.

    Raises:
      UserError: it does not go together with the sampling, a flag, or a terminal.
    """
    flag = next((f"--{name}" for name in ("benchmark", "document") if getattr(args, name)), None)
    return models.thinker(
        config.build(Thinking).checked(sampling, flag or ("a chat on the terminal" if typed else None))
    )


def answer_prompt(
    engine: Engine,
    prompt: str | None,
    dataset: Dataset,
    chat: Chat | None,
    thinker: Thinker | None,
    sampling: Sampling,
    adapter: str | None,
) -> None:
    """Prints a prompt with its text, or the answer to it; None: standard input is the prompt."""
    prompt = files.read_standard_input() if prompt is None else prompt
    item = Prompt(prompt, sampling, {}, "--prompt", adapter)
    single.answer(engine, item, chat, thinker, dataset.length, dataset.encoder_length)


def complete_prompts(
    engine: Engine,
    prompts: list[Prompt],
    path: str,
    chat: Chat | None,
    about: Mapping[str, object],
    thinker: Thinker | None,
) -> None:
    """Writes the texts of the prompts to a file, with a status line."""
    with StatusLine() as status:
        for done in files.complete(engine, prompts, path, chat, about, thinker):
            status.show("generating", f"{done} of {len(prompts)} texts in {path}")
    print(f"{len(prompts)} texts in {path}", file=sys.stderr)
