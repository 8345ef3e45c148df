"""A model with its tokenizer: generates, is scored, and is saved."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import jax
import numpy as np

from capibara.api import files
from capibara.api.stored import stored_path
from capibara.core.fields import did_you_mean, short
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
    ):
        self.loaded, self.trainer, self.path, self.base = loaded, trainer, loaded.path, base
        self.template, self._batching, self.changes = template, batching, tuple(changes)

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
        texts, messages = _asked(prompt)
        if tools is not None and messages is None:
            raise UserError("tools are for messages, and the prompt is text: give messages, or leave tools out")
        ids: str | list[int] = texts[0] if texts else ""
        ends: Sequence[int] = ()
        if messages is not None:
            ids, ends = self._chat.ids_after(Conversation(messages, tools), "messages"), self._chat.ends
        elif not isinstance(prompt, str):
            if stream:
                raise UserError("stream is for one prompt: give a text, or iterate over the prompts")
            return self._texts(texts, options, adapter)
        if stream:
            return _pieces(lambda: self.engine.submit(ids, options, ends=ends, adapter=adapter))
        return _text(self.engine.submit(ids, options, ends=ends, adapter=adapter))

    def _texts(self, prompts: Sequence[str], options: Sampling, adapter: str | None) -> list[str]:
        """The texts after several prompts, which are generated together."""
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                streams.append(self.engine.submit(prompt, options, adapter=adapter))
            return [_text(each) for each in streams]
        except BaseException:
            for each in streams:
                each.cancel()
            raise

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
        """The logits after each token of a text, with the tokens that its tokenizer adds: float32 [tokens, vocabulary].

        Raises:
          UserError: the model is no decoder, or the text is empty, longer than a row, or has ids without a row.
        """
        if self.model.read is None or self.model.encode is not None:
            raise UserError(f"logits are of decoders, and the model is a {type(self.config).__name__}")
        tokens, batch = self._row(text)
        return np.asarray(self._logits(self.params, batch)[0, : len(tokens)])

    def embed(self, texts: str | Sequence[str]) -> np.ndarray:
        """The mean of the final hidden states over a text's tokens: float32 [width], or [texts, width] of several."""
        if self.model.encode is not None:
            raise UserError("embed is of decoders and encoders, and the model is an encoder-decoder")
        rows, width = [], self.config.embed_dim
        for text in [texts] if isinstance(texts, str) else texts:
            tokens, batch = self._row(text)
            rows.append(np.asarray(self._hidden(self.params, batch)[0, : len(tokens), :width], np.float32).mean(0))
        if not rows:
            raise UserError("the texts are empty: give at least one")
        return rows[0] if isinstance(texts, str) else np.stack(rows)

    def score(self, continuation: str, context: str = "") -> float:
        """The natural logarithm of the probability of a text after another, or at the beginning.

        Where the tokenizer would join the end of the context with the continuation, that is tokenized by itself.

        Raises:
          UserError: the model does not predict the next token, the texts are longer than a row, or the continuation is empty.
        """
        if self.model.read is None:
            raise UserError("score is of models that predict the next token, and this one does not")
        encode, before = self.tokenizer.encode, self.tokenizer.prompt_ids(context)
        read, whole = encode(context), encode(context + continuation)
        is_apart = self.model.encode is not None or whole[: len(read)] != read
        rest = encode(continuation) if is_apart else whole[len(read) :]
        if len(before) + len(rest) > self.length + 1:
            raise UserError(
                f"the texts have {len(before) + len(rest)} tokens, must have at most {self.length}: cut the context"
            )
        return self._scorer([Pair(before, rest)])[0].log_probability

    @functools.cached_property
    def _logits(self) -> Callable[..., jax.Array]:
        return jax.jit(self.model.logits)

    @functools.cached_property
    def _hidden(self) -> Callable[..., jax.Array]:
        return jax.jit(lambda params, batch: self.model.hidden(params, batch)[0])

    @functools.cached_property
    def _scorer(self) -> Scorer:
        dataset, vocabulary = self.loaded.dataset, self.tokenizer
        return Scorer(
            self.model, self.params, dataset.length,
            encoder_length=dataset.encoder_length, pad_id=vocabulary.pad_id, vocabulary=vocabulary,
        )  # fmt: skip

    def _row(self, text: str | Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return _row(
            self.tokenizer.prompt_ids(text) if isinstance(text, str) else text, self.length, self.config.vocab_size
        )

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
        return files.convert(stored_path(self), path, format=format, dtype=dtype, base=self.base)

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


def _row(ids: Sequence[int], length: int, rows: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The tokens of a text, and a batch with them alone, padded to a power of two so that few programs are compiled."""
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or len(tokens) and (tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= rows):
        raise UserError(f"the ids must be whole numbers from 0 to {rows - 1}, in one row, and are {short(ids)}")
    tokens = tokens.astype(np.int32)
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


def _asked(prompt: object) -> tuple[list[str], list[dict[str, Any]] | None]:
    """The texts that a prompt is, or its messages.

    Raises:
      UserError: it is neither.
    """
    if isinstance(prompt, str):
        return [prompt], None
    if not isinstance(prompt, Sequence) or not prompt:
        raise UserError(f"the prompt is {short(prompt)}, must be a text, a list of texts, or messages")
    if all(isinstance(one, str) for one in prompt):
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
