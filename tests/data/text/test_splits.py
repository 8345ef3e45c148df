"""Which files of a data set's folder are for training, beside what Hugging Face's datasets makes of the same folder."""

from __future__ import annotations

import json
import logging
import os

import datasets.data_files
import fsspec
import pytest

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.shards.source import Format, ShardedSource
from capibara.data.sources.sources import JsonlSource, TextSource
from capibara.data.text import disk, splits
from capibara.data.text.splits import Split, Use

LAYOUTS = [
    ["train.jsonl", "test.jsonl"],
    ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"],
    ["train/a.jsonl", "test/b.jsonl", "dev/c.jsonl"],
    ["train/test.jsonl", "train/dev.jsonl"],
    ["a-train.jsonl", "a-valid.jsonl", "a-test.jsonl", "other.jsonl"],
    ["x.jsonl", "y.jsonl"],
    ["my_training_set.jsonl", "my-eval.jsonl"],
    ["contest.jsonl", "latest.jsonl", "retrain.jsonl"],
    ["train1.jsonl", "val1.jsonl"],
    ["en/train.jsonl", "en/test.jsonl", "de/train.jsonl"],
    ["c4-train.00000-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz"],
    ["data/x/evaluation set/q.jsonl", "data/x/train/q.jsonl"],
    ["train.jsonl", "testing.jsonl", "valid ation.jsonl"],
    ["data/train-00000-of-00001.jsonl", "old/train/x.jsonl"],
    ["data/train-00000-of-00001.jsonl", "data/more.jsonl", "test/x.jsonl"],
    ["data/corpus-00000-of-00001.jsonl", "train.jsonl"],
]


def write(folder, names, text="text"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({text: f"{name} {i}"}) + "\n" for i in range(3)))


@pytest.mark.parametrize("names", LAYOUTS, ids=lambda names: names[0] + "-" + names[-1])
def test_names_say_what_they_say_to_datasets(names, tmp_path):
    write(tmp_path, names)
    theirs: dict[str, set[str]] = {}
    for split, patterns in datasets.data_files.get_data_patterns(str(tmp_path)).items():
        for pattern in patterns:
            try:
                files = datasets.data_files.resolve_pattern(pattern, str(tmp_path))
            except FileNotFoundError:
                continue
            theirs.setdefault(str(split), set()).update(os.path.relpath(str(file), tmp_path) for file in files)
    ours = {}
    for split, use in (("train", Use.TRAINING), ("validation", Use.VALIDATION), ("test", Use.EVALUATION)):
        is_read = splits.of_use("FILES", str(tmp_path), names, use)
        ours[split] = {name for name, read in zip(names, is_read, strict=True) if read}
    assert ours["train"] == theirs.get("train", theirs.get("corpus"))
    for split in ("validation", "test"):
        if split in theirs:
            assert ours[split] == theirs[split]


def texts(source, split):
    documents = source.open(split)
    return sorted(documents.example(i).text.partition(" ")[0] for i in range(len(documents)))


def test_training_leaves_out_the_test_split_and_validation_is_the_folder_s(tmp_path, caplog):
    write(tmp_path, ["train.jsonl", "validation.jsonl", "test.jsonl"])
    source = JsonlSource(files=(str(tmp_path),))
    with caplog.at_level(logging.WARNING):
        assert texts(source, "train") == ["train.jsonl"] * 3
    assert "1 files for training; 2 of other splits are not read, such as test.jsonl" in caplog.text
    assert texts(source, "validation") == ["validation.jsonl"] * 3
    assert source.open("train").counts.files_left_out == 2


def test_without_a_validation_split_a_fraction_of_training_is_held_out(tmp_path):
    write(tmp_path, ["train.jsonl", "test.jsonl"])
    source = JsonlSource(files=(str(tmp_path),), validation_fraction=0.4)
    assert sorted(texts(source, "train") + texts(source, "validation")) == ["train.jsonl"] * 3


def test_validation_files_that_are_a_folder_are_its_validation_split(tmp_path):
    write(tmp_path, ["train.jsonl", "dev.jsonl", "test.jsonl"])
    source = JsonlSource(files=(str(tmp_path),), validation_files=(str(tmp_path),))
    assert texts(source, "validation") == ["dev.jsonl"] * 3 and texts(source, "train") == ["train.jsonl"] * 3


