"""Dialogues with an environment: whose tokens are whose, where they end, and training on them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers

import capibara as cb
from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.inference.calls.dialect import Dialect, dialect_of
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.requests.stream import Finish
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.sampling import Sampling
from capibara.multihost import hosts, peers
from capibara.sharding import Plan
from capibara.strategies import dialogues
from capibara.strategies.dialogues import Dialogues, Opening, episode_of
from capibara.strategies.environments.environment import Environment, Episode
from capibara.strategies.environments.functions import FunctionTools
from capibara.strategies.generating import Generator, Prompt
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

    def run(*texts, environment=Echo(), most=60, ended=True, dialect=Dialect(), tools=None):
        asked, answers = [], iter(texts)

        def generate(prompts, samplings):
            asked.append((prompts[0].ids, samplings(prompts[0].row)[0]))
            return {prompts[0].row: [Completed(chat.vocabulary, next(answers), ended)]}

        conversation = Conversation([{"role": "user", "content": "1?"}], tools)
        prompt = Prompt(3, 0, chat.ids_of(PROMPT))
        sampling = Sampling(max_new_tokens=most, temperature=1.0, seed=5)
        opening = Opening(prompt, conversation, environment.begin({}), sampling)
        (dialogue,) = Dialogues(environment, chat, dialect, generate).held([opening])
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


def test_turns_and_tokens_are_bounded(hold, chat):
    dialogue, asked = hold("ab", "c", "d", environment=Echo(turns=2))
    assert len(asked) == 2 and dialogue.is_own[-1] and dialogue.messages[-1]["content"] == "c"
    dialogue, asked = hold("ab", "c", most=8)  # what the environment says has no room
    assert len(asked) == 1 and all(dialogue.is_own) and dialogue.truncated
    room = len(chat.ids_of("ab<|end|><|turn|>u:AB<|end|><|turn|>a:"))  # without a token for the model's next message
    assert [len(hold("ab", "stop", most=room + more)[1]) for more in (0, 1)] == [1, 2]
    dialogue, asked = hold("ab", "c", ended=False)
    assert len(asked) == 1 and dialogue.truncated


@pytest.mark.parametrize(
    "answer",
    [
        *("text", {"role": "assistant", "content": "x"}, {"role": "user", "content": None}),
        {"role": "user", "content": "x", "more": {1}},
    ],
)
def test_an_answer_that_is_no_message_is_named(hold, answer):
    class Wrong(Echo):
        def begin(self, record):
            episode = EchoEpisode("")
            episode.step = lambda messages: [answer]
            return episode

    with pytest.raises(
        UserError, match=r"environment @Wrong\(\) answered .* must answer (messages with the role|JSON)"
    ):
        hold("ab", environment=Wrong())


@pytest.mark.parametrize("answers", [None, 3, "text", {"role": "user", "content": "x"}])
def test_answers_that_are_no_list_are_named(hold, answers):
    class Wrong(Echo):
        def begin(self, record):
            episode = EchoEpisode("")
            episode.step = lambda messages: answers
            return episode

    with pytest.raises(UserError, match="Wrong's Episode.step returned .* must return a list or a tuple"):
        hold("ab", environment=Wrong())


def test_an_environment_that_begins_nothing_is_named():
    class Wrong(Echo):
        def begin(self, record):
            return None

    with pytest.raises(UserError, match="Wrong.begin returned None, must return an Episode"):
        episode_of(Wrong(), {})


def test_an_environment_cannot_change_the_dialogue(hold):
    class Changing(Echo):
        def begin(self, record):
            episode = EchoEpisode("stop")
            episode.step = lambda messages: (
                messages[-1].update(content="changed") or messages[0].update(content="") or ()
            )
            return episode

    dialogue, _ = hold("ab", environment=Changing())
    assert [message["content"] for message in dialogue.messages] == ["1?", "ab"]
    assert dialogue.opening.conversation.messages[0]["content"] == "1?"


@pytest.fixture
def as_processes(processes, monkeypatch):
    """(functions) -> what each gives, or raises, as one of two processes."""
    monkeypatch.setattr(peers, "_report_expected", threading.Event())
    return lambda *functions: processes(2, lambda: functions[jax.process_index()]())


@pytest.fixture
def holding(chat):
    """(texts of the model by dialogue, episodes) -> a function that holds the dialogues, and the rows of each turn."""

    def make(texts, episodes, is_together=False):
        asked = []

        def generate(prompts, samplings):
            hosts.gathered(None)  # the engines of all processes finish together
            turn = len(asked)
            asked.append([prompt.row for prompt in prompts])
            return {prompt.row: [Completed(chat.vocabulary, texts[prompt.row][turn])] for prompt in prompts}

        def hold():
            conversation, prompt = (
                Conversation([{"role": "user", "content": "1?"}], None),
                Prompt(3, 0, chat.ids_of(PROMPT)),
            )
            sampling = Sampling(max_new_tokens=90, temperature=1.0, seed=5)
            openings = [Opening(prompt, conversation, episode, sampling) for episode in episodes]
            dialogues = Dialogues(Echo(), chat, Dialect(), generate, is_together).held(openings)
            return [item.messages[1:] for item in dialogues]

        return hold, asked

    return make


def test_processes_take_as_many_turns(holding, as_processes):
    """Where the dialogues of one are over before those of the other."""
    (short, of_short), (long, of_long) = (
        holding([["stop"]], [EchoEpisode("stop")]),
        holding([["ab", "c", "stop"]], [EchoEpisode("stop")]),
    )
    one, other = as_processes(short, long)
    assert of_short == [[0], [], []] and of_long == [[0], [0], [0]]
    assert [message["content"] for message in one[0]] == ["stop"]
    assert [message["content"] for message in other[0]] == ["ab", "AB", "c", "C", "stop"]


def test_processes_that_generate_together_ask_each_episode_once(holding, as_processes):
    texts, steps = [["ab", "stop"], ["c", "de", "stop"]], []

    def process(index):
        episodes = [EchoEpisode("stop") if owner == index else None for owner in (1, 0)]
        for owner, episode in zip((1, 0), episodes):
            if episode is not None:
                step = episode.step
                episode.step = lambda messages, owner=owner, step=step: steps.append(owner) or step(messages)
        return holding(texts, episodes, is_together=True)

    (first, of_first), (second, of_second) = process(0), process(1)
    one, other = as_processes(first, second)
    assert of_first == of_second == [[0, 1], [0, 1], [1]] and sorted(steps) == [0, 0, 0, 1, 1]
    assert one == other and [message["content"] for message in one[1]] == ["c", "C", "de", "DE", "stop"]


@pytest.mark.parametrize("wrong", ["text", {"role": "user", "content": "x", "more": {1}}])
def test_an_error_of_an_environment_ends_all_processes(holding, as_processes, wrong):
    """It is that of the process that has it."""
    good, bad = EchoEpisode(""), EchoEpisode("")
    bad.step = lambda messages: [wrong]
    texts = [["ab", "c", "d", "e"]]
    errors = as_processes(holding(texts, [good])[0], holding(texts, [bad])[0])
    assert [*map(type, errors)] == [UserError, UserError] and str(errors[0]) == str(errors[1])
    assert "@Echo() answered" in str(errors[0])


def test_a_fault_of_an_environment_ends_all_processes(holding, as_processes):
    bad = EchoEpisode("")
    bad.step = lambda messages: 1 / 0
    texts = [["ab", "c", "d", "e"]]
    waiting, failed = as_processes(holding(texts, [EchoEpisode("")])[0], holding(texts, [bad])[0])
    assert isinstance(failed, ZeroDivisionError) and "process 1 ended with ZeroDivisionError" in str(waiting)


def multiply(a, b):
    return a * b


@pytest.fixture(scope="module")
def calling(toy_tokenizer, tmp_path_factory):
    """The chat of a model whose calls stand between special tokens."""
    folder = tmp_path_factory.mktemp("calling")
    tokenizer = tokenizers.Tokenizer.from_file(f"{toy_tokenizer}/tokenizer.json")
    tokenizer.add_special_tokens(["<|tool_call|>", "<|/tool_call|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(f"{toy_tokenizer}/tokenizer_config.json", folder)
    template = (pathlib.Path(toy_tokenizer) / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template + "{% if tools and false %}<|tool_call|>{% endif %}")
    return Chat(cb.TokenizerJsonVocabulary(path=str(folder)), cb.ChatTemplate(tokenizer=str(folder)))


TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}]
CALL = '<|tool_call|>[{"name": "multiply", "arguments": {"a": 6, "b": 7}}]<|/tool_call|>'


def test_functions_are_called(hold, calling):
    """Equally in each run: the ids of calls are not random."""
    options = dict(environment=FunctionTools(functions=(multiply,)), dialect=dialect_of(calling), tools=TOOLS, most=300)
    dialogue, _ = hold(CALL, "42", **options)
    assert [message["role"] for message in dialogue.messages] == ["user", "assistant", "tool", "assistant"]
    assert (dialogue.messages[2]["content"], dialogue.text) == ("42", "42")
    assert hold(CALL, "42", **options)[0].messages == dialogue.messages


def test_special_tokens_of_calls_are_part_of_the_text(calling):
    """In dialogues alone: elsewhere an answer's text has none."""
    submitted = []

    class Idle:
        load = (0,)

        def step(self):
            return False

        def submit(self, ids, sampling, **options):
            submitted.append(options)

    source = cb.PromptJsonlSource(files=("nowhere.jsonl",), template=calling.template)
    dataset = cb.Dataset(source=source, vocabulary=calling.vocabulary, length=8, packing="none")
    reporter = SimpleNamespace(check=lambda turn: None, progress=lambda text: None)
    generator = Generator(SimpleNamespace(dataset=dataset, model=None, reporter=reporter), cb.Grpo(rewards=(spoke,)))
    generator._engine, generator._chips = Idle(), None
    for options in ({"dialect": dialect_of(calling)}, {}):
        generator.streams([Prompt(0, 0, [1])], lambda row: [Sampling(max_new_tokens=2)], "answers", **options)
    spelled = [calling.ids_of(name)[0] for name in ("<|tool_call|>", "<|/tool_call|>")]
    assert [sorted(options["spelled"]) for options in submitted] == [sorted(spelled), []]
    assert [set(options["ends"]) for options in submitted] == [set(calling.ends) - set(spelled), set(calling.ends)]


