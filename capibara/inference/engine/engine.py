"""Continuous batching: requests come and go while a batch of slots is decoded.

Every slot is a row of one cache of fixed length. A request waits for a slot, its prompt is read and put there, and from
then on it gets tokens with every step of all slots. Where a step gives each row one token the host looks at it while
the devices make the next; where it gives more, or tokens are guessed, the host looks first.
"""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from capibara.core.multihost import peers
from capibara.core.types import Params, UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.engine import batching
from capibara.inference.engine.adapters import Adapters
from capibara.inference.engine.batching import EngineConfig, Statistics, WhenFull
from capibara.inference.engine.beam_requests import Searcher
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.cache.prefix import PrefixCache
from capibara.inference.engine.following import Asked, Orders
from capibara.inference.engine.placement import donated, footprint
from capibara.inference.engine.request import LIKELIEST, Request
from capibara.inference.engine.runner import programs
from capibara.inference.engine.runner.decode_schedule import Pace
from capibara.inference.engine.runner.prefill import Read, Reader
from capibara.inference.engine.runner.speculative import Drafter
from capibara.inference.engine.stream import Finish, Stream
from capibara.inference.sampling import best_of, sentinels
from capibara.inference.sampling.best_of import BestOf
from capibara.inference.sampling.sampler import GREEDY, Settings, settings_of, with_row
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server.http_errors import left_alone
from capibara.models.api import Adapter, Beside, Model
from capibara.sharding import Rules

__all__ = ["Engine", "EngineConfig", "WhenFull", "check_generates"]


