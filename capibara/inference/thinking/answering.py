"""Answers prompts by an engine and a strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.stream import Stream
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.thinking.reward_model import RewardModel
from capibara.inference.thinking.strategy import Answer, Draft, Draw, Rate, Scores, Strategy


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt.

    Attributes:
      text: what a strategy may ask again in other words.
      inputs: a text -> the engine's input and the ids that end its answer.
      sampling: options of each text.
      adapter: name of the adapter to use; None: no adapter.
      before: messages before the text, for a reward model.
    """

    text: str
    inputs: Callable[[str], tuple[str | Sequence[int], Sequence[int]]]
    sampling: Sampling
    adapter: str | None = None
    before: Conversation = Conversation([])

    @property
    def conversation(self) -> Conversation:
        """The messages that end with the prompt."""
        return self.before._replace(messages=[*self.before.messages, {"role": "user", "content": self.text}])


@dataclasses.dataclass(frozen=True)
class Thinker:
    """A strategy with the reward model that it names; None: it names none."""

    strategy: Strategy
    reward: RewardModel | None

    def answers(self, engine: Engine, asked: Sequence[Asked]) -> list[Answer]:
        """The strategy's answers to prompts, whose texts the engine generates.

        Raises:
          UserError: the sampling does not fit the strategy, or a prompt does not fit in a slot.
        """
        for item in asked:
            self.strategy.check(item.sampling)
        rate = rate_of(self.reward, [item.conversation for item in asked])
        return self.strategy.answers([item.text for item in asked], lambda drafts: _drawn(engine, asked, drafts), rate)


def _drawn(engine: Engine, asked: Sequence[Asked], drafts: Sequence[Draft]) -> list[Draw]:
    """A text for each draft."""
    streams: list[Stream] = []
    try:
        for draft in drafts:
            item = asked[draft.number]
            inputs, ends = item.inputs(draft.text)
            options = with_sample(item.sampling, draft.sample)
            streams.append(engine.submit(inputs, options, ends=ends, adapter=item.adapter))
        results = [stream.result() for stream in streams]
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return [
        Draw(result.lead + result.text, len(result.tokens), asked[draft.number].sampling.thinking_tags)
        for result, draft in zip(results, drafts)
    ]


def with_sample(sampling: Sampling, sample: int) -> Sampling:
    """The sampling of one of several texts of a prompt."""
    return dataclasses.replace(sampling, seed=(sampling.seed + sample + 2**63) % 2**64 - 2**63)


def rate_of(reward: RewardModel | None, prompts: Sequence[Conversation]) -> Rate | None:
    """Scores of answers to these prompts by a reward model; None: there is none."""
    if reward is None:
        return None

    def rate(number: int, texts: Sequence[str]) -> list[Scores]:
        try:
            return reward.scores(prompts[number], texts)
        except UserError as error:
            raise UserError(f"answers to prompt {number + 1}: {error}") from None

    return rate
