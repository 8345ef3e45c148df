"""A model with its tokenizer: generates, is scored, and is saved."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from capibara.api import files
from capibara.core.fields import did_you_mean
from capibara.core.types import Params, UserError
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.evaluation.scoring import Pair, Scorer
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests.stream import Stream
from capibara.inference.interactive.chat import Chat, of_run
from capibara.inference.sampling.sampling import Sampling
from capibara.interop import hub
from capibara.interop.open_model import LoadedModel
from capibara.models.api import Model, TransformerConfig

if TYPE_CHECKING:
    from capibara.training.trainer import Trainer

Message = Mapping[str, Any]
_ALIASES = {"max_tokens": "max_new_tokens"}


class LanguageModel:
    """A model that is ready to use; made by `capibara.load`.

    Attributes:
      loaded: the model, its parameters and its data's settings.
      trainer: the run that trained it; of a foreign model, one that would.
      path: where it was loaded from.
      base: path of the base of an adapter; None: it is none.
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
    ):
        self.loaded, self.trainer, self.path, self.base = loaded, trainer, loaded.path, base
        self.template, self._batching = template, batching

    def __repr__(self) -> str:
        config, model = type(self.config).__name__, self.model
        step = "" if self.step is None else f", step {self.step}"
        size = f"{model.param_count:,} parameters"
        return f"LanguageModel({self.path!r}{step}: {config} with {size}, {self.config.dtype}, rows of {self.length} tokens)"

    @property
    def config(self) -> TransformerConfig:
        """The model's configuration."""
        return self.loaded.model.config

    @property
    def model(self) -> Model:
        """The model's functions."""
        return self.loaded.model

    @property
    def params(self) -> Params:
        """The parameters."""
        return self.loaded.params

    @property
    def step(self) -> int | None:
        """The checkpoint step; None: it is no run."""
        return self.loaded.step

    @property
    def tokenizer(self) -> Vocabulary:
        """Encodes and decodes text."""
        return self.loaded.tokenizer

    @property
    def length(self) -> int:
        """Tokens of a row: a prompt and its text together."""
        return self.loaded.dataset.length

    # --- generation ---------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | Sequence[Message], *, stream: bool = False, **sampling: Any) -> str: ...

    @overload
    def generate(self, prompt: list[str], *, stream: bool = False, **sampling: Any) -> list[str]: ...

    def generate(
        self, prompt: str | Sequence[str] | Sequence[Message], *, stream: bool = False, **sampling: Any
    ) -> str | list[str] | Iterator[str]:
        """Continues a text or each of several, or answers a chat.

        Args:
          prompt: a text, a list of texts, or messages: dicts with "role" and "content".
          stream: whether to return an iterator of pieces of the text, as they are generated; not of a list.
          sampling: fields of `capibara.Sampling` (`max_tokens` is `max_new_tokens`), `adapter` (a name), and `tools` of a chat.

        Returns:
          The text without the prompt; for a list of prompts a list.

        Raises:
          UserError: an option is unknown or out of range, or there is no chat template.
        """
        tools, adapter = sampling.pop("tools", None), sampling.pop("adapter", None)
        options = _sampling(sampling)
        if not isinstance(prompt, str) and prompt and all(isinstance(one, str) for one in prompt):
            if stream:
                raise UserError("stream is for one prompt: give a text, or iterate over the prompts")
            streams = [self.engine.submit(one, options, adapter=adapter) for one in prompt if isinstance(one, str)]
            return [_text(each) for each in streams]
        if isinstance(prompt, str):
            submitted = self.engine.submit(prompt, options, adapter=adapter)
        else:
            talk = self._chat
            ids = talk.ids_after(Conversation(_messages(prompt), tools), "messages")
            submitted = self.engine.submit(ids, options, ends=talk.ends, adapter=adapter)
        return _pieces(submitted) if stream else _text(submitted)

    def chat(self, turn: str | Sequence[Message], *, system: str | None = None, **options: Any) -> str:
        """The answer to a user's turn, or to messages; options as for `generate`."""
        messages: list[Message] = [{"role": "user", "content": turn}] if isinstance(turn, str) else list(turn)
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.generate(messages, **options)

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine that generates, with a copy of the parameters in the compute dtype."""
        loaded, dataset = self.loaded, self.loaded.dataset
        return Engine(
            loaded.model,
            loaded.params,
            loaded.tokenizer,
            dataset.length,
            self._batching,
            dataset.encoder_length,
            adapters=loaded.adapters,
        )

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

    # --- numbers ------------------------------------------------------------------------------------------------------

    def logits(self, text: str | Sequence[int]) -> np.ndarray:
        """The logits after each token of a text, with the tokens that its tokenizer adds: float32 [tokens, vocabulary]."""
        import jax

        tokens, batch = _row(self.tokenizer.prompt_ids(text) if isinstance(text, str) else text, self.length)
        return np.asarray(jax.jit(self.model.logits)(self.params, batch)[0, : len(tokens)])

    def embed(self, texts: str | Sequence[str]) -> np.ndarray:
        """The mean of the final hidden states over a text's tokens: float32 [width], or [texts, width] of several."""
        import jax

        hidden = jax.jit(lambda params, batch: self.model.hidden(params, batch)[0])
        rows = []
        for text in [texts] if isinstance(texts, str) else texts:
            tokens, batch = _row(self.tokenizer.prompt_ids(text), self.length)
            rows.append(np.asarray(hidden(self.params, batch)[0, : len(tokens)], np.float32).mean(0))
        return rows[0] if isinstance(texts, str) else np.stack(rows)

    def score(self, continuation: str, context: str = "") -> float:
        """The natural logarithm of the probability of a text after another, or at the beginning.

        Raises:
          UserError: the texts are longer than a row, or the continuation is empty.
        """
        read = len(self.tokenizer.encode(context))
        rest = self.tokenizer.encode(context + continuation)[read:]
        return self._scorer([Pair(self.tokenizer.prompt_ids(context), rest)])[0].log_probability

    @functools.cached_property
    def _scorer(self) -> Scorer:
        dataset, vocabulary = self.loaded.dataset, self.tokenizer
        return Scorer(
            self.model, self.params, dataset.length,
            encoder_length=dataset.encoder_length, pad_id=vocabulary.pad_id, vocabulary=vocabulary,
        )  # fmt: skip

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
        return files.convert(self.path, path, format=format, dtype=dtype, base=self.base)

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
            return hub.push(self.save(os.path.join(folder, "model"), "hf", dtype), name, private=private)


