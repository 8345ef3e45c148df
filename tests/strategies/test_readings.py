"""GRPO of answers about documents that are read with a memory: the rows of their conversations, and one advantage for all."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

import capibara as cb
from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.strategies import readings
from capibara.strategies.answering import Answer, Exchange
from capibara.strategies.policy.advantages import Advantages, Baseline, KlIn, RewardScale
from capibara.strategies.rows import answer_rows
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation

AGENT = cb.MemoryAgent(
    chunk_tokens=8,
    memory_tokens=5,
    update="{question}|{memory}|{chunk}",
    answer="{question}|{memory}",
    empty_memory="-",
)


def vowels(prompt, answer, record):
    """The share of vowels in the answer and its memories, which are as many as the document has chunks."""
    assert len(record["memories"]) == -(-len(record["document"]) // AGENT.chunk_tokens)
    text = "".join([*record["memories"], answer])
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


GRPO = cb.Grpo(
    rewards=(vowels,), group=4, sampling=Sampling(max_new_tokens=4, temperature=1.0), memory=AGENT, max_chunks=3,
    token_weights="batch", engine=EngineConfig(slots=8, prefix_cache_mib=0),
)  # fmt: skip


def test_rows_are_of_conversations():
    dataset = cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=8, packing="none")
    whole = Answer([5, 6], [7], [-1.0], 1.0, (1.0,), False, earlier=(Exchange([8], [9, 10], [-2.0, -3.0]),))
    short = dataclasses.replace(whole, earlier=(), truncated=True)
    assert Answer.of(json.loads(json.dumps(whole.packed()))) == whole
    rows = answer_rows([whole, short], dataset, False, conversations=3)
    np.testing.assert_array_equal(rows["weights"].sum(1), [2, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(rows["drawn"].sum(1), [-5, -1, 0, -1, 0, 0])
    np.testing.assert_array_equal(rows["segment_ids"].sum(1), [2, 2, 0, 2, 0, 0])
    assert answer_rows([whole, short], dataset, True, conversations=3)["weights"].sum() == 3


def test_all_conversations_have_the_advantage_of_the_answer():
    weights_BT = np.array([[1, 1], [0, 1], [0, 0], [1, 0], [1, 0], [0, 1]])
    of = functools.partial(Advantages, Baseline.GROUP, RewardScale.NONE, 0.5)
    gain_BT = of(KlIn.LOSS).of_tokens(np.array([[1.0, 0.0]]), weights_BT, None)
    np.testing.assert_allclose(gain_BT, np.repeat([0.5, -0.5], 3)[:, None] * weights_BT)
    costs_BT = np.ones((6, 2))  # 3 tokens of either answer: the divergence of all conversations
    costs_BT[3:] = 2.0
    gain_BT = of(KlIn.REWARD).of_tokens(np.array([[1.0, 1.0]]), weights_BT, costs_BT)
    np.testing.assert_allclose(gain_BT, np.repeat([0.75, -0.75], 3)[:, None] * weights_BT)


class Seen(Callback):
    def __init__(self):
        self.metrics = {}

    def on_step(self, step, metrics):
        self.metrics[step] = dict(metrics)


@pytest.fixture
def make(toy_tokenizer, tmp_path):
    def trainer(grpo=GRPO, documents=("abcdefghijklmnopqrst", "uvwxyz"), **changes):
        path = tmp_path / "documents.jsonl"
        path.write_text(
            "".join(json.dumps({"question": f"{i}?", "document": documents[i % 2]}) + "\n" for i in range(20))
        )
        source = cb.PromptJsonlSource(files=(str(path),), template=cb.ChatTemplate(tokenizer=toy_tokenizer))
        dataset = cb.Dataset(
            source=source, vocabulary=cb.TokenizerJsonVocabulary(path=toy_tokenizer), length=36, packing="none"
        )
        fields = dict(
            model_dir=str(tmp_path / "run"), steps=2, plan=cb.Plan(batch_size=32), dataset=dataset, loss=grpo, log_every=1,
            model=cb.DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32"),
            optimizer=cb.Optimizer(schedule=cb.Schedule(kind="constant", learning_rate=1e-2)),
            evaluation=Evaluation(every=0), checkpointing=Checkpointing(every=0),
        )  # fmt: skip
        return cb.Trainer(**fields | changes)

    return trainer


def test_each_conversation_is_trained_on_the_answers_advantage(make, monkeypatch):
    batches, set_up = [], loop.set_up

    def watched(trainer, **options):
        run, initial = set_up(trainer, jax.devices()[:1], **options)

        def step(state, batch):
            batches.append(jax.device_get(batch))
            return run.train_step(state, batch)

        return dataclasses.replace(run, train_step=step), initial

    monkeypatch.setattr(loop, "set_up", watched)
    seen = Seen()
    trainer = make()
    loop.train(trainer, seen)
    vocabulary, counts = trainer.dataset.get_vocabulary(), set()
    assert all(seen.metrics[step]["engine_difference"] < 1e-4 for step in (1, 2))
    assert all(np.isfinite([*seen.metrics[step].values()]).all() for step in (1, 2))
    for batch in batches:
        by_answer = {name: value.reshape(8, 4, 36) for name, value in batch.items()}
        for k in range(8):
            used = by_answer["weights"][k].sum(1) > 0
            chunks = int(used.sum()) - 1
            counts.add(chunks)
            assert (used == [i <= chunks for i in range(4)]).all() and (by_answer["segment_ids"][k, ~used] == 0).all()
            advantages = by_answer["advantages"][k][by_answer["weights"][k] > 0]
            assert len({*advantages.tolist()}) == 1
            texts = [
                vocabulary.decode(by_answer["targets"][k, i][by_answer["weights"][k, i] > 0]) for i in range(chunks)
            ]
            for i in range(1, chunks):  # what was written is what the next prompt has as the memory
                ids = by_answer["tokens"][k, i][by_answer["segment_ids"][k, i] > 0]
                assert f"?|{texts[i - 1]}|" in vocabulary.decode(ids)
    assert counts == {1, 3} and seen.metrics[1]["memory_length"] > 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_chunks": None}, "Grpo.memory is set and Grpo.max_chunks is not"),
        ({"memory": None}, "Grpo.max_chunks is set and Grpo.memory is not"),
        ({"max_chunks": 0}, "Grpo.max_chunks is 0, must be at least 1"),
        ({"environment": cb.FunctionTools(functions=(vowels,))}, "Grpo.memory and Grpo.environment are set"),
        ({"kl": 0.1, "kl_in": "tokens"}, "Grpo.kl_in is 'tokens'"),
    ],
)
def test_options_that_do_not_go_together_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(GRPO, **fields)


def test_batches_have_the_rows_of_all_conversations(make):
    assert GRPO.rows_of_a_prompt == 16 and cb.Grpo(rewards=(vowels,)).rows_of_a_prompt == 8
    with pytest.raises(UserError, match=r"multiple of Grpo.group \(4\) times 4 conversations of an answer: try 32"):
        GRPO.check(make().dataset, 28)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            ("a" * 25, "b"),
            r"documents.jsonl:1 has a document of 25 tokens in 4 chunks, must have at most Grpo.max_chunks \(3\)",
        ),
        ((None, "b"), "documents.jsonl:1 has no text in 'document', which Grpo.memory reads"),
        (("", "b"), "documents.jsonl:1: the document is empty"),
    ],
)
def test_documents_that_cannot_be_read_are_named_before_the_run(make, documents, message):
    with pytest.raises(UserError, match=message):
        loop.train(make(documents=documents), Callback())


def test_a_line_asks_one_question(make):
    record = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "document": "z"}
    opened = readings.Readings(AGENT, 3, make().dataset)
    assert opened.open({"question": "y", "document": "z"}, "here", [GRPO.sampling])[0].chunks == 1
    with pytest.raises(UserError, match="here has 2 messages, and Grpo.memory asks one question"):
        opened.open(record, "here", [GRPO.sampling])
