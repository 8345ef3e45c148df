"""What a loaded model has besides texts: numbers (logits, embeddings, how probable a text is), and adapters."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from capibara.core.fields import short
from capibara.core.types import Params, UserError
from capibara.data.tokenizers.decoder_start import start_id
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.evaluation.scoring import Pair, Scorer
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.adapters import AdapterSlots
from capibara.interop.open_model import LoadedModel
from capibara.loading.adapter_folders import AdapterFolders
from capibara.models.api import Head, Model, TransformerConfig


class Adapting(NamedTuple):
    """How adapters are loaded while a model generates.

    Attributes:
      slots: room for them.
      folders: reads them; None: none can be loaded.
    """

    slots: AdapterSlots = AdapterSlots()
    folders: AdapterFolders | None = None


class LoadsAdapters(abc.ABC):
    """A model whose engine has room for adapters.

    Attributes:
      adapting: how they are loaded.
    """

    adapting: Adapting

    @property
    @abc.abstractmethod
    def engine(self) -> Engine:
        """The engine that generates."""

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Loads an adapter, which `generate` and clients of a server name from then on; texts go on meanwhile.

        Args:
          name: of the adapter.
          path: a PEFT folder, or a run folder with adapters, in one of `Adapters.folders` of `load`.
          replace: whether it may replace one of its name; texts that use that go on with it.

        Raises:
          UserError: it is not there, cannot be read, is of another model, or there is no room for it.
        """
        if self.adapting.folders is None:
            raise UserError(
                f"adapter {name!r} is not loaded: name its folder, cb.load(..., adapters=cb.Adapters(folders=(DIR,)))"
            )
        try:
            adapter = self.adapting.folders.read(name, path)
        except (FileNotFoundError, PermissionError) as error:
            raise UserError(str(error)) from None
        self.engine.adapters.load(adapter, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter; texts that use it go on. Raises UserError if there is none of this name."""
        self.engine.adapters.unload(name)


class ScoredModel:
    """A loaded model whose numbers for texts can be asked.

    Attributes:
      loaded: the model, its parameters and its data's settings.
    """

    loaded: LoadedModel

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
        if self.config.head is Head.SCORE:
            raise UserError(
                f"{self.loaded.path} is a reward model, and score is of language models: use scores(prompt, answers)"
            )
        if self.model.read is None:
            raise UserError("score is of models that predict the next token, and this one does not")
        encode, before = self.tokenizer.encode, self.tokenizer.prompt_ids(context)
        read, with_continuation = encode(context), encode(context + continuation)
        is_apart = self.model.encode is not None or with_continuation[: len(read)] != read
        rest = encode(continuation) if is_apart else with_continuation[len(read) :]
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
            encoder_length=dataset.encoder_length, start_id=start_id(vocabulary), vocabulary=vocabulary,
        )  # fmt: skip

    def _row(self, text: str | Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return _row(
            self.tokenizer.prompt_ids(text) if isinstance(text, str) else text, self.length, self.config.vocab_size
        )


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
