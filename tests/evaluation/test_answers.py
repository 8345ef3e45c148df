"""Prompts as plain texts and as turns of a chat, choices after both, and prompts that are too long."""

from __future__ import annotations

import dataclasses
import os

import jax
import pytest
import tokenizers

from capibara.cli.composition.models import open_subject
from capibara.core.types import UserError
from capibara.evaluation import answers
from capibara.evaluation.answers import PromptFormat
from capibara.evaluation.harness import CapibaraLM, Harness
from capibara.evaluation.metrics import Choice
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.scoring import Pair
from capibara.evaluation.tasks import EvalTask, Item
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.memory_agent.prompts import Prompts
from capibara.inference.memory_agent.reading import Reading, read
from capibara.inference.sampling.sampling import Sampling
from capibara.interop import gin_of
from capibara.models import api
from capibara.training import run_folder

from .conftest import SMALL_ROWS, TINY

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
TASK = EvalTask(files=("x",), metrics=(len,), sampling=Sampling(temperature=0.0, max_new_tokens=5))
SILENT = Predictions(None, {})


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """With a tokenizer that has a chat template beside it."""
    folder = tmp_path_factory.mktemp("chatty")
    pieces = ["<s>", "<e>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<e>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<e>", "bos_token": "<s>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    files = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    params = jax.tree.map(lambda x: x * 3, jax.jit(api.build(TINY).init)(jax.random.key(1)))
    run_folder.save(str(folder), params, gin_of.run(TINY, str(folder), files))
    return open_subject(str(folder), bindings=SMALL_ROWS)


def test_a_chat_is_asked_as_its_template_has_it(chatty):
    prompt, ends = answers.prompt_of(chatty, PromptFormat.CHAT, "Hi <e>?")
    text, vocabulary = "<s>user:Hi <e>?<e><s>assistant:", chatty.vocabulary
    ids = {name: vocabulary.tokenizer.token_to_id(name) for name in ("<s>", "<e>")}
    assert vocabulary.decode(prompt) == "user:Hi <e>?assistant:"  # what the user spells is text
    assert prompt[0] == ids["<s>"] and prompt.count(ids["<e>"]) == 1 and ends == (ids["<e>"],)
    lm = CapibaraLM(chatty, Harness(chat=True))
    rendered = lm.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert rendered == text.replace(" <e>?", "")
    assert lm.tok_encode(rendered) == chatty.chat.ids("Hi")  # with one beginning token, which the template has
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is "}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False).endswith("<s>assistant:The answer is")
    assert lm.chat_template(True) and lm.tokenizer_name and lm.eot_token_id == ids["<e>"]


def test_texts_and_choices_of_a_chat(chatty):
    task = dataclasses.replace(TASK, format=PromptFormat.CHAT)
    [text] = answers.generated(chatty, "qa", task, [Item("Hi", "x")], SILENT, lambda *_: None)
    assert text == chatty.engine.submit(chatty.chat.ids("Hi"), TASK.sampling, ends=chatty.chat.ends).result().text
    task = EvalTask(files=("x",), choices="c", format=PromptFormat.CHAT)
    [choices] = answers.ranked(chatty, "mc", task, [Item("Hi", 0, ("yes", "née"))], SILENT, lambda *_: None)
    encode = chatty.vocabulary.encode
    scores = chatty.scorer([Pair(chatty.chat.ids("Hi"), encode(text)) for text in ("yes", "née")])
    assert [(one.tokens, one.bytes) for one in choices] == [(3, 3), (4, 4)] and isinstance(choices[0], Choice)
    assert [one.log_probability for one in choices] == [one.log_probability for one in scores]


def test_samples_have_seeds_of_their_own(subject):
    sampling = Sampling(temperature=1.5, max_new_tokens=8, seed=3)
    task = EvalTask(files=("x",), metrics=(len,), num_samples=2, sampling=sampling)
    items = [Item("def f", "x"), Item("class", "x")]
    found = answers.generated(subject, "qa", task, items, SILENT, lambda *_: None)
    want = [
        [subject.engine.submit(item.prompt, Sampling(temperature=1.5, max_new_tokens=8, seed=seed)).result().text for seed in (3, 4)]
        for item in items
    ]  # fmt: skip
    assert found == want and found[0][0] != found[0][1]


def test_choices_are_the_rest_of_the_whole_text(subject):
    task = EvalTask(files=("x",), choices="c")
    [choices] = answers.ranked(subject, "mc", task, [Item("a b", 0, ("c", "dd"))], SILENT, lambda *_: None)
    encode = subject.vocabulary.encode
    scores = subject.scorer([Pair([0, *encode("a b")], encode(f" {text}")) for text in ("c", "dd")])
    assert [one.log_probability for one in choices] == [one.log_probability for one in scores]
    assert [(one.tokens, one.bytes) for one in choices] == [(2, 1), (3, 2)]


def test_a_prompt_that_has_no_place_is_named(subject):
    with pytest.raises(UserError, match="qa, example 1: its prompt has 71 tokens, must fit Dataset.length \\(64\\)"):
        answers.generated(subject, "qa", TASK, [Item("a", "x"), Item("a" * 70, "x")], SILENT, lambda *_: None)
    task = EvalTask(files=("x",), choices="c", before_choice="")
    for choice, why in (("b" * 70, "mc, example 1: the choice 'b+' has 70 tokens"), ("", "mc, example 1: .* 0 tokens")):
        with pytest.raises(UserError, match=why):
            answers.ranked(
                subject, "mc", task, [Item("a", 0, ("c", "d")), Item("a", 0, (choice, "d"))], SILENT, lambda *_: None
            )


MEMORY = MemoryAgent(
    chunk_tokens=20,
    memory_tokens=8,
    update="{question}|{memory}|{chunk}",
    answer="{question}|{memory}",
    empty_memory="-",
)


@pytest.mark.parametrize("form", PromptFormat)
def test_documents_are_read_with_a_memory(chatty, form, tmp_path):
    """And an interrupted evaluation resumes with the answers that it has, unless a document has changed."""
    task = dataclasses.replace(TASK, format=form, memory=MEMORY)
    items = [Item("who?", "x", document=letter * 100) for letter in "abc"]
    path = str(tmp_path / "answers.jsonl")
    with Predictions(path, {}) as told:
        texts = answers.generated(chatty, "qa", task, items[:2], told, lambda *_: None)
    prompts = Prompts(MEMORY, chatty.trainer.dataset, chatty.chat if form is PromptFormat.CHAT else None)
    alone = [Reading(prompts, item.document, "who?", TASK.sampling, where="x") for item in items]
    assert texts == [answer.text for answer in read(chatty.engine, alone[:2])]
    with Predictions(path, {}) as told:
        assert answers.generated(chatty, "qa", task, items, told, lambda *_: None)[:2] == texts
    changed = [dataclasses.replace(items[0], document="other"), *items[1:]]
    with Predictions(path, {}) as told, pytest.raises(UserError, match="line 2 is of another request"):
        answers.generated(chatty, "qa", task, changed, told, lambda *_: None)


def test_a_document_that_does_not_fit_is_named_with_its_example(chatty):
    task = dataclasses.replace(TASK, memory=dataclasses.replace(MEMORY, chunk_tokens=10_000))
    with pytest.raises(
        UserError, match=r"qa, example 0: the conversation of a chunk needs \d+ tokens, must fit Dataset.length"
    ):
        answers.generated(chatty, "qa", task, [Item("who?", "x", document="a" * 9000)], SILENT, lambda *_: None)