def test_files_and_globs_are_read_as_they_are_named(tmp_path):
    write(tmp_path, ["train.jsonl", "test.jsonl"])
    source = JsonlSource(files=(str(tmp_path / "*.jsonl"),), validation_fraction=0.1)
    assert {"train.jsonl", "test.jsonl"} == {*texts(source, "train"), *texts(source, "validation")}


def test_a_folder_without_a_training_split_is_refused_or_read_without_the_others(tmp_path):
    write(tmp_path / "a", ["dev.jsonl", "test.jsonl"])
    with pytest.raises(UserError, match="has the splits test, validation and none to train on: name files, or a glob"):
        JsonlSource(files=(str(tmp_path / "a"),)).open("train")
    write(tmp_path / "b", ["books.jsonl", "eval.jsonl"])
    assert {*texts(JsonlSource(files=(str(tmp_path / "b"),)), "train")} == {"books.jsonl"}


def test_folders_of_texts_have_no_splits(tmp_path):
    """A program's tests are texts to train on."""
    for name in ("train.py", "test.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    source = TextSource(files=(str(tmp_path),), validation_files=(str(tmp_path / "test.py"),))
    assert len(source.open("train")) == 2


def test_shards_of_a_folder_are_of_their_split(tmp_path):
    write(
        tmp_path,
        ["data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"],
    )
    source = ShardedSource(files=(str(tmp_path),))
    for split in ("train", "validation"):
        blocks = source.open(split)
        found = [example.text for i in range(len(blocks)) for example in blocks.examples(i)]
        assert len(found) == 3 and all(f"data/{split}-" in text for text in found)


CARD = """---
license: mit
configs:
- config_name: small
  data_files: small.jsonl
- config_name: {name}
  data_files:
  - split: train
    path: ["parts/*.jsonl"]
  - split: test
    path: held/odd.jsonl
---
# Texts
"""


def test_the_card_comes_before_names(tmp_path):
    write(tmp_path, ["parts/test.jsonl", "parts/b.jsonl", "held/odd.jsonl", "small.jsonl"])
    (tmp_path / "README.md").write_text(CARD.format(name="default"))
    assert {*texts(JsonlSource(files=(str(tmp_path),)), "train")} == {"parts/test.jsonl", "parts/b.jsonl"}
    paths, left_out = disk.listed("FILES", [str(tmp_path)], disk.RECORDS, Use.EVALUATION)
    assert [os.path.relpath(path, tmp_path) for path in paths] == ["held/odd.jsonl"] and left_out == 4


def test_a_card_of_several_configurations_must_be_chosen_from(tmp_path):
    write(tmp_path, ["parts/b.jsonl", "held/odd.jsonl", "small.jsonl"])
    (tmp_path / "README.md").write_text(CARD.format(name="large"))
    with pytest.raises(
        UserError, match=r"is a data set of 2 configurations \('small', 'large'\): name the files of one"
    ):
        JsonlSource(files=(str(tmp_path),)).open("train")


BOMB = "---\na: &a [x, x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("bcdefg", "cdefgh")
)


@pytest.mark.parametrize(
    "card",
    [
        b"---\nconfigs: [\n---\n",
        b"---\nconfigs: 7\n---\n",
        b"---\nconfigs:\n- 3\n- {data_files: {train: 4}}\n---\n",
        b"\xff\xfe",
        b"# no front matter",
        b"---\nconfigs:\n- data_files: ../../*.jsonl\n---\n",
        b"---\nconfigs: " + b"[" * 5000 + b"\n---\n",
        BOMB.encode() + b"configs: [{data_files: *h}]\n---\n",
        b"---\nconfigs: " + b"[" * 400_000 + b"\n---\n",
        b"---\nconfigs:\n" + b"- " * 200_000 + b"\n---\n",
        b"---" + b"\n" * (1 << 20) + b"x",
        b"---\nconfigs:\n- data_files: /**\n---\n",
        b"---\nconfigs:\n- data_files: ../../../../../../**\n---\n",
        b'---\nconfigs:\n- data_files: "a\\0b"\n---\n',
        b"---\nconfigs:\n- data_files: [" + b"'**/*', " * 1001 + b"]\n---\n",
    ],
)
def test_a_broken_card_leaves_it_to_names(card, tmp_path):
    write(tmp_path, ["train.jsonl", "test.jsonl"])
    (tmp_path / "README.md").write_bytes(card)
    names = ["train.jsonl", "test.jsonl"]
    assert splits.of_folder("FILES", str(tmp_path), names) == {"train.jsonl": Split.TRAIN, "test.jsonl": Split.TEST}


