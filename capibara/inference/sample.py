"""Continues or answers texts one at a time: for samples during training, and for `infer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from capibara.config import configurable
from capibara.core.types import Params
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.engine.engine import Engine, EngineConfig, WhenFull, check_generates
from capibara.inference.engine.placement import own_chips
from capibara.inference.engine.placement.own_chips import OwnChips, Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.engine.requests.stream import Completion, Finish
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import Model
from capibara.sharding import Rules

__all__ = ["Generator", "SampleText", "Sampling", "beyond_length", "check_generates", "of_one_slot", "sampler"]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleText:
    """Prompts that a training run continues (or answers) after each evaluation; an empty one starts a new document.

    Attributes:
      prompts: the prompts; none: nothing is generated.
      sampling: how tokens are chosen, and how many.
    """

    prompts: tuple[str, ...] = ()
    sampling: Sampling = Sampling()


class Generator:
    """Continues prompts with a decoder, or answers them with an encoder-decoder; a full row drops its oldest tokens.

    An encoder-decoder's prompts and answers spell the sentinels of removed spans as <extra_id_0>, <extra_id_1>, ...

    Args:
      model: the model.
      vocabulary: of its training data.
      length: the decoder reads at most the last `length` tokens, as in training.
      sampling: how tokens are chosen.
      encoder_length: an encoder reads at most the first `encoder_length` tokens, as in training.
      config: configuration of the engine, which has one slot and no prefix cache; with pages a full row ends.

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
    ):
        check_generates(model)
        self._config = of_one_slot(config)
        self._model, self._vocabulary, self._sampling = model, vocabulary, sampling
        self._lengths = length, encoder_length

    def __call__(self, params: Params, prompt: str | Sequence[int], ends: Sequence[int] = ()) -> str:
        """The continuation of `prompt` (text, or token ids), or the answer to it.

        Runs on the devices that hold `params`. `ends`: additional end token ids.
        """
        length, encoder_length = self._lengths
        engine = Engine(self._model, params, self._vocabulary, length, self._config, encoder_length)
        result = engine.submit(prompt, self._sampling, ends=ends).result()
        return result.lead + result.text


def sampler(
    model: Model,
    get_vocabulary: Callable[[], Vocabulary],
    length: int,
    texts: SampleText,
    encoder_length: int | None = None,
    rules: Rules = Rules(),
    gathered: Callable[[int | None], list[int | None]] = lambda value: [value],
) -> Callable[[Params], Iterator[tuple[str, str]]]:
    """For the training loop: parameters -> an iterator of (prompt, continuation) pairs, generated one by one.

    Answers begin on a new line. With several processes only the first generates them, on its own chips if these
    suffice; the others yield empty ones.

    Args:
      model, get_vocabulary, length, texts, encoder_length: the model and the prompts.
      rules: the sharding rules of the parameters in training.
      gathered: gathers parameters from all processes.
    """
    if texts.prompts:
        check_generates(model)

    def texts_of(params: Params) -> Iterator[tuple[str, str]]:
        if not texts.prompts:
            return
        each = gathered(own_chips.free_bytes())
        known = [item for item in each if item is not None]
        free = min(known) if len(known) == len(each) else None
        batching = of_one_slot(EngineConfig())
        layout = own_chips.layout_of(model, ServingMesh(), Where.AUTO, batching, length, encoder_length, free)
        params = params if layout is None else OwnChips(model, layout, rules)(params)
        sampled_model = model if layout is None else model.plain
        generator = Generator(sampled_model, get_vocabulary(), length, texts.sampling, encoder_length)
        begin = "" if encoder_length is None else "\n"
        for prompt in texts.prompts:
            makes = layout is None or jax.process_index() == 0
            yield prompt, begin + generator(params, prompt) if makes else ""

    return texts_of


def of_one_slot(config: EngineConfig) -> EngineConfig:
    """For one text at a time: no prefix cache; a full row drops its oldest tokens, or ends if paged."""
    when_full = WhenFull.STOP if config.page_size else WhenFull.SLIDE
    return dataclasses.replace(config, slots=1, when_full=when_full, prefix_cache_mib=0)


def beyond_length(result: Completion, sampling: Sampling, length: int, encoder_length: int | None = None) -> str:
    """A line that says what of a prompt was not read, or how its text went on, beyond the model's length; empty: it is within.

    Args:
      result: of `sampling`, by an engine with one slot (see `of_one_slot`).
      sampling: how it was requested.
      length: of the decoder, in tokens.
      encoder_length: of the encoder; None: there is none.
    """
    tokens, note = len(result.tokens), ""
    if result.unread:
        end, name, most = "last", "length", length
        if encoder_length is not None:
            end, name, most = "first", "encoder_length", encoder_length
        count = most + result.unread
        note = f"the model read the {end} {most} of {count} tokens of the prompt (Dataset.{name} = {most})"
    elif result.prompt_tokens + tokens > length + 1:  # nothing reads the last token
        note = (
            f"prompt and text have {result.prompt_tokens + tokens} tokens: those beyond Dataset.length ({length}) were "
            f"chosen after the last {length} tokens alone"
        )
    elif result.finish is Finish.LENGTH and tokens < sampling.max_new_tokens:
        note = f"the text ends after {tokens} tokens: prompt and text fill Dataset.length ({length})"
    return note and f"note: {note}\n"
