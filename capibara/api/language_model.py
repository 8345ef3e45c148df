"""A model with its tokenizer: generates, is scored, and is saved."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from capibara.api import verbs
from capibara.api.scored_model import Adapting, LoadsAdapters, ScoredModel
from capibara.cli.composition import models
from capibara.core.fields import did_you_mean, short
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests.stream import Stream
from capibara.inference.interactive.chat import Chat, of_run
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.memory_agent.prompts import Prompts
from capibara.inference.memory_agent.reading import Reading, read
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.thinking.answering import Asked, Thinker
from capibara.inference.thinking.reward_model import RewardModel
from capibara.inference.thinking.strategy import Answer, Scores, Strategy
from capibara.interop import hub
from capibara.interop.hf import model_card
from capibara.interop.open_model import LoadedModel
from capibara.storage import outputs

if TYPE_CHECKING:
    from capibara.training.trainer import Trainer

Message = Mapping[str, Any]
_ALIASES = {"max_tokens": "max_new_tokens"}


class LanguageModel(ScoredModel, LoadsAdapters):
    """A model that is ready to use; made by `capibara.load`.

    Attributes:
      loaded: the model, its parameters and its data's settings.
      trainer: the run that trained it; of a foreign model, one that would.
      path: where it was loaded from.
      base: path of the base of an adapter; None: it is none.
      changes: how it was loaded otherwise than its files are read, such as "step=100".
      template: the chat template, if the run has none of its own; None: that beside the tokenizer, if there is one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        trainer: Trainer,
        *,
        template: ChatTemplate | None = None,
        batching: EngineConfig = EngineConfig(),
        base: str | None = None,
        changes: Sequence[str] = (),
        adapting: Adapting = Adapting(),
    ):
        self.loaded, self.trainer, self.path, self.base = loaded, trainer, loaded.path, base
        self.template, self._batching, self.adapting = template, batching, adapting
        self.changes = tuple(changes)

    def __repr__(self) -> str:
        config, model = type(self.config).__name__, self.model
        step = "" if self.step is None else f", step {self.step}"
        size = f"{model.param_count:,} parameters"
        return f"LanguageModel({self.path!r}{step}: {config} with {size}, {self.config.dtype}, rows of {self.length} tokens)"

    # --- generation ---------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | Sequence[Message], *, stream: bool = False, **sampling: Any) -> str: ...

    @overload
    def generate(self, prompt: list[str], *, stream: bool = False, **sampling: Any) -> list[str]: ...

    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[Message],
        *,
        stream: bool = False,
        document: str | None = None,
        memory: MemoryAgent | None = None,
        **sampling: Any,
    ) -> str | list[str] | Iterator[str]:
        """Continues a text or each of several, or answers a chat.

        Args:
          prompt: a text, a list of texts, or messages: dicts with "role" and "content".
          stream: whether to return an iterator of pieces of the text, as they are generated; not of a list.
          document: a text of any length, about which the prompt, a text or one message, asks; it is read chunk by chunk.
          memory: how the document is read; None: as `MemoryAgent()`.
          sampling: fields of `capibara.Sampling` (`max_tokens` is `max_new_tokens`), `adapter` (a name), `tools` of a chat, and
            `thinking`, a strategy as for `think`.

        Returns:
          The text without the prompt; for a list of prompts a list.

        Raises:
          UserError: an option is unknown or out of range, or there is no chat template.
        """
        tools, adapter = sampling.pop("tools", None), sampling.pop("adapter", None)
        if (thinking := sampling.pop("thinking", None)) is not None:
            others = {"stream": stream, "tools": tools, "document": document, "memory": memory}
            if name := next((name for name, value in others.items() if value not in (None, False)), None):
                raise UserError(f"{name} and thinking={thinking!r} do not go together: leave one out")
            answers = [answer.text for answer in _thought(self, prompt, thinking, adapter, sampling)]
            return answers[0] if _is_single(prompt) else answers
        options = _sampling(sampling)
        texts, messages = _asked(prompt)
        if document is not None:
            if stream or tools is not None:
                raise UserError(
                    "stream and tools are not for a document, which is read in many conversations: leave them out"
                )
            return _read(self, document, prompt, MemoryAgent() if memory is None else memory, options, adapter)
        if memory is not None:
            raise UserError("memory is for reading a document: give document, or leave memory out")
        if tools is not None and messages is None:
            raise UserError("tools are for messages, and the prompt is text: give messages, or leave tools out")
        ids: str | list[int] = texts[0] if texts else ""
        ends: Sequence[int] = ()
        if messages is not None:
            ids, ends = self._chat.ids_after(Conversation(messages, tools), "messages"), self._chat.ends
        elif not isinstance(prompt, str):
            if stream:
                raise UserError("stream is for one prompt: give a text, or iterate over the prompts")
            return _texts(self, texts, options, adapter)
        if stream:
            return _pieces(lambda: self.engine.submit(ids, options, ends=ends, adapter=adapter))
        return _text(self.engine.submit(ids, options, ends=ends, adapter=adapter))

    @overload
    def think(
        self, prompt: str | Sequence[Message], strategy: Strategy, *, adapter: str | None = None, **sampling: Any
    ) -> Answer: ...

    @overload
    def think(
        self, prompt: list[str], strategy: Strategy, *, adapter: str | None = None, **sampling: Any
    ) -> list[Answer]: ...

    def think(
        self,
        prompt: str | Sequence[str] | Sequence[Message],
        strategy: Strategy,
        *,
        adapter: str | None = None,
        **sampling: Any,
    ) -> Answer | list[Answer]:
        """Like `generate`, by a strategy that generates several texts; says what they cost and how one was chosen.

        Args:
          prompt: as for `generate`; messages must end with a user's text.
          strategy: `capibara.SelfConsistency`, `BestOfN` or `Rounds`.
          adapter: name of the adapter to use; None: no adapter.
          sampling: fields of `capibara.Sampling`, of each text.

        Raises:
          UserError: as for `generate`, or the sampling does not fit the strategy.
        """
        answers = _thought(self, prompt, strategy, adapter, sampling)
        return answers[0] if _is_single(prompt) else answers

    def chat(self, turn: str | Sequence[Message], *, system: str | None = None, **options: Any) -> str:
        """The answer to a user's turn, or to messages; options as for `generate`."""
        messages: list[Message] = [{"role": "user", "content": turn}] if isinstance(turn, str) else list(turn)
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.generate(messages, **options)

    def scores(self, prompt: str | Sequence[Message], answers: Sequence[str]) -> list[Scores]:
        """A reward model's scores of answers to a user's text or messages: a number each, or a list of one for each step.

        Raises:
          UserError: the model is no reward model, or an answer does not fit a row.
        """
        return _scored(self.scorer, prompt, answers)

    @functools.cached_property
    def scorer(self) -> RewardModel:
        """What scores answers, of a reward model; errors as for `scores`."""
        return models.scorer_of(self.loaded, self.path, self.template)

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine that generates, with a copy of the parameters in the compute dtype."""
        loaded, dataset = self.loaded, self.loaded.dataset
        return Engine(
            loaded.model, loaded.params, loaded.tokenizer, dataset.length, self._batching, dataset.encoder_length,
            adapters=loaded.adapters, adapter_slots=self.adapting.slots,
        )  # fmt: skip

    @functools.cached_property
    def chats(self) -> bool:
        """Whether it has a chat template."""
        try:
            return bool(self._chat.ids("Hello"))
        except UserError:
            return False

    @functools.cached_property
    def _chat(self) -> Chat:
        return of_run(self.loaded.dataset, "a list of messages", template=self.template)

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str, format: str | None = None, dtype: str | None = None) -> str:
        """Writes the model in another format, as `capibara convert` does from where it was loaded; returns the path.

        Args:
          path: a new folder or file.
          format: hf, pytorch, gguf, t5x, peft, peft_fused, gguf_lora or capibara; None: hf, gguf for x.gguf.
          dtype: of the stored tensors, such as bf16 or q4_k_m; None: unchanged.

        Raises:
          UserError: the path exists, or the format cannot hold the model.
        """
        return verbs.convert(self, path, format=format, dtype=dtype, base=self.base)

    def push_to_hub(self, name: str, *, private: bool = True, dtype: str | None = None) -> str:
        """Uploads the model, with tokenizer and model card, to the Hugging Face Hub; returns its address.

        Args:
          name: OWNER/NAME; it is made if it does not exist.
          private: whether a new one is private.
          dtype: of the stored tensors; None: unchanged.

        Raises:
          UserError: the Hub refuses it, or cannot be reached.
        """
        with tempfile.TemporaryDirectory() as folder:
            saved = self.save(os.path.join(folder, "model"), "hf", dtype)
            _write_card(saved, name.rpartition("/")[2], self.model.param_count)
            return hub.push(saved, name, private=private)


def _write_card(folder: str, name: str, param_count: int) -> None:
    """Writes a model card into the folder of a model that came without one."""
    if not os.path.exists(path := os.path.join(folder, model_card.CARD)):
        head: dict[str, str | list[str]] = {"model_name": name, "tags": ["capibara"]}
        body = f"{param_count:,} parameters, trained with capibara."
        outputs.save(path, model_card.card(head, body).decode())


def _texts(model: LanguageModel, prompts: Sequence[str], options: Sampling, adapter: str | None) -> list[str]:
    """The texts after several prompts, which are generated together."""
    streams: list[Stream] = []
    try:
        for prompt in prompts:
            streams.append(model.engine.submit(prompt, options, adapter=adapter))
        return [_text(each) for each in streams]
    except BaseException:
        for each in streams:
            each.cancel()
        raise


def _read(
    model: LanguageModel, document: str, prompt: object, memory: MemoryAgent, options: Sampling, adapter: str | None
) -> str:
    """The answer to a question about a document that is read with a memory."""
    if not isinstance(document, str):
        raise UserError(f"document is {short(document)}, must be a text")
    if not isinstance(memory, MemoryAgent):
        raise UserError(f"memory is {short(memory)}, must be cb.MemoryAgent(...), or None: the defaults")
    texts, messages = _asked(prompt)
    contents = texts if messages is None else [message.get("content") for message in messages]
    if len(contents) != 1 or not isinstance(question := contents[0], str):
        raise UserError("the prompt of a document must be a text or one message: ask one question")
    prompts = Prompts(memory, model.loaded.dataset, None if messages is None else model._chat)
    reading = Reading(prompts, document, question, options, where="document")
    (result,) = read(model.engine, [reading], adapter)
    return result.lead + result.text


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    """The options of a request by their names; `max_tokens` as other libraries have it."""
    for alias, name in _ALIASES.items():
        if alias in fields and name in fields:
            raise UserError(f"{alias} and {name} are one option: leave one out")
    values = {_ALIASES.get(name, name): value for name, value in fields.items()}
    known = [field.name for field in dataclasses.fields(Sampling)]
    for name in values:
        if name not in known:
            raise UserError(f"generate has no option {name!r}{did_you_mean(name, known)}")
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    elif isinstance(values.get("stop", ()), list | None):
        values["stop"] = tuple(values["stop"] or ())
    return Sampling(**values)


def _thought(
    model: LanguageModel,
    prompt: str | Sequence[str] | Sequence[Message],
    strategy: object,
    adapter: str | None,
    sampling: Mapping[str, Any],
) -> list[Answer]:
    """The strategy's answer to a text, each of several, or messages."""
    if not isinstance(strategy, Strategy):
        raise UserError(f"the strategy is {strategy!r}, must be one such as cb.SelfConsistency(samples=8)")
    options = _sampling(sampling)
    strategy.check(options)
    texts, messages = _asked(prompt)
    if messages is None:
        asked = [Asked(text, lambda text: (text, ()), options, adapter) for text in texts]
    else:
        asked = [_asked_turn(model._chat, messages, options, adapter)]
    return Thinker(strategy, models.reward_model(strategy)).answers(model.engine, asked)