def test_functions_need_a_template_with_calls(calling, toy_tokenizer):
    tools = FunctionTools(functions=(multiply,))
    for folder, is_right in ((calling.vocabulary.path, True), (toy_tokenizer, False)):
        source = cb.PromptJsonlSource(files=("nowhere.jsonl",), template=cb.ChatTemplate(tokenizer=folder))
        dataset = cb.Dataset(
            source=source, vocabulary=cb.TokenizerJsonVocabulary(path=folder), length=8, packing="none"
        )
        for loss, name in ((cb.Grpo, "Grpo"), (cb.Ppo, "Ppo")):
            error = "nowhere.jsonl" if is_right else rf"^{name}.environment is @FunctionTools\(\), .* writes none"
            with pytest.raises(UserError, match=error):  # the file is opened later
                options = dict(split="train", batch_size=8, shard_index=0, shard_count=1, epochs=None)
                loss(rewards=(spoke,), environment=tools).open(dataset, **options)
        dialogues.check(Echo(), dataset, "Ppo.environment")


class Seen(Callback):
    def __init__(self):
        self.metrics = {}

    def on_step(self, step, metrics):
        self.metrics[step] = dict(metrics)


def spoke(prompt, answer, record):
    """The number of the model's messages."""
    return float(sum(message["role"] == "assistant" for message in record["dialogue"]))


