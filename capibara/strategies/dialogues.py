"""Dialogues of a model with an environment: the tokens of both, and which are the model's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from capibara.core.fields import returned
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation, Message
from capibara.data.dataset import Dataset
from capibara.inference.calls.dialect import Dialect, dialect_of
from capibara.inference.calls.message import Message as Reply
from capibara.inference.engine.requests.stream import Completion, Finish, Stream
from capibara.inference.interactive import chat as chats
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.sampling.seeds import draw_seed
from capibara.multihost import hosts
from capibara.strategies.environments.environment import Environment, Episode
from capibara.strategies.generating import Prompt, tokens_of
from capibara.strategies.rewards.reward_sum import each

_MARK = "\ue000answer\ue000"  # stands for the model's message where a template is asked what follows one

# (prompts, index of a prompt -> sampling options) -> finished answers by index.
Generate = Callable[[Sequence[Prompt], Callable[[int], list[Sampling]]], dict[int, list[Stream]]]


class Opening(NamedTuple):
    """How a dialogue begins.

    Attributes:
      prompt: its prompt.
      conversation: the prompt's messages and tools.
      episode: the environment; None: it answers in another process.
      sampling: of the model's first message; its max_new_tokens are those of all messages of both.
    """

    prompt: Prompt
    conversation: Conversation
    episode: Episode | None
    sampling: Sampling


@dataclasses.dataclass
class Dialogue:
    """A dialogue so far.

    Attributes:
      opening: how it began.
      messages: all of them.
      tokens, drawn: of both sides after the prompt; 0 where the environment spoke.
      is_own: whether a token is the model's.
      text: the model's last message.
      truncated: whether it was cut off.
    """

    opening: Opening
    messages: list[Message]
    tokens: list[int] = dataclasses.field(default_factory=list)
    drawn: list[float] = dataclasses.field(default_factory=list)
    is_own: list[bool] = dataclasses.field(default_factory=list)
    text: str = ""
    truncated: bool = False

    @property
    def room(self) -> int:
        """How many tokens are left to both."""
        return self.opening.sampling.max_new_tokens - len(self.tokens)

    def say(self, tokens: Sequence[int], drawn: Sequence[float] | None) -> None:
        """Adds tokens of the model, or of the environment (`drawn` is None)."""
        self.tokens += tokens
        self.drawn += [0.0] * len(tokens) if drawn is None else drawn
        self.is_own += [drawn is not None] * len(tokens)


class Dialogues:
    """Holds dialogues, turn by turn, each turn of all of them together.

    All processes take as many turns. An error on one of them is raised on all.

    Args:
      environment: the environment.
      chat: the run's tokenizer and template.
      dialect: how the model writes calls.
      generate: answers prompts; all processes call it.
      is_together: whether all processes hold the same dialogues, and have the answers of each other's episodes.
    """

    def __init__(
        self, environment: Environment, chat: Chat, dialect: Dialect, generate: Generate, is_together: bool = False
    ):
        self._environment, self._chat, self._dialect, self._generate = environment, chat, dialect, generate
        self._is_together = is_together

    def held(self, openings: Sequence[Opening]) -> list[Dialogue]:
        """The dialogues of this process after their last turns; all processes call it.

        Raises:
          Interrupted: the run must stop.
          UserError: the environment's messages are none, or the template does not continue a dialogue.
        """
        dialogues = [Dialogue(opening, [*opening.conversation.messages]) for opening in openings]
        going = dict(enumerate(dialogues))
        for turn in range(self._environment.turns):
            prompts = [
                Prompt(i, item.opening.prompt.number, [*item.opening.prompt.ids, *item.tokens])
                for i, item in going.items()
            ]
            streams = self._generate(prompts, functools.partial(_samplings, going, turn))
            spoken = {i: streams[i][0].result() for i in going}
            answers = self._answered(going, spoken, turn + 1 == self._environment.turns)
            left = hosts.each(functools.partial(self._continued, going, spoken, answers))
            if not any(left):
                break
            going = {i: going[i] for i in left[jax.process_index()]}
        return dialogues

    def _answered(
        self, going: Mapping[int, Dialogue], spoken: Mapping[int, Completion], is_last: bool
    ) -> dict[int, list[Message]]:
        """Adds what the model said; returns what the environment answers to whole messages, none in the last turn."""
        answers: dict[int, list[Message]] = {}

        def answer() -> list[tuple[int, list[Message]]]:
            whole = [i for i, item in going.items() if self._add_message(item, spoken[i])]
            asked = [] if is_last else [i for i in whole if going[i].opening.episode is not None]
            calls = [functools.partial(self._answers, going[i]) for i in asked]
            answers.update(zip(asked, each(calls, self._environment.concurrent)))
            return [*answers.items()] if self._is_together else []

        for of_process in hosts.each(answer):
            answers.update(of_process)
        return answers

    def _continued(
        self,
        going: Mapping[int, Dialogue],
        spoken: Mapping[int, Completion],
        answers: Mapping[int, Sequence[Message]],
    ) -> list[int]:
        """The dialogues in which the model speaks again, in the order of `going`, which is that of all processes."""
        return [i for i, item in going.items() if i in answers and self._goes_on(item, answers[i], spoken[i].end)]

    def _add_message(self, dialogue: Dialogue, completion: Completion) -> bool:
        """Adds what the model said; returns whether it said it to its end."""
        dialogue.say(*tokens_of(completion))
        dialogue.truncated = completion.finish is Finish.LENGTH
        message = self._message(dialogue.opening.conversation, completion.text)
        dialogue.text = str(message.get("content") or "")
        dialogue.messages.append(message)
        return completion.end is not None

    def _goes_on(self, dialogue: Dialogue, answers: Sequence[Message], end: int | None) -> bool:
        """Adds what the environment answers; returns whether the model speaks again."""
        assert end is not None, "the environment is asked after whole messages"
        if not answers:
            return False
        tokens = self._following(dialogue.opening.conversation, answers, end)
        if len(tokens) >= dialogue.room:
            dialogue.truncated = True
            return False
        dialogue.messages += answers
        dialogue.say(tokens, None)
        return True

    def _answers(self, dialogue: Dialogue) -> list[Message]:
        """What the environment says to the dialogue; it has a copy, which it may change."""
        name, episode = type(self._environment).__name__, dialogue.opening.episode
        assert episode is not None, "a process asks its own episodes"
        answers = episode.step(copy.deepcopy(tuple(dialogue.messages)))
        result = [*returned(answers, (list, tuple), f"{name}'s Episode.step")]
        _check(result, self._environment)
        return result

    def _message(self, conversation: Conversation, text: str) -> Message:
        """The model's message, with its calls apart."""
        tools = conversation.tools or ()
        if not tools or self._dialect.form is None:
            return {"role": "assistant", "content": text}
        prompt = self._chat.text_after(conversation, "a dialogue")
        dialect = self._dialect.after(prompt)
        reader, reply = dialect.reader(tools, dialect.thinks_after(prompt)), Reply()
        reply.add([*reader.add(text), *reader.close()])
        for number, call in enumerate(reply.calls):
            if call["id"] not in text:  # random: a template may write it, and a resumed run reads the same tokens
                call["id"] = f"call{number:05}"
        return {key: value for key, value in reply.whole().items() if key in ("role", "content", "tool_calls")}

    def _following(self, conversation: Conversation, answers: Sequence[Message], end: int) -> list[int]:
        """The tokens between the end of the model's message and its next one: what the template makes of the answers."""
        spoken = [*conversation.messages, {"role": "assistant", "content": _MARK}, *answers]
        text = self._chat.text_after(conversation._replace(messages=spoken), "a dialogue")
        if text.count(_MARK) != 1:
            raise UserError(
                "the chat template does not repeat an earlier message of the assistant, which dialogues with an environment "
                "need: use another ChatTemplate.template"
            )
        ids = self._chat.ids_of(text.partition(_MARK)[2])
        return ids[1:] if ids[:1] == [end] else ids


