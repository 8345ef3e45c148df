"""Conversations through the loader: rows, splits, exact state, what is too long, and a run from gin/tasks/chat.gin."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging

import jax
import numpy as np
import pytest

from capibara.core.types import BATCH_KEYS, UserError
from capibara.data.chat.conversations import ChatJsonlSource, TrainOn, render_example
from capibara.data.chat.formats import Conversation, read_preference
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset, Kind, TooLong
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import CombinedSource, TextSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary, TokenizerJsonVocabulary

CHATS = 61
BATCH = 4
LENGTH = 160


def answer(i: int, turn: int) -> str:
    return f"answer {i}.{turn} " + "x" * (i % 7)


@pytest.fixture
def corpus(tmp_path):
    """Conversations of one to three turns, each naming its number, in three formats."""
    path = tmp_path / "chats.jsonl"
    lines = []
    for i in range(CHATS):
        turns = [(f"q{i} " + "y" * (i % 5), answer(i, turn)) for turn in range(1 + i % 3)]
        if i % 3 == 0:
            lines.append({"instruction": turns[0][0], "input": "", "output": turns[0][1]})
        else:
            names = ("role", "content", "user", "assistant") if i % 3 == 1 else ("from", "value", "human", "gpt")
            key, said, user, assistant = names
            talk = [{key: role, said: text} for turn in turns for role, text in zip((user, assistant), turn)]
            lines.append({"messages" if key == "role" else "conversations": talk})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_dataset(path, folder, chats=(), **changes) -> Dataset:
    options = dict(files=(str(path),), template=ChatTemplate(tokenizer=folder), validation_fraction=0.2)
    defaults = dict(
        source=ChatJsonlSource(**{**options, **dict(chats)}),
        vocabulary=TokenizerJsonVocabulary(path=folder),
        length=LENGTH,
        window_rows=4,
        window_documents=8,
        seed=5,
    )
    return Dataset(**{**defaults, **changes})


@pytest.fixture(scope="module")
def folder(tokenizer_folder):
    return tokenizer_folder("qwen2.5")


def take(loader, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(loader, count))


def assert_same(first, second) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for key in BATCH_KEYS:
            np.testing.assert_array_equal(one[key], other[key])


def said(batches, vocabulary) -> collections.Counter:
    """What has loss in the batches, by segment; what is read there must be the same conversation."""
    texts: collections.Counter = collections.Counter()

    def text(ids):
        return vocabulary.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    for batch in batches:
        for tokens, targets, weights, segments in zip(
            batch["tokens"], batch["targets"], batch["weights"], batch["segment_ids"], strict=True
        ):
            for segment in range(1, segments.max(initial=0) + 1):
                here = segments == segment
                assert text(tokens[here]).startswith("<|im_start|>system") and "q" in text(tokens[here])
                np.testing.assert_array_equal(tokens[here][1:], targets[here][:-1])
                texts[text(targets[here & (weights == 1)])] += 1
    return texts


def test_every_answer_once_a_pass_and_splits_share_none(corpus, folder):
    dataset = make_dataset(corpus, folder)
    passes = [
        said(make_loader(dataset, split=split, batch_size=BATCH, epochs=1), dataset.vocabulary)
        for split in ("train", "validation")
    ]
    whole = ["".join(f"{answer(i, turn)}<|im_end|>" for turn in range(1 + (i % 3 and i % 3))) for i in range(CHATS)]
    assert passes[0] + passes[1] == collections.Counter(whole)
    assert not set(passes[0]) & set(passes[1]) and len(passes[1]) > 3


def test_conversations_share_rows_whole_and_apart(corpus, folder):
    """As many segments as conversations begin, positions from 0 in each, and no row with less than could be there."""
    dataset = make_dataset(corpus, folder)
    batches = list(make_loader(dataset, batch_size=BATCH, epochs=1))
    segments = [int(batch["segment_ids"][b].max()) for batch in batches for b in range(BATCH)]
    assert max(segments) > 1 and sum(segments) == len(dataset.source.open("train"))
    start = dataset.vocabulary.tokenizer.token_to_id("<|im_start|>")
    for batch in batches:
        first = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
        assert (batch["tokens"][first] == start).all()
        assert first.sum() == sum(int(row.max()) for row in batch["segment_ids"])


@pytest.mark.parametrize("packing", [Packing.BEST_FIT, Packing.NONE])
@pytest.mark.parametrize("too_long", list(TooLong))
def test_resume_skips_none_and_repeats_none(corpus, folder, packing, too_long):
    dataset = make_dataset(corpus, folder, packing=packing, too_long=too_long, length=60, prefetch=2)
    loader = make_loader(dataset, batch_size=BATCH)
    whole = take(loader, 12)
    loader.close()
    for stop in (0, 1, 7):
        first = make_loader(dataset, batch_size=BATCH)
        begun = take(first, stop)
        state = json.loads(json.dumps(first.get_state()))
        take(first, 2)
        first.close()
        second = make_loader(dataset, batch_size=BATCH)
        second.set_state(state)
        assert second.get_state() == state
        assert_same(begun + take(second, 12 - stop), whole)
        second.close()


@pytest.mark.heavy
def test_resume_with_workers(corpus, folder):
    loader = make_loader(make_dataset(corpus, folder), batch_size=BATCH)
    whole = take(loader, 12)
    loader.close()
    resumed, state = [], None
    for workers, count in ((0, 3), (2, 4), (0, 5)):
        loader = make_loader(make_dataset(corpus, folder, workers=workers), batch_size=BATCH)
        if state is not None:
            loader.set_state(state)
        resumed += take(loader, count)
        state = loader.get_state()
        loader.close()
    assert_same(resumed, whole)


def test_hosts_share_the_batches(corpus, folder):
    dataset = make_dataset(corpus, folder)
    whole = take(make_loader(dataset, batch_size=BATCH), 5)
    halves = [take(make_loader(dataset, batch_size=BATCH, shard_index=i, shard_count=2), 5) for i in range(2)]
    parts = [{key: np.concatenate([one[key] for one in pair]) for key in BATCH_KEYS} for pair in zip(*halves)]
    assert_same(parts, whole)


@pytest.mark.parametrize(
    ("source", "dataset", "named"),
    [
        ({"train_on": TrainOn.LAST}, {}, "data.train_on was 'assistant', is 'last'"),
        ({"template": {"date": "2025-01-01"}}, {}, "data.template was"),
        ({"template": {"variables": {"x": 1}}}, {}, "data.template was"),
        ({}, {"too_long": TooLong.CUT}, "Dataset.too_long was 'drop', is 'cut'"),
    ],
)
def test_a_state_of_other_rows_is_refused(corpus, folder, source, dataset, named):
    loader = make_loader(make_dataset(corpus, folder), batch_size=BATCH)
    next(loader)
    state = loader.get_state()
    loader.close()
    if "template" in source:
        source = {"template": ChatTemplate(tokenizer=folder, **source["template"])}
    with pytest.raises(UserError, match=named):
        make_loader(make_dataset(corpus, folder, source, **dataset), batch_size=BATCH).set_state(state)


def lengths_of(dataset) -> list[int]:
    """Targets of each conversation."""
    documents = dataset.source.open("train")
    encode = dataset.vocabulary.encode_rendered
    return [len(encode(documents.example(i).text)[0]) - 1 for i in range(len(documents))]


def test_what_is_too_long_is_left_out_and_counted(corpus, folder, caplog):
    dataset = make_dataset(corpus, folder, length=60)
    lengths = lengths_of(dataset)
    fitting, long = sum(n <= 60 for n in lengths), sum(n > 60 for n in lengths)
    assert fitting > 9 and long >= 10
    with caplog.at_level(logging.WARNING):
        batches = list(make_loader(dataset, batch_size=BATCH, epochs=1))
    assert sum(batch["segment_ids"].max(axis=1).sum() for batch in batches) == fitting
    assert sum((batch["segment_ids"] > 0).sum() for batch in batches) == sum(n for n in lengths if n <= 60)
    told = [record.getMessage() for record in caplog.records]
    assert [message.split(" read so far ")[1].split()[0] for message in told] == ["1", "10"]
    assert "longer than Dataset.length (60) were dropped, see Dataset.too_long" in told[0]


def test_what_is_too_long_is_cut(corpus, folder, caplog):
    dataset = make_dataset(corpus, folder, length=60, too_long=TooLong.CUT)
    lengths = lengths_of(dataset)
    with caplog.at_level(logging.WARNING):
        batches = list(make_loader(dataset, batch_size=BATCH, epochs=1))
    assert sum((batch["segment_ids"] > 0).sum() for batch in batches) == sum(min(n, 60) for n in lengths)
    assert any("(60) were cut" in record.getMessage() for record in caplog.records)
    # So short a row ends before the first answer.
    with pytest.raises(UserError, match="no conversation of a row can be trained on .* raise Dataset.length to"):
        next(make_loader(make_dataset(corpus, folder, length=10, too_long=TooLong.CUT), batch_size=BATCH))


@pytest.mark.parametrize("options", [{}, {"split": "validation", "epochs": 1}], ids=["train", "validation"])
def test_where_nothing_fits_the_rows(corpus, folder, options):
    loader = make_loader(make_dataset(corpus, folder, length=8), batch_size=BATCH, **options)
    message = r"\(of \d+ conversations \d+ are longer than Dataset.length \(8\)\): raise Dataset.length to \d+ or set"
    with pytest.raises(UserError, match=message):
        next(loader)


@pytest.mark.parametrize(("name", "values"), [("weight", (0, 1)), ("loss", (False, True)), ("train", (False, True))])
def test_messages_without_weight(tmp_path, folder, caplog, name, values):
    path = tmp_path / "a.jsonl"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no", name: values[0]}]
    talk += [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes", name: values[1]}]
    path.write_text("".join(json.dumps({"messages": talk[:stop]}) + "\n" for stop in (4, 2)))
    dataset = make_dataset(path, folder, {"validation_files": (str(path),)})
    with caplog.at_level(logging.WARNING):
        batches = list(make_loader(dataset, split="validation", batch_size=1, epochs=1))
    assert said(batches, dataset.vocabulary) == {"yes<|im_end|>": 1}
    assert "of 2 conversations read so far 1 without loss were dropped" in caplog.text
    path.write_text(json.dumps({"messages": [talk[0], {**talk[1], name: 0.5}]}) + "\n")
    with pytest.raises(UserError, match=f"a.jsonl:1: {name} of a message must be 0 or 1, not 0.5"):
        dataset.source.open("validation")


def test_conversations_and_texts_in_one(corpus, folder, tmp_path):
    (tmp_path / "text.txt").write_text("plain text\n" * 40)
    chats = make_dataset(corpus, folder).source
    texts = TextSource(files=(str(tmp_path / "text.txt"),), document_bytes=22, domain="text")
    dataset = make_dataset(corpus, folder, source=CombinedSource(sources=(chats, texts)))
    batches = list(make_loader(dataset, batch_size=BATCH, epochs=1))
    count = len(dataset.source.open("train"))
    assert sum(batch["segment_ids"].max(axis=1).sum() for batch in batches) == count
    with pytest.raises(UserError, match="would cut conversations"):
        make_dataset(corpus, folder, source=dataset.source, packing=Packing.CONCAT)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', r"a.jsonl:2 has no conversation \(it has: text\): known keys are"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            r"a.jsonl:2 has no message of the assistant \(its roles: user\)",
        ),
        ('{"messages": ', r"a.jsonl:2 is not JSON"),
    ],
)
def test_bad_lines_are_found_before_the_run(tmp_path, folder, line, message):
    good = json.dumps({"question": "q", "answer": "a"})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n")
    (tmp_path / "v.jsonl").write_text(f"{good}\n")
    source = make_dataset(tmp_path / "a.jsonl", folder, {"validation_files": (str(tmp_path / "v.jsonl"),)}).source
    with pytest.raises(UserError, match=message) as caught:
        source.open("train")
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_a_conversation_stops_the_run_before_it_begins(tmp_path, tokenizer_folder):
    talk = {"question": "q", "answer": "a"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (talk, {**talk, "system": "s"}, talk)))
    source = {"validation_files": (str(tmp_path / "a.jsonl"),)}
    with pytest.raises(UserError, match=r"jinja:1 fails for .*a.jsonl:2: System role not supported"):
        make_dataset(tmp_path / "a.jsonl", tokenizer_folder("gemma"), source).source.open("train")


def test_bad_datasets(corpus, folder):
    with pytest.raises(UserError, match="'masked'.* cannot be trained on conversations"):
        make_dataset(corpus, folder, kind=Kind.MASKED)
    with pytest.raises(UserError, match="would cut conversations: try 'best_fit' or 'none'"):
        make_dataset(corpus, folder, packing=Packing.CONCAT)
    with pytest.raises(UserError, match="ByteVocabulary.* use @TokenizerJsonVocabulary"):
        next(make_loader(make_dataset(corpus, folder, vocabulary=ByteVocabulary()), batch_size=BATCH))


def test_both_sides_of_a_preference_are_rendered(folder):
    pair = read_preference({"prompt": "q", "chosen": "good", "rejected": "bad"}, "a:1")
    template = ChatTemplate(tokenizer=folder)
    sides = [render_example(template, side, TrainOn.LAST, "a:1") for side in pair]
    (begin, end), (other_begin, other_end) = sides[0].loss[0], sides[1].loss[0]
    assert sides[0].text[begin:end] == "good<|im_end|>" and sides[1].text[other_begin:other_end] == "bad<|im_end|>"
    assert sides[0].text[:begin] == sides[1].text[:other_begin]


@pytest.mark.parametrize(
    "name,end", [("smollm2", "<|im_end|>"), ("gemma", "<end_of_turn>"), ("llama3.1", "<|eot_id|>")]
)
def test_a_prompt_is_what_answers_were_learned_after_and_ends_as_they_do(tokenizer_folder, name, end):
    from capibara.inference.interactive.chat import Chat

    template = ChatTemplate(tokenizer=tokenizer_folder(name))
    vocabulary = TokenizerJsonVocabulary(path=template.tokenizer)
    chat = Chat(vocabulary, template)
    turns = Conversation([{"role": "user", "content": f"Hi {end}"}, {"role": "assistant", "content": "Hello"}])
    example = render_example(template, turns, TrainOn.ASSISTANT, "here")
    ids, offsets = vocabulary.encode_rendered(example.text)
    prompt = chat.ids(f"Hi {end}")
    assert prompt == ids[: len(prompt)].tolist()
    assert offsets[len(prompt), 0] == example.loss[0][0]  # the first that has loss
    end_id = vocabulary.tokenizer.token_to_id(end)
    assert chat.ends == (end_id,)
    assert prompt.count(end_id) == chat.ids("Hi").count(end_id)  # what the user spells is text


def test_a_tokenizer_folder_says_its_special_tokens(tokenizer_folder):
    vocabulary = TokenizerJsonVocabulary(path=tokenizer_folder("smollm2"))
    names = [vocabulary.tokenizer.id_to_token(i) for i in (vocabulary.bos_id, vocabulary.eos_id)]
    assert names == ["<|im_start|>", "<|im_end|>"]


RUN = """
include "runs/pretrain.gin"
include "models/tiny.gin"
include "tasks/chat.gin"
DecoderConfig.embed_dim = 32
DecoderConfig.num_layers = 2
DecoderConfig.mlp_dim = 64
Trainer.log_every = 1
Evaluation.every = 2
Checkpointing.every = 0
BATCH_SIZE = 8
TRAIN_STEPS = 3
LENGTH = 160
"""


@pytest.mark.heavy
def test_a_run_from_chat_gin(corpus, folder, tmp_path, monkeypatch, capfd):
    """Three steps by the command line; the validation loss is of the answers alone."""
    from capibara.cli import train
    from capibara.monitoring.metrics_file.loggers import read_metrics
    from capibara.multihost import exits

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.gin").write_text(RUN)
    arguments = ["--gin_file=run.gin", "--gin.MODEL_DIR=run", f"--gin.FILES=('{corpus}',)", f"--gin.TOKENIZER={folder}"]
    assert exits.run_verb(train.main, arguments) == 0, capfd.readouterr()
    records = list(read_metrics("run"))
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 3 and np.isfinite(losses).all() and losses[2] < losses[0]
    check_adapters(arguments, capfd)


def check_adapters(arguments, capfd):
    """Adapters beside what the run has come to: asked in the chat template, and merged."""
    from capibara.cli import infer, train
    from capibara.cli.composition.models import load_run
    from capibara.models import api
    from capibara.monitoring.metrics_file.loggers import read_metrics
    from capibara.multihost import exits

    more = [
        "--gin.MODEL_DIR=tuned",
        "--gin.Trainer.init_from=run",
        "--gin.DecoderConfig.lora=@Lora()",
        "--gin.Lora.rank=2",
    ]
    assert exits.run_verb(train.main, [*arguments, *more]) == 0, capfd.readouterr()
    evaluated = [record["step"] for record in read_metrics("tuned") if record["kind"] == "eval"]
    assert evaluated[0] == 0  # what was given
    capfd.readouterr()
    asked = ["--model_dir=tuned", "--chat", "--prompt=How many?", "--gin.Sampling.max_new_tokens=8"]
    assert exits.run_verb(infer.main, asked) == 0, capfd.readouterr()
    assert "How many?" not in capfd.readouterr().out
    loaded = load_run("tuned")
    plain = api.build(dataclasses.replace(loaded.trainer.model, lora=None))
    assert loaded.model is plain and jax.tree.structure(loaded.params) == jax.tree.structure(plain.abstract_params)
    query, begun = (run.params["layers"]["attention"]["query"] for run in (loaded, load_run("run")))
    key, begun_key = (run.params["layers"]["attention"]["key"] for run in (loaded, load_run("run")))
    assert np.abs(query - begun).max() > 0  # the adapter is in it
    np.testing.assert_array_equal(key, begun_key)  # this one has none