def _row(ids: Sequence[int], length: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The tokens of a text, and a batch with them alone, padded to a power of two so that few programs are compiled."""
    tokens = np.asarray(ids, np.int32)
    if not len(tokens) or len(tokens) > length:
        raise UserError(f"the text has {len(tokens)} tokens, must have from 1 to {length}: cut it")
    size = min(length, 1 << (len(tokens) - 1).bit_length())
    positions = np.arange(size, dtype=np.int32)
    batch = {
        "tokens": np.pad(tokens, (0, size - len(tokens)))[None],
        "positions": positions[None],
        "segment_ids": (positions < len(tokens)).astype(np.int32)[None],
    }
    return tokens, batch


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    """The options of a request by their names; `max_tokens` as other libraries have it."""
    values = {_ALIASES.get(name, name): value for name, value in fields.items()}
    known = [field.name for field in dataclasses.fields(Sampling)]
    for name in values:
        if name not in known:
            raise UserError(f"generate has no option {name!r}{did_you_mean(name, known)}")
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    elif values.get("stop") is not None:
        values["stop"] = tuple(values["stop"])
    return Sampling(**values)


def _messages(messages: Sequence[object]) -> list[dict[str, Any]]:
    if not messages:
        raise UserError("the prompt is empty: give a text, a list of texts, or messages")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise UserError(f"{message!r} is no message: give dicts with 'role' and 'content', or texts alone")
    return [dict(message) for message in messages if isinstance(message, Mapping)]


def _pieces(stream: Stream) -> Iterator[str]:
    """The pieces of a text; a reader that stops early ends it."""
    try:
        for piece in stream:
            yield piece.lead + piece.text
    finally:
        stream.cancel()


def _text(stream: Stream) -> str:
    result = stream.result()
    return result.lead + result.text
