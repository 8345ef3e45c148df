"""Dialogues with an environment: whose tokens are whose, where they end, and training on them."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import capibara as cb
from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.inference.calls.dialect import Dialect
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.requests.stream import Finish
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.sampling import Sampling
from capibara.sharding import Plan
from capibara.strategies.dialogues import Dialogues, Opening
from capibara.strategies.environments.environment import Environment, Episode
from capibara.strategies.generating import Prompt
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation

PROMPT = "<|turn|>u:1?<|end|><|turn|>a:"


@cb.config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Echo(Environment):
    """Says what it was told, in capitals, until it is told `last`."""

    last: str = "stop"

    def begin(self, record):
        return EchoEpisode(self.last)


class EchoEpisode(Episode):
    def __init__(self, last):
        self.last = last

    def step(self, messages):
        text = messages[-1]["content"]
        return [] if text == self.last else [{"role": "user", "content": text.upper()}]


class Completed:
    """A finished answer."""

    def __init__(self, vocabulary, text, ended=True):
        self.text, self.tokens = text, [*vocabulary.encode(text)]
        self.drawn, self.end_drawn = [-1.0] * len(self.tokens), -0.5
        self.end = vocabulary.encode_rendered("<|end|>")[0].tolist()[0] if ended else None
        self.finish = Finish.STOP if ended else Finish.LENGTH

    def result(self):
        return self


@pytest.fixture
def chat(toy_tokenizer):
    return Chat(cb.TokenizerJsonVocabulary(path=toy_tokenizer), cb.ChatTemplate(tokenizer=toy_tokenizer))


@pytest.fixture
def hold(chat):
    """(texts of the model, environment, tokens) -> the dialogue, and the prompt and sampling of each turn."""

    def run(*texts, environment=Echo(), most=60, ended=True):
        asked, answers = [], iter(texts)

        def generate(prompts, samplings):
            asked.append((prompts[0].ids, samplings(prompts[0].row)[0]))
            return {prompts[0].row: [Completed(chat.vocabulary, next(answers), ended)]}

        conversation = Conversation([{"role": "user", "content": "1?"}])
        prompt = Prompt(3, 0, chat.ids_of(PROMPT))
        sampling = Sampling(max_new_tokens=most, temperature=1.0, seed=5)
        opening = Opening(prompt, conversation, environment.begin({}), sampling)
        (dialogue,) = Dialogues(environment, chat, Dialect(), generate).held([opening])
        return dialogue, asked

    return run


def test_the_tokens_are_those_of_the_rendered_dialogue(hold, chat):
    dialogue, asked = hold("ab", "c", "stop")
    spoken = "ab<|end|>", "<|turn|>u:AB<|end|><|turn|>a:", "c<|end|>", "<|turn|>u:C<|end|><|turn|>a:", "stop<|end|>"
    assert dialogue.tokens == chat.ids_of("".join(spoken))
    owners = [is_own for i, text in enumerate(spoken) for is_own in [i % 2 == 0] * len(chat.ids_of(text))]
    assert dialogue.is_own == owners and len(dialogue.drawn) == len(owners)
    assert [x != 0 for x in dialogue.drawn] == owners
    rendered = chat.template.render(Conversation(dialogue.messages), "here").text
    assert chat.ids_of(rendered) == chat.ids_of(PROMPT) + dialogue.tokens
    assert dialogue.text == "stop" and not dialogue.truncated
    assert [ids for ids, _ in asked] == [chat.ids_of(PROMPT + "".join(spoken[:n])) for n in (0, 2, 4)]
    assert len({sampling.seed for _, sampling in asked}) == 3
    assert [sampling.max_new_tokens for _, sampling in asked] == [
        60 - len(chat.ids_of("".join(spoken[:n]))) for n in (0, 2, 4)
    ]


def test_turns_and_tokens_are_bounded(hold):
    dialogue, asked = hold("ab", "c", "d", environment=Echo(turns=2))
    assert len(asked) == 2 and dialogue.is_own[-1] and dialogue.messages[-1]["content"] == "c"
    dialogue, asked = hold("ab", "c", most=8)  # what the environment says has no room
    assert len(asked) == 1 and all(dialogue.is_own) and dialogue.truncated
    dialogue, asked = hold("ab", "c", ended=False)
    assert len(asked) == 1 and dialogue.truncated


@pytest.mark.parametrize("answer", ["text", {"role": "assistant", "content": "x"}, {"role": "user", "content": None}])
def test_an_answer_that_is_no_message_is_named(hold, answer):
    class Wrong(Echo):
        def begin(self, record):
            episode = EchoEpisode("")
            episode.step = lambda messages: [answer]
            return episode

    with pytest.raises(UserError, match="Grpo.environment: Wrong answered .* must answer messages with the role"):
        hold("ab", environment=Wrong())


class Seen(Callback):
    def __init__(self):
        self.metrics = {}

    def on_step(self, step, metrics):
        self.metrics[step] = dict(metrics)


def spoke(prompt, answer, record):
    """The number of the model's messages."""
    return float(sum(message["role"] == "assistant" for message in record["dialogue"]))


def test_only_the_models_tokens_are_trained(toy_tokenizer, tmp_path, monkeypatch):
    """In a run of three turns, whose probabilities in the engine are those in training."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(20)))
    source = cb.PromptJsonlSource(files=(str(path),), template=cb.ChatTemplate(tokenizer=toy_tokenizer))
    vocabulary = cb.TokenizerJsonVocabulary(path=toy_tokenizer)
    batches, set_up = [], loop.set_up

    def watched(trainer, **options):
        run, initial = set_up(trainer, jax.devices()[:1], **options)

        def step(state, batch):
            batches.append(jax.device_get(batch))
            return run.train_step(state, batch)

        return dataclasses.replace(run, train_step=step), initial

    monkeypatch.setattr(loop, "set_up", watched)
    trainer = cb.Trainer(
        model_dir=str(tmp_path / "run"),
        steps=2,
        model=cb.DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32"),
        plan=Plan(batch_size=16),
        dataset=cb.Dataset(source=source, vocabulary=vocabulary, length=480, packing="none"),
        optimizer=cb.Optimizer(schedule=cb.Schedule(kind="constant", learning_rate=1e-3)),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=cb.Grpo(
            rewards=(spoke,), group=8, environment=Echo(turns=3), sampling=Sampling(max_new_tokens=460, temperature=1.0),
            engine=EngineConfig(slots=16, prefix_cache_mib=0),
        ),
        log_every=1,
    )  # fmt: skip
    seen = Seen()
    loop.train(trainer, seen)
    assert seen.metrics[1]["engine_difference"] < 1e-4 and seen.metrics[1]["reward"] > 1.0
    end, changes = vocabulary.encode_rendered("<|end|>")[0][0], 0
    for batch in batches:
        for targets, weights, drawn in zip(batch["targets"], batch["weights"], batch["drawn"]):
            starts = np.flatnonzero((weights[1:] > 0) & (weights[:-1] == 0)) + 1
            changes += len(starts) > 1
            assert all(targets[start - 1] == vocabulary.encode(":")[0] for start in starts)  # <|turn|>a: is given
            assert (drawn[weights > 0] < 0).all() and (drawn[weights == 0] == 0).all()
            assert all(
                targets[stop - 1] == end for stop in np.flatnonzero((weights[1:] == 0) & (weights[:-1] > 0))[:-1] + 1
            )
    assert changes > 3