def _asked_turn(chat: Chat, messages: list[dict[str, Any]], options: Sampling, adapter: str | None) -> Asked:
    """The last turn of a conversation, which a strategy may ask in other words."""
    *before, turn = messages
    if turn["role"] != "user" or not isinstance(turn["content"], str):
        raise UserError(f"the last message is {short(turn)}, must be a user's text for a strategy to ask it again")

    def inputs(text: str) -> tuple[Sequence[int], Sequence[int]]:
        conversation = Conversation([*before, {**turn, "content": text}])
        return chat.ids_after(conversation, "messages"), chat.ends

    return Asked(turn["content"], inputs, options, adapter, Conversation(before))


def _scored(rater: RewardModel, prompt: str | Sequence[Message], answers: Sequence[str]) -> list[Scores]:
    """The scores of answers to a user's text or messages."""
    if isinstance(answers, str) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"the answers are {short(answers)}, must be a list of texts: give at least one")
    _, messages = _asked([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    if messages is None:
        raise UserError(
            f"the prompt is {short(prompt)}, must be a text or messages: score the answers to each by itself"
        )
    return rater.scores(Conversation(messages), answers)


def _is_single(prompt: str | Sequence[str] | Sequence[Message]) -> bool:
    """Whether a prompt is a text or messages, which have one answer."""
    return isinstance(prompt, str) or not all(isinstance(item, str) for item in prompt)


def _asked(prompt: object) -> tuple[list[str], list[dict[str, Any]] | None]:
    """The texts that a prompt is, or its messages.

    Raises:
      UserError: it is neither.
    """
    if isinstance(prompt, str):
        return [prompt], None
    if not isinstance(prompt, Sequence) or not prompt:
        raise UserError(f"the prompt is {short(prompt)}, must be a text, a list of texts, or messages")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt), None
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"{short(message)} is no message: give dicts with 'role' and 'content', or texts alone")
        if message.get("content") is None and not message.get("tool_calls"):
            raise UserError(f"the message {short(message)} has no content")
    return [], [dict(message) for message in prompt]


def _pieces(submit: Callable[[], Stream]) -> Iterator[str]:
    """The pieces of a text, which is begun when the first is asked for; a reader that stops early ends it."""
    stream = submit()
    try:
        for piece in stream:
            yield piece.lead + piece.text
    finally:
        stream.cancel()


def _text(stream: Stream) -> str:
    result = stream.result()
    return result.lead + result.text