class Engine:
    """Generates text for many requests at a time; `submit` and streams may be used from any thread.

    A request's text depends on its prompt, its sampling and its seed, not on what else there is to do (but for the last
    bits of numbers, which products of other sizes round otherwise). After `start` a thread of its own does the work;
    without it whoever reads a stream does, or calls `run`.

    Args:
      model: a decoder or an encoder-decoder.
      params: its parameters. The engine has a copy of its own, in the compute dtype.
      vocabulary: of its training data.
      length: places of a slot: tokens of the prompt and the text together.
      config: how requests are batched.
      encoder_length: an encoder reads at most this many tokens.
      rules: how slots, keys and values lie on the mesh of parameters that are spread over devices.
      donate: `params` are the engine's from now on: its copy takes their memory, array by array, and they are deleted.
      adapters: those that requests may name, beside the model and unmerged.

    Raises:
      UserError: the model has no next token, or no positions for so long rows, or the memory has no room for the slots,
        or an adapter is none of this model.
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
    ):
        check_generates(model)
        longest = model.config.max_length
        if longest is not None and length > longest:
            raise UserError(f"the length of rows ({length}) must be at most the model's max_length: try {longest}")
        model = model.of_length(length)
        self._vocabulary, self._length, self._config = vocabulary, length, config
        self._vocab_size, self._encoder_length = model.config.vocab_size, encoder_length
        self._names = None if encoder_length is None else sentinels.names(vocabulary)
        sizes = footprint.sizes_of(model, config, length, encoder_length)
        self._pace, self._ahead = Pace(config, length), 0  # tokens that the program which began last gives a row
        mesh = programs.mesh_of(params)
        self._programs = programs.build(model, vocabulary.size, sizes, mesh, rules)
        self._adapters = Adapters(model.plain, adapters, params, mesh, rules)
        self._params = donated.served(model, params, mesh, rules) if donate else self._programs.serving(params)
        self._updated, self._generation = None, 0
        self._state = footprint.allocated(self._programs.start, config, length)
        self._pages = sizes.pool and Pages(config.slots, length, sizes.pool)
        if mesh is None:
            # Said to lie where the parameters do: else the program that is called first is compiled twice.
            self._state = jax.device_put(self._state, *jax.tree.leaves(self._params)[0].devices())
        window = getattr(model.config, "window", None)
        kept = config.prefix_cache_mib * 2**20 if encoder_length is None and not reads_whole(model) else 0
        self._prefixes = PrefixCache(kept, window) if kept else None
        self._reader = Reader(
            self._programs,
            length,
            config.slots,
            config.prefill_tokens,
            self._prefixes,
            self._adapters,
            whole=reads_whole(model),
        )
        self._searcher = Searcher(model, vocabulary.size, sizes, mesh, rules)
        self._settings = Settings(*(np.repeat(x, config.slots, axis=0) for x in GREEDY))
        self.statistics = Statistics()
        self._requests: list[Request | None] = [None] * config.slots
        self._new: list[Request] = []  # since the last step
        self._waiting: deque[Request] = deque()
        self._pending: deque[tuple[programs.Chosen, list[tuple[int, Request]], float | None]] = deque()
        self._changed, self._working = threading.Condition(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = self._failed = False
        self._asked = 0  # requests so far
        self._send: Callable[[dict[str, Any]], None] | None = None
        self._seen_sum = 0  # of all tokens that have come

    @property
    def slots(self) -> int:
        return self._config.slots

    def update(self, params: Params) -> None:
        """Goes on with other parameters of the same shapes, from the next step on; nothing is compiled again.

        What was read of the texts that are under way was read with the old ones. From any thread; drop yours.
        """
        busy = self._new or self._waiting or self._searcher.waiting or self._pending or any(self._requests)
        if self._thread is None and not busy:
            self._params = None  # no room for two
        updated = self._programs.serving(params)
        with self._changed:
            self._updated = updated

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names that requests may have for `adapter`."""
        return self._adapters.names

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait for a slot, and slots that are taken."""
        waiting = len(self._new) + len(self._waiting) + len(self._searcher.waiting)
        return waiting, sum(request is not None for request in self._requests)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages in all, and those that are taken; none where slots have the memory of their whole length."""
        return (self._pages.sizes.pages, self._pages.busy) if self._pages else (0, 0)

    @property
    def failed(self) -> bool:
        """Whether its thread has ended with an error: it does no more work."""
        return self._failed

    def warm_up(self, show: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Compiles what prompts of all lengths need, and the steps, before anybody waits for it. Before `start`.

        Args:
          show: told how many programs are ready, of how many.
        """
        prefixes, self._reader.prefixes = self._reader.prefixes, None
        asked = Sampling(temperature=0.0, max_new_tokens=1)
        sizes = batching.prompt_shapes(self._config, self._length, self._encoder_length is not None)
        prompts = [one for one in sizes if not self._pages or self._pages.fits(one[0], one[1])]
        for done, (rows, size, likeliest) in enumerate(prompts):
            show(done, len(prompts) + 2)
            tokens = [[(row + 1) % self._vocab_size] * size for row in range(rows)]
            for stream in [self.submit(prompt, asked, likeliest=likeliest) for prompt in tokens]:
                stream.result()
        self._reader.prefixes, self.statistics = prefixes, Statistics()
        zeros, drafts = np.zeros(self.slots, np.int32), self._config.draft_tokens
        for done, alternatives in enumerate((0, LIKELIEST), len(prompts)):
            show(done, len(prompts) + 2)
            common = self._settings, zeros, zeros
            self._state, chosen = self._programs.step(
                self._params, self._state, *common, np.int32(1), self._table, alternatives, self._beside
            )
            if drafts:
                guessed = np.zeros((self.slots, drafts), np.int32)
                self._state, chosen = self._programs.verify(
                    self._params, self._state, *common, guessed, zeros, self._table, alternatives, self._beside
                )
            jax.block_until_ready(chosen)
        show(len(prompts) + 2, len(prompts) + 2)

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = Sampling(),
        *,
        ends: Sequence[int] = (),
        likeliest: int = 0,
        adapter: str | None = None,
    ) -> Stream:
        """Asks for the text after a prompt.

        Args:
          prompt: text, to which the beginning token is added, or ids as they are; an encoder reads it where there is one.
          sampling: how the text is made.
          ends: ids that end it, beside the vocabulary's end tokens.
          likeliest: how many of the likeliest tokens each piece names, at most 20.
          adapter: the name of the one that its row is read with; None: the model alone.

        Raises:
          UserError: the prompt has no place in a slot, or there is no such adapter.
        """
        vocabulary, encoder, limit = self._vocabulary, None, sampling.max_new_tokens
        if not 0 <= likeliest <= LIKELIEST:
            raise UserError(f"likeliest is {likeliest}, must be from 0 to {LIKELIEST}")
        if sampling.beams is not None:
            self._check_searches(likeliest, adapter)
        if sampling.num_decodes > 1:
            submit = functools.partial(self.submit, prompt, ends=ends, likeliest=likeliest, adapter=adapter)
            return BestOf(self._drive, sampling, [submit(one) for one in best_of.samplings(sampling)])
        if self._encoder_length is not None:
            spelled = sentinels.ids_of(prompt, vocabulary) if isinstance(prompt, str) else prompt
            encoder = sentinels.encoder_entries(spelled, self._encoder_length, vocabulary.pad_id)
            ids = [vocabulary.pad_id]
        else:
            ids = [vocabulary.bos_id, *vocabulary.encode(prompt)] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("the prompt is empty, must have at least one token")
        asked = Asked(spelled if encoder else ids, sampling, tuple(ends), likeliest, adapter)
        if self._config.when_full is WhenFull.SLIDE:
            ids = ids[-self._length :]
        elif len(ids) > self._length:
            raise UserError(f"the prompt has {len(ids)} tokens, must have at most {self._length}: shorten it")
        if self._config.when_full is not WhenFull.SLIDE or sampling.beams is not None:  # which do not slide together
            limit = min(limit, self._length - len(ids) + 1)
        if self._pages:
            limit = min(limit, self._pages.most_new(len(ids)))  # as a slot's length does
        stream, ends = Stream(self._drive), (*vocabulary.end_ids, *ends)
        request = Request(
            ids, sampling, vocabulary, stream,
            limit=limit, ends=ends, likeliest=likeliest, encoder=encoder, names=self._names, asked=asked,
            adapter=self._adapters.number(adapter),
        )  # fmt: skip
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._asked, request.number = self._asked + 1, self._asked
            self._new.append(request)
            self._changed.notify_all()
        return stream

    def _check_searches(self, likeliest: int, adapter: str | None) -> None:
        """Raises UserError where a text is not searched for."""
        if self._config.draft_tokens:
            raise UserError(
                f"EngineConfig.draft_tokens is {self._config.draft_tokens}, but beam search guesses no tokens: set it to 0, "
                "or leave Sampling.beams out"
            )
        if likeliest:
            raise UserError(f"likeliest is {likeliest}, but beam search names no other tokens: set it to 0")
        if adapter is not None:
            raise UserError(
                f"adapter is {adapter!r}, but beam search reads with the model alone: merge it, or leave Sampling.beams out"
            )

    def lead(self, send: Callable[[dict[str, Any]], None] | None) -> None:
        """From the next step on the engines of the other processes do what this one does: they `follow` what is sent.

        None: there are no others. All have the same parameters, on the chips of all, and were asked for the same so far.
        """
        self._send = send

    def follow(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Makes the steps of the engine that leads, until there are no more messages.

        Raises:
          RuntimeError: other tokens have come of the devices than there.
        """
        for message in messages:
            orders = Orders.of(message)
            if orders.seen != self._seen_sum:
                raise RuntimeError(
                    "this process has seen other tokens than process 0: its devices, packages or files are not the same"
                )
            for one in orders.asked:
                stream = self.submit(one.ids, one.sampling, ends=one.ends, likeliest=one.likeliest, adapter=one.adapter)
                stream.forward(lambda _: None)
            new, self._new = self._new, []
            self._advance(new, set(orders.cancelled), orders.most)

    def start(self) -> Engine:
        """Works in a thread of its own until `close`."""
        if self._thread is None:
            self._pace.read_along = True
            self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Cancels what there is and stops the thread."""
        with self._changed:
            self._closing = True
            for request in [*self._new, *self._waiting, *self._searcher.waiting, *filter(None, self._requests)]:
                request.stream.cancel()
            self._changed.notify_all()
        if self._thread is None:
            self.run()
        else:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> None:
        """Works until there is nothing to do."""
        while self._drive():
            pass

    def step(self) -> bool:
        """Gives free slots to waiting requests and every slot tokens; False where there was nothing to do."""
        with self._changed:
            new, self._new = self._new, []
            known = [*new, *self._waiting, *self._searcher.waiting, *filter(None, self._requests)]
        cancelled = {request.number for request in known if request.stream.cancelled}
        most = None
        if self._send is not None:
            asked, most = [request.asked for request in new], self._pace.allowed()
            self._send(Orders(asked, sorted(cancelled), most, self._seen_sum).packed())
        return self._advance(new, cancelled, most)

    def _advance(self, new: list[Request], cancelled: set[int], most: int | None) -> bool:
        """A step: what it does depends on what it is given and the tokens that come, `most` aside."""
        had = bool(self._pending)
        self._take_updated()
        with self._changed:
            self._waiting.extend(request for request in new if request.sampling.beams is None)
            self._searcher.add([request for request in new if request.sampling.beams is not None])
        self._drop_cancelled(cancelled)
        searched = self._search()
        if self._ahead > 1:
            self._receive(0)  # an end that is seen late would cost a whole program, and leave its slot to nobody
        admitted = self._admit_waiting()
        if self._config.draft_tokens or any(
            request.begun in request.forced or request.places > self._length for _, request in self._active()
        ):
            # All of these depend on what the tokens before say.
            self._receive(0)
            admitted |= self._refill()
        active = [(slot, request) for slot, request in self._active() if request.places <= self._length]
        most = self._pace.allowed() if most is None else most
        count = 1 if self._reader.waits else self._pace.tokens((request for _, request in active), most)
        if self._pages:
            active, count = self._with_pages(active, count)
        if active:
            self._decode(active, count)
        self._receive(1 if active else 0)
        return bool(admitted or active or had or searched)

    def _search(self) -> bool:
        """Searches for texts that are asked for so; whether there were any."""
        found = self._searcher.run(self._params)
        if found is not None:
            self._seen_sum = zlib.crc32(found.tobytes(), self._seen_sum)
        return found is not None

    def _take_updated(self) -> None:
        with self._changed:
            updated, self._updated = self._updated, None
        if updated is not None:
            self._params = updated
            self._generation += 1
            self._reader.begin_anew(self._generation)
            if self._prefixes:
                self._prefixes.clear()

    def _active(self) -> list[tuple[int, Request]]:
        """The slots whose row is read."""
        return [(slot, one) for slot, one in enumerate(self._requests) if one is not None and one.written]

    def _drive(self) -> bool:
        if self._thread is not None:
            return False
        with self._working:
            return self.step()

    def _work(self) -> None:
        try:
            while True:
                if self.step():
                    continue
                with self._changed:
                    left = self._new or self._waiting or self._searcher.waiting
                    if self._closing and not left:
                        return
                    if not left:
                        self._changed.wait()
        except BaseException as error:
            if self._failed:
                return  # whoever said so knows more
            if self._send is not None and peers.told() is not None:
                self.fail(left_alone())
                return
            self.fail(error)
            if self._pages:
                for slot in range(self.slots):
                    self._pages.release(slot)
            raise

    def fail(self, error: BaseException) -> None:
        """Does no more work: all who wait are told why. From any thread, also while a step hangs."""
        with self._changed:
            self._closing = self._failed = True
            pending = (request for _, rows, _ in list(self._pending) for _, request in rows)
            left = {id(r): r for r in (*self._new, *self._waiting, *self._searcher.waiting, *self._requests, *pending)}
        for request in left.values():
            if request is not None and not request.finished:
                request.stream.fail(error)

    def _drop_cancelled(self, numbers: set[int]) -> None:
        if not numbers:
            return
        with self._changed:
            dropped = [request for request in self._waiting if request.number in numbers]
            for request in dropped:
                self._waiting.remove(request)
        dropped += [request for request in self._searcher.waiting if request.number in numbers]
        dropped += [request for request in self._requests if request is not None and request.number in numbers]
        for request in dropped:
            request.cancelled = True
            if not request.finished:
                request.finish(Finish.CANCELLED)
            self._searcher.drop(request)
            self._free(request)

    def _admit_waiting(self) -> bool:
        """Gives free slots to requests, and reads some of their prompts; whether there was anything to read."""
        for slot, taken in enumerate(self._requests):
            if taken is not None:
                continue
            with self._changed:
                request = self._waiting[0] if self._waiting else None
                if request is None or (self._pages and not self._pages.begin(slot, len(request.tokens))):
                    break
                self._requests[slot] = self._waiting.popleft()
            request.slot, request.generation = slot, self._generation
            one = settings_of([request.sampling])
            self._settings = Settings(*map(lambda old, new: with_row(old, slot, new), self._settings, one))
            self._reader.add(request)
        waits = self._reader.waits
        for read in self._reader.read(self._params):
            self._begin(read)
        return waits

    def _refill(self) -> bool:
        """Reads the last tokens of full rows anew, for one token more each; whether there are any."""
        full = [request for _, request in self._active() if request.places > self._length]
        for request in full:
            tokens = request.tokens[-self._length :]
            logits, row = self._reader.go_on(self._params, request, tokens, None, 0, len(tokens))
            self._begin(Read(request, row, logits))
        return bool(full)

    def _begin(self, read: Read) -> None:
        """Puts a row that was read into its slot and begins a token."""
        request, place = read.request, read.request.slot
        assert place is not None, "it was given one"
        seen, index = self._seen(request), np.array([request.begun], np.int32)
        slot, forced = np.int32(place), np.array([request.forced.get(request.begun, -1)], np.int32)
        settings = Settings(*(x[place : place + 1] for x in self._settings))
        alternatives = LIKELIEST if request.likeliest else 0
        self._state, chosen = self._programs.admit(
            self._state, read.row, read.logits, slot, settings, index, forced, seen, self._table, alternatives
        )
        request.written = True
        self._begun(chosen, [(0, request)])

    def _seen(self, request: Request) -> np.ndarray:
        """The tokens [1, V] that the request's penalty is for."""
        seen = np.zeros((1, self._vocab_size), bool)
        seen[0, request.tokens] = request.sampling.repetition_penalty != 1
        return seen

    @property
    def _beside(self) -> Beside | None:
        """The adapters, and which of them each slot has."""
        return self._adapters.of([0 if request is None else request.adapter for request in self._requests])

    @property
    def _table(self) -> np.ndarray | None:
        return None if self._pages is None else self._pages.table

    def _with_pages(self, active: list[tuple[int, Request]], count: int) -> tuple[list[tuple[int, Request]], int]:
        """Gives slots the pages that the next steps write to, the first requests first; those that go on, and the steps.

        Where there is none the request that came last goes back to the queue. The first of all never does: it goes on,
        and alone it has a place.
        """
        pages = self._pages
        assert pages is not None, "slots have pages"
        for slot, request in sorted(active, key=lambda one: one[1].number):
            while request.slot is not None and not pages.grow(slot, request.places):
                if self._pending:
                    self._receive(0)  # texts that have ended make room, and of the others all tokens are known
                else:
                    self._put_back(max(filter(None, self._requests), key=lambda one: one.number))
        active = [(slot, request) for slot, request in active if request.slot is not None]
        ahead = lambda: [(slot, request.places + count - 1) for slot, request in active]  # noqa: E731
        while count > 1 and not pages.fit(ahead()):  # nobody is put back for more than one
            count -= 1
        for slot, tokens in ahead():
            pages.grow(slot, tokens)
        return active, count

    def _put_back(self, request: Request) -> None:
        """Takes the slot of a request of which all tokens are known, and lets it wait in front of the others."""
        self.statistics.put_back += 1
        with self._changed:  # first: whoever closes, or fails, finds it here or in its slot
            self._waiting.appendleft(request)
        self._free(request)
        self._remember(request)

    def _decode(self, active: list[tuple[int, Request]], count: int) -> None:
        guesses = {slot: self._guess(request) for slot, request in active} if self._config.draft_tokens else {}
        index, forced = np.zeros(self._config.slots, np.int32), np.full(self._config.slots, -1, np.int32)
        for slot, request in active:
            index[slot], forced[slot] = request.begun, request.forced.get(request.begun, -1)
        alternatives = LIKELIEST if any(request.likeliest for _, request in active) else 0
        self.statistics.steps += 1
        if any(guesses.values()):
            self._verify(active, guesses, index, forced, alternatives)
            return
        self._ahead, at_s = count, time.monotonic()
        given = self._params, self._state, self._settings, index, forced, np.int32(count)
        self._state, chosen = self._programs.step(*given, self._table, alternatives, self._beside)
        self._begun(chosen, active, [count] * self._config.slots, at_s)

    def _guess(self, request: Request) -> list[int]:
        """Its next tokens but the last, as many as it may still have and its place allows, and none that is forced."""
        most = min(self._config.draft_tokens, request.limit - request.begun - 1, self._length - request.places)
        if request.sampling.thinking_tokens is not None:  # a thought that begins among them must not end there
            most = min(most, request.sampling.thinking_tokens, *(f - request.begun - 1 for f in request.forced))
        if request.drafter is None:
            request.drafter = Drafter(request.tokens)
        tokens = request.drafter.guess(most) if most > 0 else []
        pages, slot = self._pages, request.slot
        if pages and slot is not None and tokens and not pages.grow(slot, request.places + len(tokens)):
            return tokens[: pages.room(slot) - request.places]  # for guesses nobody has to wait
        return tokens

    def _verify(
        self,
        active: list[tuple[int, Request]],
        guesses: dict[int, list[int]],
        index: np.ndarray,
        forced: np.ndarray,
        alternatives: int,
    ) -> None:
        guessed = np.zeros((self._config.slots, self._config.draft_tokens), np.int32)
        counts = np.zeros(self._config.slots, np.int32)
        for slot, tokens in guesses.items():
            counts[slot], guessed[slot, : len(tokens)] = len(tokens), tokens
        given = self._params, self._state, self._settings, index, forced, guessed, counts
        self._state, chosen = self._programs.verify(*given, self._table, alternatives, self._beside)
        held = jax.device_get(chosen.counts)
        self.statistics.drafted += int(counts.sum())
        for slot, request in active:
            self.statistics.accepted += int(held[slot]) - 1
            if guesses[slot] and request.drafter is not None:
                request.drafter.told(int(held[slot]) - 1)
        self._begun(chosen, active, held)

    def _begun(
        self,
        chosen: programs.Chosen,
        rows: list[tuple[int, Request]],
        counts: Sequence[int] | np.ndarray | None = None,
        at_s: float | None = None,
    ) -> None:
        """The devices were asked for `counts` tokens of each row, None: for one; `at_s`: when, to be timed."""
        self._pending.append((chosen, rows, at_s))
        for place, request in rows:
            count = 1 if counts is None else int(counts[place])
            request.begun += count
            self.statistics.tokens += count
            if request.begun == request.limit:  # the slot is free before the last token is back
                self._free(request)

    def _receive(self, left: int) -> None:
        """Takes the tokens of all but the last `left` programs."""
        while len(self._pending) > left:
            # Still there if they fail: some of its requests may have no slot any more.
            chosen, rows, at_s = self._pending[0]
            tokens, log_probabilities, drawn, likeliest, theirs, counts = jax.device_get(chosen)
            self._pace.came(at_s, int(counts[0]))
            self._seen_sum = zlib.crc32(tokens.tobytes(), self._seen_sum)
            for place, request in rows:
                for step in range(counts[place]):
                    count = min(request.likeliest, likeliest.shape[2])
                    named = zip(likeliest[place, step, :count].tolist(), theirs[place, step, :count].tolist())
                    of_one = float(log_probabilities[place, step]), float(drawn[place, step])
                    request.receive(int(tokens[place, step]), *of_one, tuple(named))
                if request.finished:
                    self._free(request)
                    self._remember(request)
            self._pending.popleft()

    def _free(self, request: Request) -> None:
        """Takes the request's slot away, with a copy of its row where later prompts may begin so."""
        slot, request.slot = request.slot, None
        if slot is None:
            return
        self._requests[slot] = None
        self._reader.drop(request)
        read, written, request.written = request.places - 1, request.written, False
        current = written and request.generation == self._generation
        if self._prefixes and current and read <= self._length and not request.cancelled:
            places = batching.bucket(read, self._length)
            request.row = self._programs.row(self._state, np.int32(slot), self._table, places), read
        if self._pages:
            self._pages.release(slot)
        self._settings = Settings(*map(lambda old, new: with_row(old, slot, new), self._settings, GREEDY))

    def _remember(self, request: Request) -> None:
        """Keeps the row of a finished request, with the tokens of it that are known."""
        if request.row is not None:
            (row, read), request.row = request.row, None
            known = min(read, len(request.tokens))
            if self._prefixes is not None and request.generation == self._generation:
                row = row | {"lengths": np.array([known], np.int32)}
                self._prefixes.keep(request.tokens[:known], row, request.adapter)


def reads_whole(model: Model) -> bool:
    """Whether a prompt's tokens see each other both ways: the beginning of another prompt is then read otherwise."""
    return model.config.data_kind == "prefix"


def check_generates(model: Model) -> None:
    """Raises UserError for a model that has no next token."""
    if model.read is None:
        name = type(model.config).__name__
        why = (
            f"the model ({name}) is a masked language model: it fills in tokens of a whole text and cannot continue one"
            if model.config.data_kind == "masked"
            else f"the model of {name} has no `read` and `start_cache`, by which texts are written"
        )
        raise UserError(f"{why}; sample from a decoder or an encoder-decoder, and leave SampleText.prompts empty")
    if model.config.moe is not None and model.config.moe.routing == "expert_choice":
        raise UserError(
            "Moe.routing is 'expert_choice': experts compare a token with later ones, which are not there yet while a text "
            "is written; train with 'token_choice' to generate, or leave SampleText.prompts empty"
        )