def _samplings(dialogues: Mapping[int, Dialogue], turn: int, index: int) -> list[Sampling]:
    """The options of the next message of a dialogue."""
    first = dialogues[index].opening.sampling
    seed = first.seed if turn == 0 else draw_seed(first.seed or 0, turn)
    return [dataclasses.replace(first, max_new_tokens=dialogues[index].room, seed=seed)]


def episode_of(environment: Environment, record: Mapping[str, object]) -> Episode:
    """A new dialogue about a record; raises UserError if the environment returns something else."""
    return returned(environment.begin(record), Episode, f"{type(environment).__name__}.begin")


def check(environment: Environment, dataset: Dataset, field: str) -> None:
    """Raises UserError unless a run on this data can hold dialogues with an environment; `field` names it for the error."""
    if environment.answers_calls and dialect_of(chats.of_run(dataset, field)).form is None:
        raise UserError(
            f"{field} is @{type(environment).__name__}(), which answers calls, and the chat template writes none in a known "
            "form: take a model whose template has tools"
        )


def _check(answers: Sequence[Message], environment: Environment) -> None:
    """Raises UserError unless an environment's messages are ones that a template renders and processes can exchange."""
    name = type(environment).__name__
    for answer in answers:
        is_message = isinstance(answer, dict) and isinstance(answer.get("content"), str)
        if not is_message or answer.get("role") not in ("tool", "user"):
            raise UserError(
                f"the environment @{name}() answered {answer!r}, must answer messages with the role 'tool' or 'user' and a "
                "text as content"
            )
        try:
            json.dumps(answer)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the environment @{name}() answered {answer!r}, must answer JSON values: {error}"
            ) from None
