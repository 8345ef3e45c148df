"""One step of an engine: admits requests, reads parts of prompts, and decodes tokens for all rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from capibara import sharding
from capibara.core.types import Params, UserError
from capibara.inference.engine.beam_requests import BeamSearcher
from capibara.inference.engine.cache.batching import PART_TOKENS, PREFILL_TOKENS, CacheDtype, Drafts, EngineConfig
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.cache.prefix import PrefixCache
from capibara.inference.engine.placement import footprint
from capibara.inference.engine.placement.parameters import ServedParams, donated
from capibara.inference.engine.programs import programs
from capibara.inference.engine.programs.compiler import Compiler
from capibara.inference.engine.programs.speculative import Drafter, Placeholders
from capibara.inference.engine.requests.adapters import Adapters, AdapterSlots
from capibara.inference.engine.requests.faults import contained
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.runner.decode import DecodeRunner
from capibara.inference.engine.runner.decode_schedule import DecodeSchedule
from capibara.inference.engine.runner.mixed import MixedQueue, MixedSteps
from capibara.inference.engine.runner.prefilled import Prefilled
from capibara.inference.engine.runner.prompt_batches import PromptBatches
from capibara.inference.engine.runner.prompt_programs import PromptPrograms
from capibara.inference.engine.scheduler import Scheduler
from capibara.models.api import MTP, Adapter, Model, packs_prompts, without_mtp
from capibara.sharding import Rules


class EngineCore:
    """The parts of an engine, and its steps; used by one thread at a time.

    If a step gives each row one token, the host processes it while the devices compute the next; with several tokens or
    guesses, the host processes them first.

    Args:
      model: for rows as long as the slots.
      params: its parameters.
      usable: ids of its vocabulary.
      length, config, encoder_length, rules, donate, adapters, adapter_slots: as in `Engine`.

    Attributes:
      params: the parameters that programs read.
      adapters: that requests may use.
      pages: shared by the slots; None: each slot has memory for its whole length.
      schedule: number of tokens per step.
      reads_in_slot: whether the parts of long prompts are read into their slots.
      mixed: steps that read prompts beside the next tokens of texts; None: none are made.
      prefill_tokens: most prompt tokens to read between decode steps.
      compiler: compiles programs while others run.
      on_mesh: whether the parameters are on a mesh.
      prompts: the programs that read prompts.
      prefill: queue of prompts to read.
      runner: the slots on the devices.
      scheduler: assigns slots, and holds the queue.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        usable: int,
        length: int,
        config: EngineConfig,
        encoder_length: int | None,
        rules: Rules,
        donate: bool,
        adapters: Sequence[Adapter],
        adapter_slots: AdapterSlots,
    ):
        self._length, self._draft_tokens, self._drafts = length, config.draft_tokens, config.drafts
        model, params = _drafting(model, params, config)
        sizes, mesh = footprint.sizes_of(model, config, length, encoder_length), programs.mesh_of(params)
        compiled = programs.build(model, usable, sizes, mesh, rules)
        self.adapters = Adapters(model.plain, adapters, params, mesh, rules, adapter_slots)
        served = donated(model, params, mesh, rules) if donate else compiled.serving(params)
        self.params = ServedParams(compiled.serving, served)
        # Sharded explicitly like the parameters on one device: else the first program would be compiled twice.
        devices = jax.tree.leaves(served)[0].devices() if mesh is None else ()

        def start() -> programs.State:
            state = footprint.allocated(compiled.start, config, length)
            return jax.device_put(state, *devices) if devices else state

        state = start()  # first: it says what does not fit
        self.pages = Pages(config.slots, length, sizes.pool) if sizes.pool else None
        self.schedule, whole = DecodeSchedule(config, length), reads_whole(model)
        prefixes = None if encoder_length is not None or whole else _prefix_cache(model, config)
        self.compiler, self.on_mesh = Compiler(), mesh is not None
        self.runner = DecodeRunner(
            compiled, state, start, config, model.config.vocab_size, self.adapters, self.pages, self.schedule,
            self.compiler,
        )  # fmt: skip
        self.reads_in_slot = self.pages is not None and mesh is None and reads_in_slot(model)
        self.prefill_tokens = config.prefill_tokens or (PART_TOKENS if self.reads_in_slot else PREFILL_TOKENS)
        most = max(self.prefill_tokens, length) if whole else self.prefill_tokens
        batches = PromptBatches(self.adapters, length, most, whole, encoder_length is not None)
        self.prompts = PromptPrograms(
            compiled, self.params, self.runner, batches, most, self.reads_in_slot, self.compiler
        )
        self.mixed: MixedSteps | None = None
        if self.pages and self.reads_in_slot and mixes_prompts(model, config):
            self.mixed = MixedSteps(self.runner, self.params, self.adapters, self.pages, most, self.compiler)
        self.prefill = MixedQueue(
            compiled, 1 if self.mixed else config.slots, most, prefixes, batches, self.prompts,
            self.runner if self.reads_in_slot else None, whole=whole,
        )  # fmt: skip
        self._searcher = BeamSearcher(model, usable, sizes, mesh, rules)
        self.scheduler = Scheduler(config, length, self.pages, prefixes, self.prefill, self._searcher, self.runner)

    def step(self, new: Sequence[Request], cancelled: set[int], allowed: int | None = None) -> bool:
        """Admits requests to free slots and decodes tokens for every slot; returns False if there was nothing to do.

        Except for `allowed`, the step depends only on its arguments and the tokens from the devices.

        Args:
          new: requests that arrived since the last step.
          cancelled: numbers of requests to drop.
          allowed: most tokens per row in a program; None: chosen by the schedule.
        """
        had = self.runner.pending
        if self.params.take():
            self.scheduler.restart()
        self.scheduler.enqueue(new)
        self.scheduler.drop(cancelled)
        searched = self._search()
        if self.runner.ahead > 1:
            # Noticing an end late would cost a whole program, and leave its slot unused.
            self.scheduler.receive(0)
        self.scheduler.admit()
        mixed = self.mixed if self.mixed and self.prefill.mixes(self.scheduler.active) and self.mixed.compiled else None
        read = False if mixed else self._read_prompts()
        if self._draft_tokens or any(
            request.requested in request.forced or request.restricted or request.row_length > self._length
            for _, request in self.scheduler.active
        ):
            # All of these depend on the previous tokens.
            self.scheduler.receive(0)
            read |= self._refill()
        active = [(slot, item) for slot, item in self.scheduler.active if item.row_length <= self._length]
        allowed = self.schedule.allowed() if allowed is None else allowed
        one_by_one = mixed or self.prefill.pending or any(request.restricted for _, request in active)
        count = 1 if one_by_one else self.schedule.tokens((item for _, item in active), allowed)
        active, count = self.scheduler.reserve(active, count)
        pieces = self.prefill.pieces(mixed.room(len(active))) if mixed else []
        if mixed and pieces:
            done = mixed.run(active, pieces)
            self.prefill.share(pieces)
            self._free(done)
            self.scheduler.free_failed()
        elif active:
            self._decode(active, count)
        self.scheduler.receive(1 if active or pieces else 0)
        return bool(read or active or pieces or had or searched)

    def _search(self) -> bool:
        """Runs requested beam searches; returns whether there were any."""
        result = None if self.scheduler.lone else self._searcher.run(self.params.current)
        for tokens in result or ():
            self.runner.checksum.add(tokens)
        return result is not None

    def _read_prompts(self) -> bool:
        """Reads parts of the prompts of admitted requests; returns whether any was read."""
        waiting = self.prefill.waiting
        for prefilled in self.prefill.run(self.params.current):
            with contained(prefilled.request):
                self._begin(prefilled)
        self.scheduler.free_failed()
        return waiting and not self.prefill.stalled

    def _refill(self) -> bool:
        """Rereads the last tokens of full rows, for one more token each; returns whether there were any."""
        full = [request for _, request in self.scheduler.active if request.row_length > self._length]
        for request in full:
            with contained(request):
                tokens = request.tokens[-self._length :]
                logits, row = self.prefill.extend(self.params.current, request, tokens, None, 0, len(tokens))
                self._begin(Prefilled(request, row, logits, [request]))
        self.scheduler.free_failed()
        return bool(full)

    def _begin(self, prefilled: Prefilled) -> None:
        """Moves a row that was read into its slot, and requests its next token."""
        self._free(self.runner.admit(prefilled))

    def _decode(self, active: Sequence[tuple[int, Request]], count: int) -> None:
        guesses: dict[int, list[int]] = {}
        for slot, request in active if self._draft_tokens else ():
            guesses[slot] = []
            with contained(request):
                guesses[slot] = self._guess(request)
        if any(guesses.values()):
            self._free(self.runner.verify(self.params.current, active, guesses))
        else:
            self._free(self.runner.step(self.params.current, active, count))

    def _free(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.scheduler.free(request)

    def _guess(self, request: Request) -> list[int]:
        """Guesses for a request's next tokens except the last, within its limit and its slot, without forced tokens."""
        if request.restricted:  # what is allowed depends on each token
            return []
        most = min(self._draft_tokens, request.limit - request.requested - 1, self._length - request.row_length)
        if request.sampling.thinking_tokens is not None:  # a thought that begins in the guess must not end in it
            most = min(most, request.sampling.thinking_tokens, *(f - request.requested - 1 for f in request.forced))
        if request.requested < request.sampling.min_new_tokens:  # until then no end token may be chosen
            most = min(most, request.sampling.min_new_tokens - request.requested - 1)
        if request.drafter is None:
            request.drafter = Drafter(request.tokens) if self._drafts is Drafts.LOOKUP else Placeholders()
        tokens = request.drafter.guess(most) if most > 0 else []
        pages, slot = self.pages, request.slot
        if pages and slot is not None and tokens and not pages.grow(slot, request.row_length + len(tokens)):
            return tokens[: pages.room(slot) - request.row_length]  # nothing is preempted for guesses
        return tokens


def _drafting(model: Model, params: Params, config: EngineConfig) -> tuple[Model, Params]:
    """The model and its parameters with the modules that its drafts need, and no others.

    Raises:
      UserError: it cannot have these drafts.
    """
    if config.draft_tokens and model.config.stateful:
        raise UserError(
            f"EngineConfig.draft_tokens is {config.draft_tokens}, and the model's layers have states, which cannot "
            "forget wrong guesses: set EngineConfig.draft_tokens to 0"
        )
    if config.drafts is Drafts.LOOKUP:
        return without_mtp(model), {name: item for name, item in params.items() if name != MTP}
    if not model.config.mtp_windows:
        raise UserError(
            "EngineConfig.drafts is 'mtp', and the model has no modules for multi-token prediction (DecoderConfig.mtp): set "
            "EngineConfig.drafts = 'lookup'"
        )
    return model, params


def reads_in_slot(model: Model) -> bool:
    """Whether the parts of a prompt can be read into the pages of its slot: a row that grows needs copies and programs.

    A step of all slots meanwhile writes into that slot. That harms no pages, but states and windows, which forget.
    Accelerators attend to pages by a kernel for one token a row.
    """
    plain = not model.config.stateful and model.ahead is None and _shortest_window(model) is None
    return plain and not reads_whole(model) and sharding.platform() == "cpu"


def mixes_prompts(model: Model, config: EngineConfig) -> bool:
    """Whether prompts can be read beside the next tokens of texts, several in a step.

    Latent keys, 8-bit caches and blocks of users are not read so, tokens of a step would share the capacity of its experts, and
    drafts are verified in steps of their own.
    """
    if config.draft_tokens:
        return False
    plain, moe = model.config.latent is None and model.config.block_sizes is None, model.config.moe
    plain = plain and packs_prompts(model.config)
    return plain and not (moe is not None and moe.has_capacity) and config.cache_dtype is not CacheDtype.INT8


def reads_whole(model: Model) -> bool:
    """Whether a prompt's tokens attend in both directions: prefixes of other prompts then cannot be reused."""
    return model.config.data_kind == "prefix"


def _shortest_window(model: Model) -> int | None:
    """The fewest last tokens that a layer or a head keeps of a row; None: all keep all."""
    config = model.config
    streams = config.streaming is not None and any(config.streaming.heads or ())
    recent = config.streaming.recent_window if config.streaming is not None and streams else None
    return min((window for window in (getattr(config, "window", None), recent) if window is not None), default=None)


def _prefix_cache(model: Model, config: EngineConfig) -> PrefixCache | None:
    whole_rows = model.config.stateful or model.ahead is not None  # with states of their last tokens alone
    window = _shortest_window(model)
    return PrefixCache(config.prefix_cache_mib * 2**20, window, whole_rows) if config.prefix_cache_mib else None