@pytest.mark.parametrize(
    "config, read",
    [
        ("{data_files: '**/b.jsonl'}", ["b.jsonl", "de/x/b.jsonl", "en/b.jsonl"]),
        ("{data_files: 'en/**'}", ["en/b.jsonl", "en/test.jsonl"]),
        ("{data_files: './*/[a-c].jsonl'}", ["en/b.jsonl"]),
        ("{data_files: b.jsonl, data_dir: en}", ["en/b.jsonl"]),
        ("{data_dir: en}", ["en/b.jsonl"]),
        ("{data_files: [{split: corpus, path: en/test.jsonl}]}", ["en/test.jsonl"]),
        (
            "{data_files: [{split: test, path: '*/b.jsonl'}, {split: train, path: '**/b.jsonl'}]}",
            ["b.jsonl", "de/x/b.jsonl"],
        ),
        ("{data_files: none.jsonl}", ["b.jsonl", "de/x/b.jsonl", "en/b.jsonl"]),
        ("{config_name: other, data_files: b.jsonl}\n- {config_name: a, data_dir: en, default: yes}", ["en/b.jsonl"]),
    ],
)
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_the_files_of_a_card_s_configuration_are_the_data_set(config, read, start, tmp_path):
    names = ["b.jsonl", "de/x/b.jsonl", "en/b.jsonl", "en/test.jsonl"]
    (tmp_path / "README.md").write_text(f"{start}---\nconfigs:\n- {config}\n---\n", encoding="utf-8")
    is_read = splits.of_use("FILES", str(tmp_path), names, Use.TRAINING)
    assert [name for name, chosen in zip(names, is_read, strict=True) if chosen] == read


def test_a_card_of_folders_alone_has_configurations_too(tmp_path):
    (tmp_path / "README.md").write_text("---\nconfigs:\n- data_dir: en\n- data_dir: de\n---\n")
    with pytest.raises(UserError, match="is a data set of 2 configurations"):
        splits.of_folder("FILES", str(tmp_path), ["en/train.jsonl", "de/train.jsonl"])


def test_a_folder_in_a_bucket_is_read_by_its_card_and_any_name(monkeypatch):
    store = fsspec.filesystem("memory")
    for name in ("train.jsonl", "odd.jsonl", "dev.jsonl"):
        store.pipe(f"/splits[1]/{name}", b"".join(b'{"text": "%s %d"}\n' % (name.encode(), i) for i in range(3)))
    source = JsonlSource(files=("memory://splits[1]",))
    assert texts(source, "validation") == ["dev.jsonl"] * 3
    store.pipe("/splits[1]/README.md", b"---\nconfigs:\n- data_files: odd.jsonl\n---\n")
    assert {*texts(source, "train"), *texts(source, "validation")} == {"odd.jsonl"}
    monkeypatch.setattr(limits, "SMALL_BYTES", 10)
    assert texts(source, "train") == ["train.jsonl"] * 3


def test_shards_beside_a_card_are_read_and_folders_of_texts_whole(tmp_path, caplog):
    write(tmp_path / "a", ["x.jsonl"])
    (tmp_path / "a" / "README.md").write_text("# Texts\n")
    assert [shard.rpartition("/")[2] for shard in shards_of(tmp_path / "a")] == ["x.jsonl"]
    (tmp_path / "b").mkdir()
    for name in ("train.txt", "test.txt"):
        (tmp_path / "b" / name).write_text("word\n" * 3000)
    assert {shard.rpartition("/")[2] for shard in shards_of(tmp_path / "b")} == {"train.txt", "test.txt"}
    text = Format.TEXT
    ShardedSource(
        files=(str(tmp_path / "b" / "train.txt"),), validation_files=(str(tmp_path / "b"),), format=text
    ).open("validation")
    assert "validation_files and files have 1 in common" in caplog.text


def shards_of(folder):
    blocks = ShardedSource(files=(str(folder),), block_bytes=16).open("train")
    return {blocks.name(i)["file"] for i in range(len(blocks))}


def test_what_describes_a_data_set_is_no_record(tmp_path):
    write(tmp_path, ["a.jsonl"])
    for name in splits.METADATA:
        (tmp_path / name).write_text("{}")
    paths, left_out = disk.listed("FILES", [str(tmp_path)], disk.RECORDS)
    assert paths == [str(tmp_path / "a.jsonl")] and left_out == len(splits.METADATA)
