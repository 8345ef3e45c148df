"""Reading with a memory: which conversations there are, that they have all of the document, and that no shape grows with it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from types import SimpleNamespace

import jax
import pytest

import capibara as cb
from capibara.core.types import UserError
from capibara.inference.interactive import chat as chats
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.memory_agent.prompts import Prompts
from capibara.inference.memory_agent.reading import Reading, read
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.sampling.sampling import BeamSearch, Sampling

AGENT = MemoryAgent(
    chunk_tokens=10, memory_tokens=6, update="Q:{question} M:{memory} T:{chunk} N:", answer="Q:{question} M:{memory} A:",
    empty_memory="none",
)  # fmt: skip
TEXT = "0123456789abcdefghijklmn"


@pytest.fixture
def dataset(toy_tokenizer):
    source = cb.PromptJsonlSource(files=("x.jsonl",), template=cb.ChatTemplate(tokenizer=toy_tokenizer))
    return cb.Dataset(
        source=source, vocabulary=cb.TokenizerJsonVocabulary(path=toy_tokenizer), length=64, packing="none"
    )


@pytest.fixture
def plain(dataset):
    return Prompts(AGENT, dataset, None)


def spoken(prompts, text):
    return SimpleNamespace(tokens=prompts.vocabulary.encode(text), text=text)


def test_conversations_have_the_document_in_chunks(plain):
    reading = Reading(plain, TEXT, "who?", Sampling(max_new_tokens=4, seed=7), where="x", records=True)
    asked, samplings = [], []
    for memory in ("m1", "m2", "m3"):
        asked.append(plain.vocabulary.decode(reading.prompt))
        samplings.append(reading.sampling)
        assert reading.add(spoken(plain, memory)) is None
    asked.append(plain.vocabulary.decode(reading.prompt))
    assert asked == [
        "Q:who? M:none T:0123456789 N:", "Q:who? M:m1 T:abcdefghij N:", "Q:who? M:m2 T:klmn N:", "Q:who? M:m3 A:",
    ]  # fmt: skip
    answer = spoken(plain, "me")
    assert reading.add(answer) is answer and reading.chunks == 3 and reading.tokens == len(TEXT)
    assert [item.max_new_tokens for item in samplings] == [6] * 3 and reading.sampling.max_new_tokens == 4
    assert len({item.seed for item in (*samplings, reading.sampling)}) == 4
    assert [plain.vocabulary.decode(turn.prompt) for turn in reading.turns] == asked
    assert [turn.completion.text for turn in reading.turns] == ["m1", "m2", "m3", "me"]


def test_the_memory_has_the_tokens_that_were_written(plain):
    """Although their text has fewer: two bytes of one letter."""
    reading = Reading(plain, TEXT, "?", Sampling(max_new_tokens=4), where="x")
    halves = plain.vocabulary.encode("\u00e9")[:1]
    reading.add(SimpleNamespace(tokens=halves, text="\ufffd"))
    assert reading.prompt == [
        *plain.vocabulary.encode("Q:? M:"), *halves, *plain.vocabulary.encode(" T:abcdefghij N:")
    ]  # fmt: skip


def test_a_chat_renders_the_prompts_as_messages(dataset):
    chat = chats.of_run(dataset)
    prompts = Prompts(AGENT, dataset, chat)
    reading = Reading(prompts, TEXT, "<|end|>?", Sampling(max_new_tokens=4), where="x")
    text = "Q:<|end|>? M:none T:0123456789 N:"
    assert reading.prompt == chat.ids(text) and reading.ends == chat.ends  # what the question spells is text
    assert prompts.vocabulary.decode(reading.prompt) == f"u:{text}a:"


def test_the_answers_grammar_and_stops_are_not_of_the_memory(plain):
    sampling = Sampling(max_new_tokens=4, temperature=0.5, stop=("x",), grammar=Grammar(regex="a"), min_new_tokens=2)
    reading = Reading(plain, TEXT, "?", sampling, where="x")
    of_memory = reading.sampling
    assert (of_memory.stop, of_memory.grammar, of_memory.min_new_tokens) == ((), None, 0)
    assert of_memory.temperature == 0.5
    for _ in range(3):
        reading.add(spoken(plain, "m"))
    assert reading.sampling == sampling


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_tokens": 0}, "MemoryAgent.chunk_tokens is 0"),
        ({"memory_tokens": -1}, "MemoryAgent.memory_tokens is -1"),
        ({"update": "{question} {memory}"}, "MemoryAgent.update must have each of {chunk}, {memory}, {question} once"),
        ({"answer": "{question} {memory} {chunk}"}, "MemoryAgent.answer must have each of {memory}, {question} once"),
        ({"answer": "{question} {memory} {memory}"}, "MemoryAgent.answer must have each of"),
        ({"answer": "{question} {memory:>3}"}, "MemoryAgent.answer must have each of"),
        ({"answer": "{question} {memory} {"}, "MemoryAgent.answer cannot be read"),
    ],
)
def test_mistakes_in_an_agent_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        MemoryAgent(**fields)


def test_braces_of_a_template_are_written_double(dataset):
    agent = MemoryAgent(update="{{{question}}} {memory} {chunk}", answer="{question} {memory}")
    prompts = Prompts(agent, dataset, None)
    assert prompts.vocabulary.decode(prompts.update([40], [41], [42])).startswith("{")


@pytest.mark.parametrize(
    ("document", "sampling", "message"),
    [
        ("", {}, "book: the document is empty"),
        (TEXT, {"beams": BeamSearch()}, "Sampling.beams is .*, which reading with a memory does not support"),
        (TEXT, {"num_decodes": 2}, "Sampling.num_decodes is 2"),
        (TEXT, {"thinking_tokens": 2}, "Sampling.thinking_tokens is 2"),
        (
            TEXT,
            {"max_new_tokens": 60},
            r"book: the conversation of the answer needs \d+ tokens, must fit Dataset.length \(64\)",
        ),
    ],
)
def test_what_cannot_be_read_is_named(plain, document, sampling, message):
    with pytest.raises(UserError, match=message):
        Reading(plain, document, "?", Sampling(**{"max_new_tokens": 4} | sampling), where="book")


def test_a_chunk_that_does_not_fit_a_row_is_named(dataset):
    prompts = Prompts(MemoryAgent(chunk_tokens=60, update=AGENT.update, answer=AGENT.answer), dataset, None)
    with pytest.raises(UserError, match="book: the conversation of a chunk needs .* lower MemoryAgent.chunk_tokens"):
        Reading(prompts, TEXT * 9, "?", Sampling(max_new_tokens=4), where="book")


@pytest.mark.parametrize(
    ("answer_tokens", "longest"),
    [
        (4, len("Q:who? M:" + "m" * 6 + " T:" + "0" * 10 + " N:") + 6),  # a whole chunk, and the next memory
        (40, len("Q:who? M:" + "m" * 6 + " A:") + 40),
    ],
    ids=["chunk", "answer"],
)
def test_rows_hold_the_longest_conversation_and_no_less(dataset, answer_tokens, longest):
    sampling = Sampling(max_new_tokens=answer_tokens)
    for length in (longest, longest - 1):
        prompts = Prompts(AGENT, dataclasses.replace(dataset, length=length), None)
        with (
            contextlib.nullcontext() if length == longest else pytest.raises(UserError, match=f"needs {longest} tokens")
        ):
            Reading(prompts, TEXT, "who?", sampling, where="book")


def test_a_template_that_hides_the_message_is_named(dataset, toy_tokenizer, tmp_path):
    (path := tmp_path / "x.jinja").write_text("x")
    source = cb.PromptJsonlSource(files=("x",), template=cb.ChatTemplate(tokenizer=toy_tokenizer, template=str(path)))
    chat = chats.Chat(dataset.get_vocabulary(), source.template)
    with pytest.raises(UserError, match="the chat template does not write MemoryAgent.update once and as it is"):
        Prompts(AGENT, dataset, chat)


@pytest.fixture(scope="module")
def model(toy_tokenizer, tmp_path_factory):
    """A model of random weights, whose answers depend on what it reads."""
    import pathlib
    import shutil

    from capibara.interop import gin_of
    from capibara.models import api
    from capibara.training import run_folder

    config = cb.DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
    params = jax.tree.map(lambda x: x * 3, jax.jit(api.build(config).init)(jax.random.key(1)))
    folder = str(tmp_path_factory.mktemp("model"))
    shutil.copytree(toy_tokenizer, folder, dirs_exist_ok=True)
    files = {path.name: path.read_bytes() for path in pathlib.Path(toy_tokenizer).iterdir()}
    run_folder.save(folder, params, gin_of.run(config, folder, files))
    return cb.load(
        folder, bindings=["Dataset.length = 64", "EngineConfig.slots = 2", "EngineConfig.prefix_cache_mib = 0"]
    )


def test_many_documents_are_read_together_as_each_alone(model):
    prompts = Prompts(AGENT, model.loaded.dataset, None)
    sampling = Sampling(max_new_tokens=4, temperature=0.0)
    documents = [TEXT * n for n in (1, 5, 2, 9)]
    open_all = lambda: [Reading(prompts, text, "who?", sampling, where="x") for text in documents]  # noqa: E731
    shown = []
    together = [item.text for item in read(model.engine, open_all(), show=shown.append)]
    alone = [next(read(model.engine, [reading])).text for reading in open_all()]
    assert together == alone and len({*together}) > 1
    assert together == [
        model.generate("who?", document=text, memory=AGENT, temperature=0.0, max_tokens=4) for text in documents
    ]
    assert shown[-1] == sum(reading.chunks + 1 for reading in open_all())


def test_the_devices_hold_as_much_after_a_document_of_any_length(model):
    prompts, held, sampling = Prompts(AGENT, model.loaded.dataset, None), [], Sampling(max_new_tokens=4)
    for count in (1, 1, 300):
        assert next(read(model.engine, [Reading(prompts, TEXT * count, "who?", sampling, where="x")])).tokens
        gc.collect()
        held.append(sum(array.nbytes for array in jax.live_arrays()))
    assert held[1] == held[2] > 0


def test_python_reads_a_document_or_names_the_mistake(model):
    options = dict(document=TEXT, memory=AGENT, temperature=0.0, max_tokens=4)
    assert isinstance(model.generate([{"role": "user", "content": "who?"}], **options), str)
    for prompt, more, message in (
        ("who?", {"stream": True}, "stream and tools are not for a document"),
        (["a", "b"], {}, "the prompt of a document must be a text or one message"),
        ("who?", {"document": None}, "memory is for reading a document"),
        ("who?", {"document": 5}, "document is 5, must be a text"),
        ("who?", {"memory": "notes"}, "memory is 'notes', must be cb.MemoryAgent"),
        ("who?", {"num_decodes": 2, "temperature": 1.0}, "Sampling.num_decodes is 2"),
    ):
        with pytest.raises(UserError, match=message):
            model.generate(prompt, **options | more)
