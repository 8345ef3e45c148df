"""Continuous batching: requests come and go while a batch of slots is decoded.

Every slot is a row of one cache of fixed length. A request waits for a slot, its prompt is read alone and put there, and
from then on it gets a token with every step of all slots. The host looks at the tokens of one step while the devices
make the next.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from capibara.config import configurable
from capibara.data.vocabulary import Vocabulary
from capibara.inference import programs, spelling
from capibara.inference.choose import Settings, settings_of
from capibara.inference.prefix import PrefixCache
from capibara.inference.request import LIKELIEST, Request
from capibara.inference.sampling import Sampling
from capibara.inference.stream import Finish, Stream
from capibara.models.api import Model
from capibara.types import Params, UserError

_GREEDY = Settings(
    *(np.array([x], dtype) for x, dtype in zip((0, 0, 1, 0, 1), ("f4", "i4", "f4", "f4", "f4"))), np.zeros((1, 2), "u4")
)
_SMALLEST_BUCKET = 32


class WhenFull(enum.StrEnum):
    """What happens to a row that is as long as its slot: it ends, or its last tokens are read again for every new one."""

    STOP = "stop"
    SLIDE = "slide"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How requests are batched.

    Attributes:
      slots: requests that are decoded together.
      when_full: what happens when a row is full.
      prefix_cache_mib: memory for rows whose beginnings later prompts may share; 0: none. A prompt that was read in two
        parts differs in the last bits of its numbers from one that was read at once.
    """

    slots: int = 8
    when_full: WhenFull = WhenFull.STOP
    prefix_cache_mib: int = 256

    def __post_init__(self):
        if self.slots < 1:
            raise UserError(f"EngineConfig.slots is {self.slots}, must be at least 1")
        if self.prefix_cache_mib < 0:
            raise UserError(f"EngineConfig.prefix_cache_mib is {self.prefix_cache_mib}, must be at least 0 (0: none)")


