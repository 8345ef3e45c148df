"""One step of an engine: new requests, some of their prompts, and tokens for every row that has been read."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from capibara.core.types import Params
from capibara.inference.engine.adapters import Adapters
from capibara.inference.engine.batching import EngineConfig
from capibara.inference.engine.beam_requests import BeamSearcher
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.cache.prefix import PrefixCache
from capibara.inference.engine.placement import footprint
from capibara.inference.engine.placement.parameters import ServedParams, donated
from capibara.inference.engine.request import Request
from capibara.inference.engine.runner import programs
from capibara.inference.engine.runner.decode import DecodeRunner
from capibara.inference.engine.runner.decode_schedule import DecodeSchedule
from capibara.inference.engine.runner.prefill import Prefilled, PrefillQueue
from capibara.inference.engine.runner.speculative import Drafter
from capibara.inference.engine.scheduler import Scheduler
from capibara.models.api import Adapter, Model
from capibara.sharding import Rules


class EngineCore:
    """Builds the parts of an engine and makes its steps, all from one thread at a time.

    Where a step gives each row one token the host looks at it while the devices make the next; where it gives more, or
    tokens are guessed, the host looks first.

    Args:
      model: whose rows are as long as the slots.
      params: its parameters.
      usable: ids of its vocabulary.
      length, config, encoder_length, rules, donate, adapters: as of `Engine`.

    Attributes:
      params: what the programs read.
      adapters: that requests may name.
      pages: that the slots share; None: each has the memory of its whole length.
      schedule: how many tokens a step gives.
      prefill: prompts that are to be read.
      runner: the slots on the devices.
      scheduler: who has them, and who waits.
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
    ):
        self._length, self._draft_tokens = length, config.draft_tokens
        sizes, mesh = footprint.sizes_of(model, config, length, encoder_length), programs.mesh_of(params)
        compiled = programs.build(model, usable, sizes, mesh, rules)
        self.adapters = Adapters(model.plain, adapters, params, mesh, rules)
        served = donated(model, params, mesh, rules) if donate else compiled.serving(params)
        self.params = ServedParams(compiled.serving, served)
        state = footprint.allocated(compiled.start, config, length)
        if mesh is None:
            # Said to lie where the parameters do: else the program that is called first is compiled twice.
            state = jax.device_put(state, *jax.tree.leaves(served)[0].devices())
        self.pages = Pages(config.slots, length, sizes.pool) if sizes.pool else None
        self.schedule, whole = DecodeSchedule(config, length), reads_whole(model)
        kept = config.prefix_cache_mib * 2**20 if encoder_length is None and not whole else 0
        prefixes = PrefixCache(kept, getattr(model.config, "window", None)) if kept else None
        of_config = length, config.slots, config.prefill_tokens
        self.prefill = PrefillQueue(compiled, *of_config, prefixes, self.adapters, whole=whole)
        self.runner = DecodeRunner(
            compiled, state, config, model.config.vocab_size, self.adapters, self.pages, self.schedule
        )
        self._searcher = BeamSearcher(model, usable, sizes, mesh, rules)
        self.scheduler = Scheduler(config, length, self.pages, prefixes, self.prefill, self._searcher, self.runner)

    def step(self, new: Sequence[Request], cancelled: set[int], allowed: int | None = None) -> bool:
        """Gives free slots to requests and every slot tokens; False where there was nothing to do.

        What it does depends on what it is given and the tokens that come, `allowed` aside.

        Args:
          new: requests that have come since the step before.
          cancelled: numbers of requests that nobody wants any more.
          allowed: tokens that a program may give each row; None: as the schedule has it.
        """
        had = self.runner.pending
        if self.params.take():
            self.scheduler.restart()
        self.scheduler.enqueue(new)
        self.scheduler.drop(cancelled)
        searched = self._search()
        if self.runner.ahead > 1:
            # An end that is seen late would cost a whole program, and leave its slot to nobody.
            self.scheduler.receive(0)
        self.scheduler.admit()
        read = self._read_prompts()
        if self._draft_tokens or any(
            request.requested in request.forced or request.row_length > self._length
            for _, request in self.scheduler.active
        ):
            # All of these depend on what the tokens before say.
            self.scheduler.receive(0)
            read |= self._refill()
        active = [(slot, one) for slot, one in self.scheduler.active if one.row_length <= self._length]
        allowed = self.schedule.allowed() if allowed is None else allowed
        count = 1 if self.prefill.pending else self.schedule.tokens((one for _, one in active), allowed)
        active, count = self.scheduler.reserve(active, count)
        if active:
            self._decode(active, count)
        self.scheduler.receive(1 if active else 0)
        return bool(read or active or had or searched)

    def _search(self) -> bool:
        """Searches for texts that are asked for so; whether there were any."""
        found = self._searcher.run(self.params.current)
        if found is not None:
            self.runner.checksum.add(found)
        return found is not None

    def _read_prompts(self) -> bool:
        """Reads some of the prompts of requests that have a slot; whether there was anything to read."""
        pending = self.prefill.pending
        for prefilled in self.prefill.run(self.params.current):
            self._begin(prefilled)
        return pending

    def _refill(self) -> bool:
        """Reads the last tokens of full rows anew, for one token more each; whether there are any."""
        full = [request for _, request in self.scheduler.active if request.row_length > self._length]
        for request in full:
            tokens = request.tokens[-self._length :]
            logits, row = self.prefill.extend(self.params.current, request, tokens, None, 0, len(tokens))
            self._begin(Prefilled(request, row, logits))
        return bool(full)

    def _begin(self, prefilled: Prefilled) -> None:
        """Has a row that was read in its slot, and its next token requested."""
        self._free(self.runner.admit(prefilled))

    def _decode(self, active: Sequence[tuple[int, Request]], count: int) -> None:
        guesses = {slot: self._guess(request) for slot, request in active} if self._draft_tokens else {}
        if any(guesses.values()):
            self._free(self.runner.verify(self.params.current, active, guesses))
        else:
            self._free(self.runner.step(self.params.current, active, count))

    def _free(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.scheduler.free(request)

    def _guess(self, request: Request) -> list[int]:
        """Its next tokens but the last, as many as it may still have and its slot has room for, none that is forced."""
        most = min(self._draft_tokens, request.limit - request.requested - 1, self._length - request.row_length)
        if request.sampling.thinking_tokens is not None:  # a thought that begins among them must not end there
            most = min(most, request.sampling.thinking_tokens, *(f - request.requested - 1 for f in request.forced))
        if request.drafter is None:
            request.drafter = Drafter(request.tokens)
        tokens = request.drafter.guess(most) if most > 0 else []
        pages, slot = self.pages, request.slot
        if pages and slot is not None and tokens and not pages.grow(slot, request.row_length + len(tokens)):
            return tokens[: pages.room(slot) - request.row_length]  # for guesses nobody has to wait
        return tokens


def reads_whole(model: Model) -> bool:
    """Whether a prompt's tokens see each other both ways: the beginning of another prompt is then read otherwise."""
    return model.config.data_kind == "prefix"
