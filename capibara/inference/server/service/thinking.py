"""Answers of chats by a thinking strategy, which draws several texts and chooses one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.inference.engine.requests.stream import Completion, Piece
from capibara.inference.server.service import threads
from capibara.inference.server.service.answers import Course, LongAnswer, RequestedText
from capibara.inference.server.service.bounds import brief, quoted
from capibara.inference.server.service.chat_answer import ChatAnswer
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.joined import JoinedCompletion
from capibara.inference.server.service.service import ServerConfig
from capibara.inference.thinking.answering import rate_of, with_sample
from capibara.inference.thinking.best_of_n import BestOfN
from capibara.inference.thinking.reward_model import RewardModel
from capibara.inference.thinking.rounds import Rounds
from capibara.inference.thinking.self_consistency import SelfConsistency
from capibara.inference.thinking.strategy import Answer, Draft, Draw, Strategy

PARAM = "thinking_strategy"
OFF = {"name": "none"}  # the value with which a request has one text

_STRATEGIES: dict[str, type[Strategy]] = {
    "self_consistency": SelfConsistency, "best_of_n": BestOfN, "rounds": Rounds,
}  # fmt: skip
# A request's own patterns, templates and paths would be the server's to run.
_OPTIONS = {"samples": int, "rounds": int, "steps": str}


def strategy_of(value: Any, config: ServerConfig) -> Strategy | None:
    """The strategy that a request names, or the server's; None: one text.

    Raises:
      Refusal: it is none, has an option that is the server's alone, or draws too many texts.
    """
    if value is None:
        return config.thinking
    name = value.get("name") if isinstance(value, dict) else None
    if name == "none" and value == OFF:
        return None
    if not isinstance(name, str) or name not in _STRATEGIES:
        names = ", ".join(map(repr, ("none", *_STRATEGIES)))
        raise _refused(f"{PARAM} is {brief(value)}, must be an object whose name is one of {names}")
    kind, options = _STRATEGIES[name], {key: option for key, option in value.items() if key != "name"}
    known = [field.name for field in dataclasses.fields(kind) if field.name in _OPTIONS]
    for key, option in options.items():
        if key not in known:
            raise _refused(f"{PARAM} has {brief(key)}, a request has {' and '.join(known)} of {name}: leave it out")
        if type(option) is not _OPTIONS[key]:
            raise _refused(f"{PARAM} has {key} {brief(option)}, must be of type {_OPTIONS[key].__name__}")
        if isinstance(option, int):
            limit, most = config.strategy_limits[key]
            if not 1 <= option <= most:
                raise _refused(f"{PARAM} has {key} {brief(option)}, must be from 1 to {most} (ServerConfig.{limit})")
    default = config.thinking if type(config.thinking) is kind else None
    if default is None and kind is BestOfN:
        raise _refused(f"{PARAM} is {name!r}, whose reward model is the server's: ServerConfig.thinking = @BestOfN()")
    try:
        strategy = dataclasses.replace(default or kind(), **options)
        config.check_strategy(strategy, f"{PARAM} has")
    except (UserError, ValueError) as error:
        raise _refused(quoted(str(error))) from None
    return strategy


def _refused(message: str) -> Refusal:
    return Refusal(400, message, param=PARAM, code="invalid_value")


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """A text that was drawn: its end, and what a strategy reads of it."""

    completion: Completion
    draw: Draw


@dataclasses.dataclass(frozen=True)
class Thinking(Course):
    """The answer that a strategy chooses.

    Attributes:
      strategy: which.
      judge: the reward model that it needs; None: none.
      conversation: of the request, for the reward model; it ends with the user's text.
      asking: the text that is requested when the user's text is another one.
    """

    strategy: Strategy
    judge: RewardModel | None
    conversation: Conversation
    asking: Callable[[str], RequestedText]

    @property
    def texts(self) -> int:
        return int(dataclasses.asdict(self.strategy).get("samples", 1))

    async def items(self, ask: RequestedText, answer: LongAnswer) -> AsyncIterator[Piece | Completion]:
        run = _Run(self, ask, answer, asyncio.get_running_loop())
        chosen = await answer.call(threads.THINKING, run.answer)
        completion = run.completion_of(chosen)
        for piece in completion.pieces:
            yield piece
        yield completion


class _Run:
    """One answer of a strategy, which waits in its own thread while the event loop draws texts."""

    def __init__(self, course: Thinking, ask: RequestedText, answer: LongAnswer, loop: asyncio.AbstractEventLoop):
        self._course, self._ask, self._answer, self._loop = course, ask, answer, loop
        self._text = course.conversation.messages[-1]["content"]
        self._drawn: list[_Drawn] = []  # the last ones
        self._read = self._cached = 0  # tokens of all prompts, each text of a prompt once

    def answer(self) -> Answer:
        """The strategy's answer; runs in a thread."""
        rate = rate_of(self._course.judge, [self._course.conversation])
        (answer,) = self._course.strategy.answers([self._text], self._draw, rate)
        return answer

    def completion_of(self, chosen: Answer) -> JoinedCompletion:
        """The end of the text that was chosen, with what all have cost."""
        completion = next(item.completion for item in self._drawn if item.draw.text == chosen.text)
        fields = {field.name: getattr(completion, field.name) for field in dataclasses.fields(Completion)}
        name = next((key for key, kind in _STRATEGIES.items() if kind is type(self._course.strategy)), None)
        report = {"name": name or type(self._course.strategy).__name__, "texts": chosen.texts, "tokens": chosen.tokens}
        return JoinedCompletion(
            **fields | {"cached_tokens": self._cached},
            more_read=self._read - len(self._ask.ids),
            more_written=chosen.tokens - len(completion.tokens),
            report={PARAM: report | dict(chosen.about)},
        )

    def _draw(self, drafts: Sequence[Draft]) -> list[Draw]:
        """A text for each draft; waits for them in the strategy's thread."""
        asked = {text: self._asked(text) for text in dict.fromkeys(draft.text for draft in drafts)}
        asks = [
            dataclasses.replace(item, sampling=with_sample(item.sampling, draft.sample))
            for draft, item in ((draft, asked[draft.text]) for draft in drafts)
        ]
        completions = _waited(self._completions(asks), self._loop)
        self._drawn = [_Drawn(end, _draw_of(ask, end)) for ask, end in zip(asks, completions)]
        first = {draft.text: end for draft, end in reversed([*zip(drafts, completions)])}
        self._read += sum(len(item.ids) for item in asked.values())
        self._cached += sum(end.cached_tokens for end in first.values())
        return [item.draw for item in self._drawn]

    def _asked(self, text: str) -> RequestedText:
        if text == self._text:
            return self._ask
        return threads.PREPARING.submit(self._course.asking, text).result()

    async def _completions(self, asks: Sequence[RequestedText]) -> list[Completion]:
        return await self._answer.draw(asks).all()


def _waited(work: Coroutine[Any, Any, list[Completion]], loop: asyncio.AbstractEventLoop) -> list[Completion]:
    return asyncio.run_coroutine_threadsafe(work, loop).result()


def _draw_of(ask: RequestedText, completion: Completion) -> Draw:
    """What a strategy reads of a text: the answer without the thoughts that are apart."""
    answer = ChatAnswer(ask, [], True)
    for piece in completion.pieces:
        answer.add(piece)
    answer.close()
    content = answer.message.whole()["content"] or ""
    return Draw(content, len(completion.tokens), ask.sampling.thinking_tags)