class Engine:
    """Generates text for many requests at a time; `submit` and streams may be used from any thread.

    A request's text depends on its prompt, its sampling and its seed, not on what else there is to do. After `start` a
    thread of its own does the work; without it whoever reads a stream does, or calls `run`.

    Args:
      model: a decoder or an encoder-decoder.
      params: its parameters. The engine has a copy of its own, in the compute dtype: drop yours.
      vocabulary: of its training data.
      length: places of a slot: tokens of the prompt and the text together.
      config: how requests are batched.
      encoder_length: an encoder reads at most this many tokens.

    Raises:
      UserError: the model has no next token, or no positions for so long rows.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        vocabulary: Vocabulary,
        length: int,
        config: EngineConfig = EngineConfig(),
        encoder_length: int | None = None,
    ):
        check_generates(model)
        longest = model.config.max_length
        if longest is not None and length > longest:
            raise UserError(f"the length of rows ({length}) must be at most the model's max_length: try {longest}")
        self._vocabulary, self._length, self._config = vocabulary, length, config
        self._vocab_size, self._encoder_length = model.config.vocab_size, encoder_length
        self._names = None if encoder_length is None else spelling.names(vocabulary)
        mesh = _mesh_of(params)
        self._programs = programs.build(model, vocabulary.size, config.slots, length, encoder_length, mesh)
        self._params = self._programs.serving(params)
        self._state = self._programs.start()
        if _mesh_of(params) is None:
            # Said to lie where the parameters do: else the program that is called first is compiled twice.
            self._state = jax.device_put(self._state, *jax.tree.leaves(self._params)[0].devices())
        window = getattr(model.config, "window", None)
        kept = config.prefix_cache_mib * 2**20 if encoder_length is None else 0
        self._prefixes = PrefixCache(kept, window) if kept else None
        self._settings = Settings(*(np.repeat(x, config.slots, axis=0) for x in _GREEDY))
        self._requests: list[Request | None] = [None] * config.slots
        self._waiting: deque[Request] = deque()
        self._pending: deque[tuple[programs.Chosen, list[tuple[int, Request]]]] = deque()
        self._changed, self._working = threading.Condition(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = self._failed = False

    @property
    def slots(self) -> int:
        return self._config.slots

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait for a slot, and slots that are taken."""
        return len(self._waiting), sum(request is not None for request in self._requests)

    @property
    def failed(self) -> bool:
        """Whether its thread has ended with an error: it does no more work."""
        return self._failed

    @property
    def prompt_sizes(self) -> list[int]:
        """The numbers of places for which prompts are read: a program is compiled for each when it is first needed."""
        if self._encoder_length is not None:
            return [1]
        return sorted({self._bucket(count) for count in range(2, self._length + 1)})

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = Sampling(),
        *,
        ends: Sequence[int] = (),
        likeliest: int = 0,
    ) -> Stream:
        """Asks for the text after a prompt.

        Args:
          prompt: text, to which the beginning token is added, or ids as they are; an encoder reads it where there is one.
          sampling: how the text is made.
          ends: ids that end it, beside the vocabulary's end token.
          likeliest: how many of the likeliest tokens each piece names, at most 20.

        Raises:
          UserError: the prompt has no place in a slot.
        """
        vocabulary, encoder, limit = self._vocabulary, None, sampling.max_new_tokens
        if not 0 <= likeliest <= LIKELIEST:
            raise UserError(f"likeliest is {likeliest}, must be from 0 to {LIKELIEST}")
        if self._encoder_length is not None:
            ids = spelling.ids_of(prompt, vocabulary) if isinstance(prompt, str) else prompt
            encoder = spelling.encoder_entries(ids, self._encoder_length, vocabulary.pad_id)
            ids = [vocabulary.pad_id]
        else:
            ids = [vocabulary.bos_id, *vocabulary.encode(prompt)] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("the prompt is empty, must have at least one token")
        if self._config.when_full is WhenFull.SLIDE:
            ids = ids[-self._length :]
        elif len(ids) > self._length:
            raise UserError(f"the prompt has {len(ids)} tokens, must have at most {self._length}: shorten it")
        else:
            limit = min(limit, self._length - len(ids) + 1)
        stream, ends = Stream(self._drive), (vocabulary.eos_id, *ends)
        request = Request(
            ids, sampling, vocabulary, stream,
            limit=limit, ends=ends, likeliest=likeliest, encoder=encoder, names=self._names,
        )  # fmt: skip
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._waiting.append(request)
            self._changed.notify_all()
        return stream

    def start(self) -> Engine:
        """Works in a thread of its own until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Cancels what there is and stops the thread."""
        with self._changed:
            self._closing = True
            for request in [*self._waiting, *filter(None, self._requests)]:
                request.stream.cancel()
            self._changed.notify_all()
        if self._thread is None:
            self.run()
        else:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(self) -> None:
        """Works until there is nothing to do."""
        while self._drive():
            pass

    def step(self) -> bool:
        """Gives free slots to waiting requests and every slot a token; False where there was nothing to do."""
        self._drop_cancelled()
        admitted = self._admit_waiting()
        active = [(slot, request) for slot, request in enumerate(self._requests) if request is not None]
        if any(request.begun in request.forced or request.places > self._length for _, request in active):
            # Both depend on what the tokens before say.
            self._receive(0)
            admitted |= self._refill()
        active = [(slot, request) for slot, request in enumerate(self._requests) if request is not None]
        active = [(slot, request) for slot, request in active if request.places <= self._length]
        if active:
            self._decode(active)
        had = bool(self._pending)
        self._receive(1 if active else 0)
        return bool(admitted or active or had)

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
                    if self._closing and not self._waiting:
                        return
                    if not self._waiting:
                        self._changed.wait()
        except BaseException as error:
            with self._changed:
                self._closing = self._failed = True
                left = {
                    id(r): r for r in (*self._waiting, *self._requests, *(r for _, p in self._pending for _, r in p))
                }
            for request in left.values():
                if request is not None and not request.finished:
                    request.stream.fail(error)
            raise

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = [request for request in self._waiting if request.stream.cancelled]
            for request in cancelled:
                self._waiting.remove(request)
        cancelled += [request for request in self._requests if request is not None and request.stream.cancelled]
        for request in cancelled:
            if not request.finished:
                request.finish(Finish.CANCELLED)
            self._free(request)

    def _admit_waiting(self) -> bool:
        """Whether a request was given a slot."""
        admitted = False
        for slot, taken in enumerate(self._requests):
            if taken is not None:
                continue
            with self._changed:
                request = self._waiting.popleft() if self._waiting else None
            if request is None:
                break
            self._requests[slot], request.slot, admitted = request, slot, True
            one = settings_of([request.sampling])
            self._settings = Settings(*map(lambda old, new: _with_row(old, slot, new), self._settings, one))
            self._read(request, *self._beginning(request))
        return admitted

    def _refill(self) -> bool:
        """Reads the last tokens of full rows anew, for one token more each; whether there are any."""
        full = [request for request in self._requests if request is not None and request.places > self._length]
        for request in full:
            self._read(request, request.tokens[-self._length :], None, 0)
        return bool(full)

    def _beginning(self, request: Request) -> tuple[list[int], Any, int]:
        """The prompt, and of what was read before of it the row's cache and the number of tokens."""
        found = self._prefixes.find(request.tokens) if self._prefixes else None
        if found is None:
            return request.tokens, None, 0
        prefix, common = found
        request.cached_tokens = common
        return request.tokens, prefix.row | {"lengths": np.array([common], np.int32)}, common

    def _read(self, request: Request, tokens: Sequence[int], row: Any, known: int) -> None:
        """Reads the tokens after the first `known`, which `row` has, puts the row into the slot and begins a token."""
        places, rest = self._bucket(len(tokens)), tokens[known:]
        size = places if row is None else self._bucket(len(rest))
        batch = {"tokens": _padded(rest, size), "counts": np.array([len(rest)], np.int32)} | (request.encoder or {})
        if row is None:
            logits, row = self._programs.begin(self._params, batch)
        else:
            places = max(places, max(layer["key"].shape[2] for layer in row["layers"]))
            logits, row = self._programs.resume(self._params, batch, row, places)
        if self._prefixes and request.begun == 0:
            self._prefixes.keep(tokens, row)
        seen, index = self._seen(request), np.array([request.begun], np.int32)
        slot, forced = np.int32(request.slot), np.array([request.forced.get(request.begun, -1)], np.int32)
        settings = Settings(*(x[request.slot : request.slot + 1] for x in self._settings))
        alternatives = LIKELIEST if request.likeliest else 0
        self._state, chosen = self._programs.admit(
            self._state, row, logits, slot, settings, index, forced, seen, alternatives
        )
        self._begun(chosen, [(0, request)])

    def _seen(self, request: Request) -> np.ndarray:
        """The tokens [1, V] that the request's penalty is for."""
        seen = np.zeros((1, self._vocab_size), bool)
        seen[0, request.tokens] = request.sampling.repetition_penalty != 1
        return seen

    def _decode(self, active: list[tuple[int, Request]]) -> None:
        index, forced = np.zeros(self._config.slots, np.int32), np.full(self._config.slots, -1, np.int32)
        for slot, request in active:
            index[slot], forced[slot] = request.begun, request.forced.get(request.begun, -1)
        alternatives = LIKELIEST if any(request.likeliest for _, request in active) else 0
        self._state, chosen = self._programs.step(
            self._params, self._state, self._settings, index, forced, alternatives
        )
        self._begun(chosen, active)

    def _begun(self, chosen: programs.Chosen, rows: list[tuple[int, Request]]) -> None:
        self._pending.append((chosen, rows))
        for _, request in rows:
            request.begun += 1
            if request.begun == request.limit:  # the slot is free before the last token is back
                self._free(request)

    def _receive(self, left: int) -> None:
        """Takes the tokens of all but the last `left` programs."""
        while len(self._pending) > left:
            chosen, rows = self._pending.popleft()
            tokens, log_probabilities, likeliest, theirs = jax.device_get(chosen)
            for place, request in rows:
                count = min(request.likeliest, likeliest.shape[1])
                named = zip(likeliest[place, :count].tolist(), theirs[place, :count].tolist())
                request.receive(int(tokens[place]), float(log_probabilities[place]), tuple(named))
                if request.finished:
                    self._free(request)
                    self._remember(request)

    def _free(self, request: Request) -> None:
        """Takes the request's slot away, with a copy of its row where later prompts may begin so."""
        slot, request.slot = request.slot, None
        if slot is None:
            return
        self._requests[slot] = None
        read = request.places - 1
        if self._prefixes and read <= self._length and not request.stream.cancelled:
            request.row = self._programs.row(self._state, np.int32(slot), self._bucket(read)), read
        self._settings = Settings(*map(lambda old, new: _with_row(old, slot, new), self._settings, _GREEDY))

    def _remember(self, request: Request) -> None:
        """Keeps the row of a finished request, with the tokens of it that are known."""
        if request.row is not None:
            (row, read), request.row = request.row, None
            known = min(read, len(request.tokens))
            self._prefixes.keep(request.tokens[:known], row | {"lengths": np.array([known], np.int32)})

    def _bucket(self, count: int) -> int:
        """Places for so many tokens: few sizes, so that few programs are compiled."""
        if count == 1:  # what an encoder-decoder's text begins with
            return 1
        size = _SMALLEST_BUCKET
        while size < count:
            size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
        return min(size, self._length)


def check_generates(model: Model) -> None:
    """Raises UserError for a model that has no next token."""
    if model.read is None:
        raise UserError(
            f"the model ({type(model.config).__name__}) is a masked language model: it fills in tokens of a whole text "
            "and cannot continue one; sample from a decoder or an encoder-decoder, and leave SampleText.prompts empty"
        )
    if model.config.moe is not None and model.config.moe.routing == "expert_choice":
        raise UserError(
            "Moe.routing is 'expert_choice': experts compare a token with later ones, which are not there yet while a text "
            "is written; train with 'token_choice' to generate, or leave SampleText.prompts empty"
        )


def _mesh_of(params: Params) -> jax.sharding.Mesh | None:
    """Of parameters that are spread over devices."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1 else None


def _padded(tokens: Sequence[int], size: int) -> np.ndarray:
    row = np.zeros((1, size), np.int32)
    row[0, : len(tokens)] = tokens
    return row


def _with_row(old: np.ndarray, index: int, new: np.ndarray) -> np.ndarray:
    """A copy with one row changed: the devices may still read the old one."""
    changed = old.copy()
    changed[index] = new[0]
    return changed
