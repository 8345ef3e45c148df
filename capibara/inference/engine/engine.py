"""Continuous batching: requests join and leave while a batch of slots is decoded.

A slot is a row of one cache of fixed length, or has pages of a pool (EngineConfig.page_size). A request waits for a slot;
its prompt is prefilled into the slot; then each decode step, which runs all slots together, gives it a token or several.
Where the pool has too few pages, a request may be preempted: it waits again and is prefilled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from capibara.core.types import Params, UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.engine.cache.batching import PREFILL_TOKENS, EngineConfig, Statistics, WhenFull
from capibara.inference.engine.core import EngineCore
from capibara.inference.engine.loop import EngineLoop
from capibara.inference.engine.reading import Reader
from capibara.inference.engine.recovery import Recovery
from capibara.inference.engine.requests import best_of
from capibara.inference.engine.requests.adapters import AdapterSlots
from capibara.inference.engine.requests.best_of import BestOf
from capibara.inference.engine.requests.following import Submission
from capibara.inference.engine.requests.request import InputProcessor
from capibara.inference.engine.requests.stream import Stream
from capibara.inference.engine.warm_up import warm_up
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import Adapter, Head, Model, longest_encoded
from capibara.sharding import Rules

__all__ = ["Engine", "EngineConfig", "WhenFull", "check_generates"]


class Engine:
    """Generates text for many concurrent requests; `submit` and streams are thread-safe.

    A request's text depends on its prompt, its sampling and its seed, not on other requests (except for rounding, since
    products of other sizes round differently). After `start` the engine's own thread does the work; without it, reading
    a stream or calling `run` does.

    Args:
      model: a decoder or an encoder-decoder.
      params: its parameters. The engine makes a copy in the compute dtype.
      vocabulary: of its training data.
      length: positions of a slot, for prompt and text together.
      config: how requests are batched.
      encoder_length: most tokens that an encoder reads.
      rules: how slots, keys and values are sharded on the parameters' mesh, if they have one.
      donate: whether to give `params` to the engine: its copy replaces them array by array, and they are deleted.
      adapters, adapter_slots: unmerged adapters that requests may use, and room for those that are loaded while it runs.

    Attributes:
      core: the scheduler, the programs and the state of the slots, which the engine's thread alone may change.
      reader: reads texts without continuing them.
      adapters: that requests may use; they are loaded and unloaded while it runs, in an engine of one process.

    Raises:
      UserError: the model does not generate, has no positions for such long rows, the slots do not fit in memory, or an
        adapter belongs to another model.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        vocabulary: Vocabulary,
        length: int,
        config: EngineConfig = EngineConfig(),
        encoder_length: int | None = None,
        rules: Rules = Rules(),
        donate: bool = False,
        adapters: Sequence[Adapter] = (),
        adapter_slots: AdapterSlots = AdapterSlots(),
    ):
        check_generates(model)
        for most, longest in ((length, model.config.max_length), (encoder_length or 0, longest_encoded(model.config))):
            if longest is not None and most > longest:
                raise UserError(f"the length of rows ({most}) must be at most the model's max_length: try {longest}")
        model = model.of_length(length)
        self.core = EngineCore(
            model, params, vocabulary.size, length, config, encoder_length, rules, donate, adapters, adapter_slots
        )
        self.adapters = self.core.adapters
        self._inputs = InputProcessor(
            vocabulary, length, config, encoder_length, self.core.pages, self.adapters, model.config.vocab_size
        )
        self._loop = EngineLoop(self.core, Recovery(self.core.scheduler, config, self._inputs.probe))
        sizes = {"usable": vocabulary.size, "length": length, "prefill_tokens": config.prefill_tokens or PREFILL_TOKENS}
        self.reader = Reader(model, self.core.params, self.adapters, rules, lambda: self._loop.leads, **sizes)
        self._config, self._length, self._vocab_size = config, length, model.config.vocab_size
        self._encodes = encoder_length is not None

    @property
    def rows(self) -> int:
        """Rows of the model's embedding: requests may have ids below it."""
        return self._vocab_size

    @property
    def slots(self) -> int:
        return self._config.slots

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of queued requests, and of busy slots."""
        return self.core.scheduler.waiting, sum(request is not None for request in self.core.scheduler.slots)

    @property
    def pages(self) -> tuple[int, int]:
        """Numbers of pages, and of busy pages; 0 without pages."""
        pages = self.core.pages
        return (pages.sizes.pages, pages.busy) if pages else (0, 0)

    @property
    def compiling(self) -> int:
        """Number of programs that are still to be compiled beside serving."""
        return self.core.compiler.left

    @property
    def statistics(self) -> Statistics:
        return self.core.runner.statistics

    @property
    def failed(self) -> bool:
        """Whether its thread has ended with an error; it then does no more work."""
        return self._loop.failed

    def update(self, params: Params) -> None:
        """Switches to other parameters of the same shapes from the next step on; recompiles nothing.

        Texts in progress keep what was read with the old ones. Thread-safe; drop your reference to `params` afterwards.
        """
        busy = self.core.scheduler.requests or self.core.runner.pending
        self.core.params.update(params, in_use=bool(busy) or self._loop.threaded)

    def warm_up(self, show: Callable[[int, int], None] = lambda done, count: None, background: bool = False) -> None:
        """Compiles the programs for all prompt lengths, and the steps. Call it before `start`.

        Args:
          show: called with the numbers of compiled programs and of all that are compiled before it returns.
          background: returns when a step and the programs for short prompts are compiled, and compiles the others in a
            thread after `start`. On a mesh it compiles all of them.
        """
        warm_up(self.core, self._config, self._length, self._encodes, self._inputs.request, show, background)

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar, so that a request that has it is submitted at once; thread-safe.

        Raises:
          UserError: the grammar is malformed, too complex, or has something that llguidance does not support.
        """
        self._inputs.grammars.matcher(grammar)

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = Sampling(),
        *,
        ends: Sequence[int] = (),
        likeliest: int = 0,
        adapter: str | None = None,
        spelled: Sequence[int] = (),
        salt: str = "",
    ) -> Stream:
        """Requests the text after a prompt.

        Args:
          prompt: text, which gets the beginning token, or token ids; an encoder reads it if there is one.
          sampling: options of the generation.
          ends: additional end token ids.
          likeliest: how many of the likeliest tokens to return with each piece, at most 20.
          adapter: name of the adapter to use; None: no adapter.
          spelled: ids of special tokens that are part of the text, as the tokenizer spells them.
          salt: what is read of the prompt is shared with requests of the same salt alone.

        Raises:
          UserError: the prompt does not fit in a slot, the adapter does not exist, or the grammar cannot be used.
        """
        self._inputs.check(sampling, likeliest, adapter)
        options: dict[str, Any] = {"ends": ends, "likeliest": likeliest, "adapter": adapter, "spelled": spelled}
        if sampling.num_decodes > 1:
            each = [self.submit(prompt, item, salt=salt, **options) for item in best_of.samplings(sampling)]
            return BestOf(self._loop.drive, sampling, each)
        request = self._inputs.request(prompt, sampling, self._loop.drive, salt=salt, **options)
        self._loop.submit(request)
        return request.stream

    def lead(self, send: Callable[[dict[str, Any]], None] | None) -> None:
        """Leads the other processes' engines from the next step on: they `follow` the messages that `send` sends.

        None: there are no others. All must have the same parameters, on the chips of all, and the same requests so far.
        """
        self._loop.lead(send)

    def follow(self, messages: Iterable[Mapping[str, object]]) -> None:
        """Makes the same steps as the leading engine, until its messages end.

        Raises:
          RuntimeError: the devices returned other tokens than there.
        """

        def submit(item: Submission) -> None:
            options: dict[str, Any] = {"likeliest": item.likeliest, "adapter": item.adapter, "salt": item.salt}
            stream = self.submit(item.ids, item.sampling, ends=item.ends, spelled=item.spelled, **options)
            stream.forward(lambda _: None)

        self._loop.follow(messages, submit)

    def start(self) -> Engine:
        """Starts a thread that works until `close`."""
        self._loop.start()
        return self

    def close(self) -> None:
        """Cancels all requests and stops the thread."""
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> None:
        """Works until there is nothing to do."""
        self._loop.run()

    def step(self) -> bool:
        """Admits requests to free slots and decodes tokens; returns False if there was nothing to do."""
        return self._loop.step()

    def fail(self, error: BaseException) -> None:
        """Stops working: all requests get this error. Thread-safe, also while a step hangs."""
        self._loop.fail(error)


def check_generates(model: Model) -> None:
    """Raises UserError for a model that does not generate."""
    if model.read is None:
        name = type(model.config).__name__
        why = (
            f"the model ({name}) is a masked language model: it fills in tokens of a whole text and cannot continue one"
            if model.config.data_kind == "masked"
            else f"the model of {name} has no `read` and `start_cache`, which generation needs"
        )
        raise UserError(f"{why}; sample from a decoder or an encoder-decoder, and leave SampleText.prompts empty")
    if model.config.head is Head.SCORE:
        raise UserError(
            f"the model ({type(model.config).__name__}.head is 'score') is a reward model and generates no text: name the "
            "language model, or score pairs by capibara evaluate --task=validation"
        )
    if model.config.moe is not None and model.config.moe.routing == "expert_choice":
        raise UserError(
            "Moe.routing is 'expert_choice': experts compare a token with later ones, which do not exist yet in generation; "
            "train with 'token_choice' to generate, or leave SampleText.prompts empty"
        )
