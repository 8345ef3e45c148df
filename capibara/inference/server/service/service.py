"""Between HTTP server and engine: admits requests and follows their texts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.calls.dialect import Dialect, dialect_of, special_ids
from capibara.inference.calls.reasoning import ReasoningIn
from capibara.inference.calls.served_tool import ServedTool
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.reading import Pooling
from capibara.inference.engine.requests.stream import Completion, Item, Stream
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server.service.answers import Answers, LongAnswer, RequestedText, StreamedTexts, shutting_down
from capibara.inference.server.service.http_errors import SOON, Refusal
from capibara.inference.server.service.load import Load
from capibara.inference.thinking.reward_model import RewardModel
from capibara.inference.thinking.strategy import Strategy
from capibara.models.api import Adapter

_LEAST = {
    **dict.fromkeys(("queue", "max_stops", "grace_s"), 0),
    **dict.fromkeys(("max_tokens", "max_prompt_tokens", "max_prompt_chars", "max_texts", "max_messages"), 1),
    **dict.fromkeys(("max_embeddings", "max_rounds", "search_rounds"), 1),
    **dict.fromkeys(("max_body_kib", "max_bodies_mib", "max_header_kib"), 1),
    "max_connections": 8,
}
_LONGEST_NAME = 60  # characters of a model in an error
_HOST = re.compile(r"[^\s/:@\[\]]+|\[[0-9a-fA-F:.]+\]")
_ORIGIN = re.compile(r"https?://[^\s/@]+")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits of a server.

    Attributes:
      queue: most texts that wait for a slot; more are refused with 429.
      max_tokens: longest text that may be requested; None: the slot's capacity.
      max_prompt_tokens: longest prompt; None: the slot's capacity.
      max_texts: most texts of one request: prompts times n.
      max_stops: most stop strings of one request.
      max_embeddings: most texts of one request for embeddings or scores.
      pooling: which hidden states of a text are its embedding.
      max_prompt_chars: characters of the longest prompt; None: what the longest prompt's tokens can spell, up to 16 per
        token, or fewer if the tokenizer's longest token is shorter. Longer prompts are refused before tokenisation.
      max_messages: most messages of a conversation.
      max_body_kib: largest body of a request.
      max_bodies_mib: total of all bodies that are being received; more are refused with 503.
      body_timeout_s: seconds for a body to arrive, and for a client that stopped reading to continue.
      max_header_kib: largest header of a request.
      header_timeout_s: seconds for a header to arrive, after the connection or the previous answer.
      max_connections: most connections; one more closes the oldest that has not sent a complete request.
      allowed_hosts: accepted values of Host besides localhost, 127.0.0.1 and [::1], such as a proxy's name; if empty, a
        server with a key that other machines can reach accepts every name.
      allowed_origins: origins of web pages that may send requests, such as https://chat.example.com, besides the
        server's.
      timeout_s: seconds from a request to the end of its texts.
      grace_s: seconds for texts to finish after a signal to stop.
      warm_up: whether to compile programs for all prompt lengths before the first request.
      access_log: whether to log each request on standard error.
      reasoning: where a chat's thoughts are: apart in `reasoning_content`, if the chat template has tags of thoughts that
        are known, or inline in the content, as the model wrote them.
      thinking: SelfConsistency, BestOfN or Rounds, by which chats are answered that name no strategy of their own; None: one
        text.
      max_rounds: most rounds of a chat's strategy; its most samples are `max_texts`.
      search_rounds: how often the model may search before it answers, with an index.
    """

    queue: int = 64
    max_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_texts: int = 16
    max_stops: int = 4
    max_embeddings: int = 256
    pooling: Pooling = Pooling.LAST
    max_prompt_chars: int | None = None
    max_messages: int = 1024
    max_body_kib: int = 1536
    max_bodies_mib: int = 64
    body_timeout_s: float = 30.0
    max_header_kib: int = 16
    header_timeout_s: float = 10.0
    max_connections: int = 512
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    timeout_s: float = 600.0
    grace_s: float = 30.0
    warm_up: bool = True
    access_log: bool = False
    reasoning: ReasoningIn = ReasoningIn.APART
    thinking: Strategy | None = None
    max_rounds: int = 8
    search_rounds: int = 4

    def __post_init__(self) -> None:
        for name, smallest in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= smallest:
                raise UserError(f"ServerConfig.{name} is {value}, must be at least {smallest}")
        for name in ("timeout_s", "body_timeout_s", "header_timeout_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"ServerConfig.{name} is {getattr(self, name)}, must be above 0")
        if self.thinking is not None:
            self.check_strategy(self.thinking, f"ServerConfig.thinking is @{type(self.thinking).__name__}() with")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise UserError(
                    f"ServerConfig.allowed_hosts has {host!r}, must be names without a port: try 'example.com'"
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise UserError(
                    f"ServerConfig.allowed_origins has {origin!r}, must be of pages: try 'https://example.com'"
                )

    @property
    def strategy_limits(self) -> dict[str, tuple[str, int]]:
        """Options of strategies -> the field that limits each, and its value."""
        return {"samples": ("max_texts", self.max_texts), "rounds": ("max_rounds", self.max_rounds)}

    def check_strategy(self, strategy: Strategy, which: str) -> None:
        """Raises UserError if a strategy draws too many texts; `which` names it in the error."""
        options = dataclasses.asdict(strategy)
        for name, (limit, most) in self.strategy_limits.items():
            if (count := options.get(name, 1)) > most:
                raise UserError(f"{which} {name} {count}, must be at most {most} (ServerConfig.{limit}): draw fewer")


class State(enum.StrEnum):
    """LOADING: not ready yet; DRAINING: accepts no more; FAILED: the engine ended with an error."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Served:
    """A loaded model.

    Attributes:
      generator: an engine with its own thread; None: the model is a reward model.
      vocabulary: of the model.
      chat: its chat template; None: it has none.
      length: token capacity of a slot, or of a row of a reward model.
      encoder_length: most tokens that an encoder reads; None: there is no encoder.
      name: the model's name for clients.
      sampling: defaults for a request.
      created_s: when it was loaded, by time.time.
      read_adapter: the adapter of a name and a path, for clients that load it; None: they may load none.
      scorer: the reward model; None: the model generates.
      judge: the reward model that `ServerConfig.thinking` names; None: it names none.
      tool: that the server calls itself; None: there is none.
    """

    generator: Engine | None
    vocabulary: Vocabulary
    chat: Chat | None
    length: int
    encoder_length: int | None
    name: str
    sampling: Sampling
    created_s: float = dataclasses.field(default_factory=time.time)
    read_adapter: Callable[[str, str], Adapter] | None = None
    scorer: RewardModel | None = None
    judge: RewardModel | None = None
    tool: ServedTool | None = None

    @property
    def engine(self) -> Engine:
        """The engine, for requests that a reward model does not take (`bodies.check_model`)."""
        assert self.generator is not None, "requests for texts are refused before"
        return self.generator

    @property
    def rows(self) -> int:
        """Rows of the model's embedding: requests may have ids below it."""
        return self.engine.rows if self.scorer is None else self.scorer.rows

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the engine's adapters, which clients can request instead of the model."""
        return () if self.generator is None else self.generator.adapters.names

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request's `model` names; None: the model alone."""
        return None if model == self.name else model

    @functools.cached_property
    def dialect(self) -> Dialect:
        """How the model writes calls and thoughts."""
        return Dialect(ids=special_ids(self.vocabulary)) if self.chat is None else dialect_of(self.chat)

    @functools.cached_property
    def longest_piece(self) -> int:
        """Number of bytes of the longest token."""
        return int(self.vocabulary.token_bytes().max())


def no_model(name: str, served: Served) -> Refusal:
    """The error for a request of a model that is not served."""
    names = ", ".join(map(repr, (served.name, *served.adapters)))
    shown = repr(name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}...")
    message = f"model is {shown}, the {'models here are' if served.adapters else 'model here is'} {names}"
    return Refusal(404, message, param="model", code="model_not_found")


def check_streams(sampling: Sampling) -> None:
    """Raises UserError if texts cannot be streamed token by token."""
    for name, is_set in (("beams", sampling.beams is not None), ("num_decodes", sampling.num_decodes > 1)):
        if is_set:
            raise UserError(
                f"Sampling.{name} is set, and a server streams tokens before the best text is known: leave "
                "it out, or use capibara infer --prompts"
            )


class Watch(Protocol):
    """Is notified of each finished text, and of the tokens that a request reads without continuing them."""

    def text(self, completion: Completion) -> None: ...

    def read(self, tokens: int) -> None: ...


class Service:
    """Admits requests while there is room; all methods except `ready` run in one event loop.

    Args:
      watch: is notified of each finished text.

    Attributes:
      config: the limits; defaults until it is ready.
      served: the model; None: not loaded yet.
      body_bytes: total size of the bodies that are being received.
      freed_bytes: size of the bodies received since this was last set to 0.
      parsing: a lock, held while a body is parsed.
    """

    def __init__(self, watch: Watch):
        self.config = ServerConfig()
        self.served: Served | None = None
        self.body_bytes = self.freed_bytes = 0
        self.parsing = asyncio.Lock()
        self._watch = watch
        self._answers: set[Answers] = set()
        self._draining_since_s: float | None = None
        self._failed_since_s: float | None = None

    @property
    def state(self) -> State:
        if self.served is not None and self.served.generator is not None and self.served.generator.failed:
            return State.FAILED
        if self._draining_since_s is not None:
            return State.DRAINING
        return State.LOADING if self.served is None else State.READY

    @property
    def texts(self) -> int:
        """Number of queued and running texts; an answer between two of its texts keeps its place."""
        return sum(answers.texts for answers in self._answers)

    @property
    def load(self) -> Load:
        if self.served is None or (engine := self.served.generator) is None:
            return Load()
        adapters = len(engine.adapters.names)
        return Load(*engine.load, engine.slots, *engine.pages, engine.statistics.preempted, engine.compiling, adapters)

    def ready(self, served: Served, config: ServerConfig) -> None:
        """Sets the loaded model; thread-safe."""
        self.config, self.served = config, served

    def check_room(self, texts: int = 1) -> Served:
        """The model, if `texts` more texts can be accepted now; 0 has room always.

        Raises:
          Refusal: they cannot.
        """
        match self.state:
            case State.LOADING:
                raise Refusal(503, "the model is being loaded: try again", code="loading", headers=SOON)
            case State.DRAINING:
                raise shutting_down()
            case State.FAILED:
                raise Refusal(503, "the model has failed: the server must be started again", code="model_failed")
        assert self.served is not None, "it is loading otherwise"
        if (engine := self.served.generator) is None:
            return self.served
        most = engine.slots + self.config.queue
        if texts > most:
            raise Refusal(400, f"{texts} texts are requested, there is room for {most}: request fewer", param="n")
        if texts and self.texts + texts > most:
            raise Refusal(429, f"{self.texts} texts are in progress: try again", code="queue_full", headers=SOON)
        return self.served

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Counts the bytes of a body while it is received: call the yielded function with each number of new bytes.

        Raises (when that is called):
          Refusal: too many bytes are being received at once.
        """
        held = 0

        def take(count: int) -> None:
            nonlocal held
            if self.body_bytes + count > self.config.max_bodies_mib * 2**20:
                raise Refusal(503, "too much is being sent at once: try again", code="overloaded", headers=SOON)
            held += count
            self.body_bytes += count

        try:
            yield take
        finally:
            self.body_bytes -= held
            self.freed_bytes += held

    def count_read(self, tokens: int) -> None:
        """Counts tokens that a request has read without continuing them."""
        self._watch.read(tokens)

    def ask(self, asks: Sequence[RequestedText], began_s: float) -> Answers:
        """Submits the texts of one request that arrived at `began_s` by time.monotonic.

        Raises:
          Refusal: there is no room.
          UserError: a prompt does not fit in a slot.
        """
        deadline_s, course = began_s + self.config.timeout_s, asks[0].course
        self.check_room(len(asks) if course is None else course.texts)
        answers: Answers
        if course is None:
            answers = self._draw(asks, deadline_s)
        else:
            answers = LongAnswer(asks[0], course, deadline_s, self._draw, self._answers.discard)
        self._answers.add(answers)
        return answers

    def _draw(self, asks: Sequence[RequestedText], deadline_s: float) -> StreamedTexts:
        """Submits texts of a request that was admitted, until `deadline_s` by time.monotonic; errors as in `ask`."""
        assert self.served is not None, "it has admitted the request"
        engine, streams = self.served.engine, list[Stream]()
        try:
            for ask in asks:
                options: dict[str, Any] = {"ends": ask.ends, "likeliest": ask.likeliest, "adapter": ask.adapter}
                streams.append(engine.submit(ask.ids, ask.sampling, spelled=ask.spelled, salt=ask.salt, **options))
        except BaseException:
            for stream in streams:
                stream.cancel()
            if asks[0].adapter is not None and asks[0].adapter not in self.served.adapters:  # it was just unloaded
                raise no_model(asks[0].adapter, self.served) from None
            raise
        return StreamedTexts(streams, deadline_s, self._ended)

    def drain(self) -> None:
        """Admits no more requests."""
        self._draining_since_s = self._draining_since_s or time.monotonic()

    def drained(self) -> bool:
        """Whether `drain` was called and no text is left; cancels the rest when the grace period is over."""
        if self._draining_since_s is None:
            return False
        if time.monotonic() - self._draining_since_s < self.config.grace_s:
            return not self._answers
        for answers in [*self._answers]:
            answers.cancel()
        return True

    def failed_for(self, seconds: float) -> bool:
        """Whether this was first called at least `seconds` ago with a failed engine."""
        if self.state is not State.FAILED:
            return False
        self._failed_since_s = self._failed_since_s or time.monotonic()
        return time.monotonic() - self._failed_since_s >= seconds

    def _ended(self, answers: StreamedTexts, item: Item) -> None:
        if not answers.texts:
            self._answers.discard(answers)
        if isinstance(item, Completion):
            self._watch.text(item)
