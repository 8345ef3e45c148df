"""Continues or answers one text after the other: what a training run shows of its model, and `infer`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax

from capibara.config import configurable
from capibara.data.vocabulary import Vocabulary
from capibara.inference.engine import Engine, EngineConfig, WhenFull, check_generates
from capibara.inference.sampling import Sampling
from capibara.models.api import Model
from capibara.types import Params

__all__ = ["Generator", "SampleText", "Sampling", "check_generates", "on_one_device", "sampler"]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleText:
    """Prompts that a training run continues (or answers) after each evaluation; an empty one begins a document."""

    prompts: tuple[str, ...] = ()
    sampling: Sampling = Sampling()


class Generator:
    """Continues prompts with a decoder, or answers them with an encoder-decoder; a row that is full moves on.

    An encoder-decoder's prompts and answers spell the sentinels of removed spans as <extra_id_0>, <extra_id_1>, ...

    Args:
      model: the model.
      vocabulary: of its training data.
      length: the decoder reads at most this many last tokens, as in training.
      sampling: how tokens are chosen.
      encoder_length: an encoder reads at most this many first tokens, as in training.
      config: of the engine, which has one slot and keeps no prefixes; in pages a row that is full ends.
      spread: parameters stay on the devices where they are; else one does the work, where this host has them all.

    Raises:
      UserError: the model is an encoder.
    """

    def __init__(
        self,
        model: Model,
        vocabulary: Vocabulary,
        length: int,
        sampling: Sampling,
        encoder_length: int | None = None,
        config: EngineConfig = EngineConfig(),
        spread: bool = False,
    ):
        check_generates(model)
        when_full = WhenFull.STOP if config.page_size else WhenFull.SLIDE
        self._config = dataclasses.replace(config, slots=1, when_full=when_full, prefix_cache_mib=0)
        self._model, self._vocabulary, self._sampling = model, vocabulary, sampling
        self._lengths, self._spread = (length, encoder_length), spread

    def __call__(self, params: Params, prompt: str | Sequence[int], ends: Sequence[int] = ()) -> str:
        """The continuation of `prompt` (text, or ids as they are), without it, or the answer to it.

        `ends`: ids that end it, beside the vocabulary's end token.
        """
        length, encoder_length = self._lengths
        params = params if self._spread else on_one_device(params)
        engine = Engine(self._model, params, self._vocabulary, length, self._config, encoder_length)
        return engine.submit(prompt, self._sampling, ends=ends).result().text


def sampler(
    model: Model,
    get_vocabulary: Callable[[], Vocabulary],
    length: int,
    texts: SampleText,
    encoder_length: int | None = None,
) -> Callable[[Params], Iterator[tuple[str, str]]]:
    """For the training loop: parameters -> (prompt, continuation) pairs, each made as it is asked for.

    Answers begin on a new line.
    """
    if texts.prompts:
        check_generates(model)

    @functools.cache
    def generator() -> Generator:
        return Generator(model, get_vocabulary(), length, texts.sampling, encoder_length)

    begin = "" if encoder_length is None else "\n"
    return lambda params: ((prompt, begin + generator()(params, prompt)) for prompt in texts.prompts)


def on_one_device(params: Params) -> Params:
    """One row cannot be spread over devices: where this host has all the parameters, one device does the work."""
    leaves = jax.tree.leaves(params)
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return params
    return jax.device_put(params, jax.local_devices()[0])