@pytest.fixture
def train(toy_tokenizer, tmp_path, monkeypatch):
    """(loss, fields of the model) -> metrics by step and batches of two steps."""
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
    sizes = dict(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
    trainer = cb.Trainer(
        model_dir=str(tmp_path / "run"),
        steps=2,
        model=cb.DecoderConfig(**sizes),
        plan=Plan(batch_size=16),
        dataset=cb.Dataset(source=source, vocabulary=vocabulary, length=480, packing="none"),
        optimizer=cb.Optimizer(schedule=cb.Schedule(kind="constant", learning_rate=1e-3)),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=cb.Grpo(rewards=(spoke,)),
        log_every=1,
    )

    def run(loss, **model):
        seen = Seen()
        loop.train(dataclasses.replace(trainer, loss=loss, model=cb.DecoderConfig(**sizes, **model)), seen)
        return seen.metrics, batches

    return run


SPEAKING = dict(
    rewards=(spoke,),
    environment=Echo(turns=3),
    sampling=Sampling(max_new_tokens=460, temperature=1.0),
    engine=EngineConfig(slots=16, prefix_cache_mib=0),
)


def test_returns_of_values_pass_over_what_the_environment_says(train):
    """With gae_lambda = 1 a token's return is the discounted reward, of as many steps as the model has tokens after it."""
    metrics, batches = train(cb.Ppo(**SPEAKING, kl=0.0, gamma=0.99, gae_lambda=1.0), value_head=True)
    assert metrics[1]["reward"] > 1.0 and metrics[1]["engine_difference"] < 1e-4 and metrics[2]["value_loss"] > 0
    dialogues_of_turns = 0
    for batch in batches:
        for weights, returns, values in zip(batch["weights"], batch["returns"], batch["values"]):
            at = np.flatnonzero(weights)
            messages = 1 + np.sum(np.diff(at) > 1)
            dialogues_of_turns += messages > 1
            np.testing.assert_allclose(returns[at], messages * 0.99 ** np.arange(len(at))[::-1], atol=1e-5)
            assert (returns[weights == 0] == 0).all() and (values[weights == 0] == 0).all() and values[at].any()
    assert dialogues_of_turns > 3


def test_only_the_models_tokens_are_trained(train, toy_tokenizer):
    """In a run of three turns, whose probabilities in the engine are those in training."""
    vocabulary = cb.TokenizerJsonVocabulary(path=toy_tokenizer)
    metrics, batches = train(cb.Grpo(**SPEAKING, group=8))
    assert metrics[1]["engine_difference"] < 1e-4 and metrics[1]["reward"] > 1.0
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
