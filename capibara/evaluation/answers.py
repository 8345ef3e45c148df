"""A model's answers to the items of a task: generated texts, or the probabilities of choices."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.evaluation.metrics import Choice, PairScores
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.remix.remixing import Pathway, RemixExperts, RemixMethod, unmixed
from capibara.evaluation.scoring import Pair, Score
from capibara.evaluation.subject import Subject
from capibara.evaluation.tasks import EvalTask, Item, PromptFormat, read_items
from capibara.inference.engine.requests.stream import Completion, Stream, of_search
from capibara.inference.memory_agent import reading
from capibara.inference.memory_agent.prompts import Prompts
from capibara.inference.memory_agent.reading import Reading
from capibara.inference.sampling import sentinels
from capibara.inference.sampling.sampling import Sampling, changed
from capibara.inference.thinking.answering import rate_of
from capibara.inference.thinking.reward_model import RenderedAnswer, RewardModel
from capibara.inference.thinking.strategy import Answer, Draft, Draw, Strategy

_AHEAD = 4  # queued requests per slot
_PAIRS = 16  # of a batch of a reward model
Show = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is answered with one text; `about`: its entry in the file of predictions."""

    about: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Question(Asked):
    """A prompt for which the engine generates one text.

    Attributes:
      prompt: token ids; for an encoder-decoder, text.
      sampling: sampling options.
      ends: ids of end tokens.
    """

    prompt: Sequence[int] | str
    sampling: Sampling
    ends: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class ReadQuestion(Asked):
    """A question about a document that is read with a memory."""

    reading: Reading


Q = TypeVar("Q", bound=Asked)


def generated(
    subject: Subject, name: str, task: EvalTask, items: Sequence[Item], recorded: Predictions, show: Show
) -> list:
    """Generates the predictions of a task for its metrics: a text for each item, or a list of samples."""
    draws = [(i, item, n) for i, item in enumerate(items) for n in range(task.num_samples)]
    if task.memory is None:
        questions = [_question(subject, name, task, i, item, n) for i, item, n in draws]
        lines = ask(subject, name, questions, generate_each, recorded, show)
    else:
        prompts = Prompts(
            task.memory, subject.trainer.dataset, subject.chat if task.format is PromptFormat.CHAT else None
        )
        opened = [_read_question(name, task, prompts, i, item, n) for i, item, n in draws]
        lines = ask(subject, name, opened, _read, recorded, show)
    texts = [line["prediction"] for line in lines]
    if task.num_samples == 1:
        return texts
    return [texts[i : i + task.num_samples] for i in range(0, len(texts), task.num_samples)]


def chosen(
    subject: Subject,
    name: str,
    task: EvalTask,
    items: Sequence[Item],
    strategy: Strategy,
    reward: RewardModel | None,
    recorded: Predictions,
    show: Show,
) -> list[Answer]:
    """The answers that a thinking strategy chooses; the file of predictions has all texts, and behind them the chosen ones."""

    def ask_drafts(drafts: Sequence[Draft]) -> list[Draw]:
        questions = [
            _question(
                subject,
                name,
                task,
                draft.number,
                dataclasses.replace(items[draft.number], prompt=draft.text),
                draft.sample,
            )
            for draft in drafts
        ]
        return [
            Draw(line["prediction"], len(line["tokens"]), task.sampling.thinking_tags)
            for line in ask(subject, name, questions, generate_each, recorded, show)
        ]

    prompts = [Conversation([{"role": "user", "content": item.prompt}]) for item in items]
    answers = strategy.answers([item.prompt for item in items], ask_drafts, rate_of(reward, prompts))
    for i, answer in enumerate(answers):
        request = {"task": name, "example": i, "thinking": strategy.described()}
        if recorded.known(request) is None:
            recorded.add(
                request, {"prediction": answer.text, "texts": answer.texts, "tokens": answer.tokens, **answer.about}
            )
    return answers


def ask(
    subject: Subject,
    name: str,
    questions: Sequence[Q],
    generate: Callable[[Subject, Sequence[Q]], Iterator[dict[str, Any]]],
    recorded: Predictions,
    show: Show,
) -> Iterator[dict[str, Any]]:
    """Generates answers to all questions by `generate`; returns their lines, {"prediction", "finish", "tokens", ...}, in order."""
    known = recorded.beginning(question.about for question in questions)
    yield from known
    left = questions[len(known) :]
    answers = subject.in_turns(left, functools.partial(generate, subject), subject.slots)
    for done, (question, answer) in enumerate(zip(left, answers, strict=True), len(known) + 1):
        line = recorded.add(question.about, answer)
        show(name, f"{done} of {len(questions)} answers")
        yield line


