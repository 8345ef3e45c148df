"""Preference pairs and prompts from JSON lines to rows: nothing crosses from a pair to another, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.chat.answers import PreferenceJsonlSource, PromptJsonlSource, UnpairedJsonlSource
from capibara.data.chat.formats import read_prompt
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import CombinedSource
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary

LENGTH = 128


def records(count=23):
    for i in range(count):
        yield {"prompt": f"{i}? ", "chosen": f"yes {i}" + "!" * (i % 5), "rejected": "no" + "." * (i % 7)}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def make_dataset(tmp_path, toy_tokenizer):
    def make(lines=None, source=PreferenceJsonlSource, of_source=None, **changes):
        path = write(tmp_path / "lines.jsonl", records() if lines is None else lines)
        template = ChatTemplate(tokenizer=toy_tokenizer)
        one = source(files=(str(path),), template=template, validation_fraction=0.1, **(of_source or {}))
        vocabulary = TokenizerJsonVocabulary(path=toy_tokenizer)
        options = dict(source=one, vocabulary=vocabulary, length=LENGTH, window_rows=2, window_documents=8)
        return Dataset(**options | changes)

    return make


def answers_of(dataset, batch):
    """(number of the pair, side) -> (text, its part with weight, all that the model reads before its last token)."""
    vocabulary, found = dataset.vocabulary, {}
    for row in range(len(batch["tokens"])):
        part = {key: value[row] for key, value in batch.items()}
        for segment in range(1, part["segment_ids"].max() + 1):
            at = part["segment_ids"] == segment
            (number,) = part["numbers"][at & (part["numbers"] > 0)]
            assert (segment - 1) % 2 == (number - 1) % 2  # chosen answers are in odd segments
            assert (part["positions"][at] == np.arange(at.sum())).all()
            targets, weights = part["targets"][at], part["weights"][at] > 0
            assert (part["tokens"][at][1:] == targets[:-1]).all()
            assert np.flatnonzero(weights)[0] == np.flatnonzero(part["numbers"][at])[0]
            found[(number - 1) // 2, (number - 1) % 2] = vocabulary.decode(targets), vocabulary.decode(targets[weights])
    return found


@pytest.mark.parametrize("packing", list(Packing)[::2])
def test_both_answers_of_a_pair_share_a_row_and_carry_loss_alone(make_dataset, packing):
    dataset = make_dataset(packing=packing, pairs_per_row=3, shuffle=False)
    documents, found, most = dataset.source.open("train"), {}, 0
    for batch in make_loader(dataset, batch_size=4, epochs=1):
        assert {key: value.shape for key, value in batch.items()} == {
            key: shape for key, (shape, _) in dataset.batch_spec(4).items()
        }
        found |= answers_of(dataset, batch)
        most = max(most, batch["segment_ids"].max() // 2)
    assert most == (1 if packing is Packing.NONE else 3)
    assert set(found) == {(i, side) for i in range(len(documents)) for side in (0, 1)}
    for (i, side), (text, answer) in found.items():
        record = documents.record(i)
        assert answer == record[("chosen", "rejected")[side]] and text == f"u:{record['prompt']}a:{answer}"


def test_shuffled_batches_tell_the_same_pairs_after_a_restart(make_dataset):
    dataset = make_dataset()
    loader = make_loader(dataset, batch_size=2)
    batches = [next(loader) for _ in range(3)]
    state = loader.get_state()
    again = make_loader(dataset, batch_size=2)
    again.set_state(state)
    for key, value in next(again).items():
        np.testing.assert_array_equal(value, next(loader)[key]) if key == "tokens" else None
    assert len({number for batch in batches for number in batch["numbers"].ravel().tolist()}) > 6
    with pytest.raises(UserError, match="Dataset.pairs_per_row was 8, is 2"):
        make_loader(dataclasses.replace(dataset, pairs_per_row=2), batch_size=2).set_state(state)


def test_pairs_that_a_row_does_not_hold_are_left_out(make_dataset):
    lines = [{"prompt": "q", "chosen": "long " * 20, "rejected": "n"}, *records()] * 3
    dataset = make_dataset(lines, shuffle=False, length=64)
    found = {}
    for batch in make_loader(dataset, batch_size=4, epochs=1):
        found |= answers_of(dataset, batch)
    documents = dataset.source.open("train")
    kept = {i for i in range(len(documents)) if documents.record(i)["prompt"] != "q"}
    assert {i for i, _ in found} == kept
    with pytest.raises(UserError, match=r"no preference pair of a row .* raise Dataset.length to \d+$"):
        next(make_loader(make_dataset([lines[0]] * 9, length=64), batch_size=2))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "needs chosen and rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same answer"),
        ({"chosen": "b", "rejected": "c"}, "have no prompt"),
    ],
)
def test_pairs_that_are_none_are_refused_with_their_line(make_dataset, line, said):
    with pytest.raises(UserError, match=rf"lines.jsonl:2.*{said}"):
        make_dataset([next(records()), line]).source.open("train")


def unpaired(count=23):
    return [{"prompt": f"{i}? ", "completion": f"yes {i}" + "!" * (i % 5), "label": i % 3 == 0} for i in range(count)]


@pytest.mark.parametrize("mismatched", [False, True])
@pytest.mark.parametrize("packing", list(Packing)[::2])
def test_an_answer_has_its_label_and_the_answer_of_the_line_before(make_dataset, packing, mismatched):
    source = dict(source=UnpairedJsonlSource, of_source={"mismatched": mismatched})
    dataset = make_dataset(unpaired(), packing=packing, pairs_per_row=3, shuffle=False, **source)
    documents, seen, labels = dataset.source.open("train"), {}, {}
    for batch in make_loader(dataset, batch_size=4, epochs=1):
        assert batch["labels"].dtype == np.float32 and batch.keys() == dataset.batch_spec(4).keys()
        seen |= answers_of(dataset, batch) if mismatched else {}
        first = batch["numbers"] % 2 == 1
        labels |= dict(zip(batch["numbers"][first].tolist(), batch["labels"][first].tolist()))
        assert not batch["labels"][~first].any()
    records = [documents.record(i) for i in range(len(documents))]
    assert labels == {2 * i + 1: float(record["label"]) for i, record in enumerate(records)}
    for (i, side), (text, answer) in seen.items():
        assert answer == records[i - side]["completion"] and text == f"u:{records[i]['prompt']}a:{answer}"
    assert len(seen) == 2 * mismatched * len(documents)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "completion": "b"}, r"label is missing \(it has: prompt, completion\), must be true"),
        ({"prompt": "a", "completion": "b", "label": 1}, r"label is 1, must be true \(desirable\) or false"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "is a preference pair, and an answer with a label is expected: set",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "label": True}, "must end with a message of the assistant"),
    ],
)
def test_answers_without_a_label_are_refused_with_their_line(make_dataset, line, message):
    with pytest.raises(UserError, match=rf"lines.jsonl:2.*{message}") as caught:
        make_dataset([unpaired()[0], line], source=UnpairedJsonlSource).source.open("train")
    assert "\n" not in str(caught.value)


def test_a_label_in_place_of_a_pair_is_refused_with_its_method(make_dataset):
    with pytest.raises(UserError, match="needs chosen and rejected .*: set Dataset.source = @UnpairedJsonlSource"):
        make_dataset(unpaired()).source.open("train")


def test_a_mismatched_answer_needs_another_line(make_dataset):
    dataset = make_dataset(unpaired(2), source=UnpairedJsonlSource, of_source={"mismatched": True})
    with pytest.raises(UserError, match="the validation split has one answer, and UnpairedJsonlSource.mismatched"):
        dataset.source.open("validation")


def test_prompts_come_whole_with_their_number(make_dataset):
    lines = [{"question": f"q{i}", "answer": str(i)} for i in range(9)] + [{"question": "long" * 40, "answer": ""}]
    dataset = make_dataset(lines, PromptJsonlSource, packing="none")
    documents, seen = dataset.source.open("train"), set()
    for batch in make_loader(dataset, batch_size=2, epochs=1):
        for row in range(2):
            ids = batch["targets"][row][batch["segment_ids"][row] > 0]
            if len(ids):
                number = batch["numbers"][row, 0] - 1
                assert dataset.vocabulary.decode(ids) == f"u:{documents.record(number)['question']}a:"
                seen.add(number)
    assert seen == {i for i in range(len(documents)) if len(documents.record(i)["question"]) < 9}


def test_prompts_are_read_from_what_data_sets_have():
    user = {"role": "user", "content": "hi"}
    for record in (
        {"prompt": "hi"},
        {"question": "hi", "answer": "4"},
        {"instruction": "hi", "output": "x"},
        {"messages": [user, {"role": "assistant", "content": "4"}]},
        {"conversations": [{"from": "human", "value": "hi"}]},
    ):
        assert read_prompt(record, "x:1").messages == [user]
    for record, said in (
        ({"answer": "4"}, "has no prompt"),
        ({"messages": [{"role": "system", "content": "4"}]}, "has no message of the user"),
    ):
        with pytest.raises(UserError, match=f"x:1 {said}"):
            read_prompt(record, "x:1")


def test_sources_of_different_things_are_not_combined(make_dataset):
    sources = make_dataset().source, make_dataset([{"prompt": "a"}] * 9, PromptJsonlSource).source
    with pytest.raises(UserError, match="have different formats"):
        CombinedSource(sources=sources)


def test_combined_sources_tell_the_record_of_each_line(make_dataset, tmp_path):
    one = make_dataset([{"prompt": f"a{i}"} for i in range(9)], PromptJsonlSource).source
    other = write(tmp_path / "others.jsonl", [{"prompt": f"b{i}"} for i in range(9)])
    documents = CombinedSource(sources=(one, dataclasses.replace(one, files=(str(other),)))).open("train")
    for i in range(len(documents)):
        name = "lines" if i < len(one.open("train")) else "others"
        assert documents.where(i).startswith(str(tmp_path / f"{name}.jsonl:"))
        assert documents.example(i).text == f"<|turn|>u:{documents.record(i)['prompt']}<|end|><|turn|>a:"