def generate_each(subject: Subject, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """Yields the answer to each question in order, while later ones are generated."""
    waiting: deque[Stream] = deque()
    left = iter(questions)
    for _ in questions:
        for more in itertools.islice(left, max(_AHEAD * subject.slots - len(waiting), 0)):
            waiting.append(subject.engine.submit(more.prompt, more.sampling, ends=more.ends))
        yield _line(waiting.popleft().result())


def _read(subject: Subject, questions: Sequence[ReadQuestion]) -> Iterator[dict[str, Any]]:
    return map(_line, reading.read(subject.engine, [question.reading for question in questions]))


def _line(result: Completion) -> dict[str, Any]:
    return {"prediction": result.text, "finish": str(result.finish), "tokens": result.tokens} | of_search(result)


def _read_question(name: str, task: EvalTask, prompts: Prompts, number: int, item: Item, sample: int) -> ReadQuestion:
    sampling = _sampling(task, sample)
    assert task.memory is not None and item.document is not None, "a task with a memory has documents"
    about = _about(name, task, number, item, sample, sampling)
    about |= {"memory": dataclasses.asdict(task.memory)}
    about |= {"document": hashlib.blake2b(item.document.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()}
    return ReadQuestion(
        about, Reading(prompts, item.document, item.prompt, sampling, where=f"{name}, example {number}")
    )


def _sampling(task: EvalTask, sample: int) -> Sampling:
    return dataclasses.replace(task.sampling, seed=task.sampling.seed + sample)


def _about(name: str, task: EvalTask, number: int, item: Item, sample: int, sampling: Sampling) -> dict[str, Any]:
    """The entry of a question in the file of predictions."""
    target = item.target if isinstance(item.target, (str, list)) else None
    about = {"task": name, "example": number, "sample": sample, "prompt": item.prompt, "target": target}
    return about | {"format": str(task.format), "sampling": changed(sampling)}


def _question(subject: Subject, name: str, task: EvalTask, number: int, item: Item, sample: int) -> Question:
    sampling = _sampling(task, sample)
    about = _about(name, task, number, item, sample, sampling)
    prompt, ends = prompt_of(subject, task.format, item.prompt)
    if not isinstance(prompt, str) and len(prompt) > subject.trainer.dataset.length:
        raise UserError(
            f"{name}, example {number}: its prompt has {len(prompt)} tokens, must fit Dataset.length "
            f"({subject.trainer.dataset.length}): raise that, or remove the example"
        )
    return Question(about, prompt, sampling, ends)


def prompt_of(subject: Subject, form: PromptFormat, text: str) -> tuple[Sequence[int] | str, Sequence[int]]:
    """The engine's input for a prompt, and the ids that end the answer."""
    if form is PromptFormat.CHAT:
        return subject.chat.ids(text), subject.chat.ends
    if subject.trainer.dataset.encoder_length is not None:
        return text, ()
    return subject.vocabulary.prompt_ids(text), ()


def scored(subject: Subject, name: str, items: Sequence[Item], recorded: Predictions, show: Show) -> list[PairScores]:
    """A reward model's scores of the answers of each item's pair."""
    rater, length = subject.reward_model, subject.trainer.dataset.length
    abouts: list[dict[str, Any]] = []
    answers: list[list[RenderedAnswer]] = []
    for i, item in enumerate(items):
        assert item.pair is not None, "a task of pairs has them"
        where = f"{name}, example {i}"
        answers.append([rater.rendered(side, f"{where}: {key}") for key, side in item.pair._asdict().items()])
        if (longest := max(len(answer.ids) for answer in answers[-1])) > length:
            raise UserError(
                f"{where}: prompt and answer have {longest} tokens, must fit Dataset.length ({length}): raise that, or remove "
                "the example"
            )
        sides = {key: side.messages for key, side in item.pair._asdict().items()}
        abouts.append({"task": name, "example": i, **sides})
    lines = recorded.beginning(abouts)
    for start in range(len(lines), len(items), _PAIRS):
        at = range(start, min(start + _PAIRS, len(items)))
        scores = iter(rater.scores_of([answer for i in at for answer in answers[i]]))
        lines += [recorded.add(abouts[i], {"scores": [next(scores), next(scores)]}) for i in at]
        show(name, f"{len(lines)} of {len(items)} pairs")
    return [PairScores(*recorded.numbers(line, "scores", 2)) for line in lines]


def ranked(
    subject: Subject, name: str, task: EvalTask, items: Sequence[Item], recorded: Predictions, show: Show
) -> list[list[Choice]]:
    """Scores the choices of each item."""
    abouts = [
        {"task": name, "example": i, "prompt": item.prompt, "choices": list(item.choices), "target": item.target}
        | {"format": str(task.format), "before_choice": task.before_choice}
        | ({} if task.remix is None else {"remix": dataclasses.asdict(task.remix)})
        for i, item in enumerate(items)
    ]
    lines = recorded.beginning(abouts)
    left = range(len(lines), len(items))
    pairs_of = {i: list(_pairs(subject, task, items[i])) for i in left}
    pairs = [pair for i in left for pair in pairs_of[i]]
    owners = [(i, choice) for i in left for choice in items[i].choices]
    for (i, choice), pair in zip(owners, pairs):
        if not 0 < len(pair.continuation) <= subject.trainer.dataset.length:
            raise UserError(
                f"{name}, example {i}: the choice {choice[:40]!r} has {len(pair.continuation)} tokens, must have from 1 to "
                f"Dataset.length ({subject.trainer.dataset.length}): raise that, or remove the example"
            )
    done = lambda count: show(name, f"{count} of {len(pairs)} choices")  # noqa: E731
    if task.remix is None:
        scores = iter(subject.scorer(pairs, done))
    else:
        scores = _remixed(subject, name, task, task.remix, list(pairs_of.values()), done)
    lengths = iter([len(pair.continuation) for pair in pairs])
    for i in left:
        result = [[next(scores).log_probability, next(lengths), len(entry.encode())] for entry in items[i].choices]
        lines.append(recorded.add(abouts[i], {"log_probability_tokens_bytes": result}))
    return [[Choice(*entry) for entry in line["log_probability_tokens_bytes"]] for line in lines]


def _remixed(
    subject: Subject,
    name: str,
    task: EvalTask,
    remix: RemixExperts,
    pairs: Sequence[Sequence[Pair]],
    done: Callable[[int], None],
) -> Iterator[Score]:
    """The scores of all pairs, those of each item's choices, with re-mixed experts.

    Raises:
      UserError: the model cannot be re-mixed, or answers no reference rightly.
    """
    config, sizes = subject.model.config, subject.mesh.shape
    remix.check(config, context=sizes["context"], stage=sizes["stage"])
    if (count := jax.process_count()) > 1:
        raise UserError(f"{name}/EvalTask.remix is for one process, and there are {count}: start one alone")
    of_references = dataclasses.replace(task, files=remix.references, remix=None)
    references = read_items(f"{name}/RemixExperts.references", of_references)
    plain = unmixed(config)
    asked = [[pair._replace(routing=plain) for pair in _pairs(subject, task, item)] for item in references]
    scores = iter(subject.scorer([pair for of_item in asked for pair in of_item], done))
    pathways: list[Pathway] = []
    right: list[Pair] = []
    for item, of_item in zip(references, asked, strict=True):
        of_choices = [next(scores) for _ in item.choices]
        best = max(range(len(of_choices)), key=[score.log_probability for score in of_choices].__getitem__)
        if best == item.target:
            pathways.append(_pathway(of_choices[0]))
            right.append(of_item[best])
    if not pathways:
        raise UserError(
            f"the model answers none of the {len(references)} lines of RemixExperts.references rightly: name others, or leave "
            "EvalTask.remix out"
        )
    prompts = [
        _pathway(score) for score in subject.scorer([of_item[0]._replace(routing=plain) for of_item in pairs], done)
    ]
    if remix.method is RemixMethod.NEIGHBORHOOD_GRADIENT and prompts:
        nearest = [remix.nearest(pathways, prompt) for prompt in prompts]
        descended = subject.scorer.descended(
            remix,
            [[right[i] for i in near.numbers] for near in nearest],
            np.stack([near.weights for near in nearest]).astype(np.float32),
            np.stack([prompt.scores for prompt in prompts]).astype(np.float32),
            done,
        )
        routings = [remix.mixed(of_prompt, config) for of_prompt in descended]
    else:
        routings = [remix.routing(pathways, prompt, config) for prompt in prompts]
    return iter(subject.scorer(
        [pair._replace(routing=routing) for of_item, routing in zip(pairs, routings, strict=True) for pair in of_item], done
    ))  # fmt: skip


def _pathway(score: Score) -> Pathway:
    assert score.pathway is not None, "its pair has a routing"
    return score.pathway


def _pairs(subject: Subject, task: EvalTask, item: Item) -> Iterator[Pair]:
    vocabulary = subject.vocabulary
    prompt, _ = prompt_of(subject, task.format, item.prompt)
    for choice in item.choices:
        if isinstance(prompt, str):  # an encoder's
            yield Pair(sentinels.ids_of(prompt, vocabulary), vocabulary.encode(choice) or [vocabulary.eos_id])
        elif task.format is PromptFormat.CHAT:
            yield Pair(prompt, vocabulary.encode(choice))
        else:
            # Tokenize both together, as in training: separately, words at the boundary may be split differently.
            begin = prompt[: len(prompt) - len(vocabulary.encode(item.prompt))]
            whole = [*begin, *vocabulary.encode(item.prompt + task.before_choice + choice)]
            yield Pair(whole[: len(prompt)], whole[len(prompt) :])
