"""Tables as JSON lines: Parquet and CSV files, and data sets of a Hub on this machine."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.shards import tables
from capibara.storage.store import Entry
from tests import hub_server

CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]
- config_name: odd
  data_files: [{split: a, path: train.jsonl}, {split: b, path: test.jsonl}]
---
"""
FILES = {
    "README.md": CARD.encode(),
    "train.jsonl": b"".join(b'{"prompt": "q%d?", "completion": "a"}\n' % i for i in range(3)),
    "test.jsonl": b'{"prompt": "t?", "completion": "u"}\n',
}


def rows(name, folder):
    (path,) = tables.with_tables([str(name)], str(folder))
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_rows_of_parquet_are_lines(tmp_path):
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "ü"}]
    columns = {"messages": [turns, turns], "n": [1, None], "day": [datetime.date(2026, 1, 2)] * 2, "x": [0.5, 1.0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=1)
    both = {"messages": turns, "day": "2026-01-02"}
    assert rows(tmp_path / "a.parquet", tmp_path / "out") == [both | {"n": 1, "x": 0.5}, both | {"x": 1.0}]
    pyarrow.parquet.write_table(pyarrow.table({"n": [7]}), tmp_path / "b.parquet")
    assert rows(tmp_path / "*.parquet", tmp_path / "out")[-1] == {"n": 7}


def test_values_of_csv_stay_texts(tmp_path):
    text = '\ufeffprompt,completion\r\n007,NA\r\nnull,"1,0\r\nnew line"\r\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", newline="")
    want = [{"prompt": "007", "completion": "NA"}, {"prompt": "null", "completion": "1,0\r\nnew line"}]
    assert rows(tmp_path / "a.csv", tmp_path / "out") == want


def test_a_table_is_written_once_and_again_where_it_has_changed(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt\na\n")
    (first,) = tables.with_tables([str(path)], str(tmp_path / "out"))
    before = os.stat(first).st_mtime_ns
    assert tables.with_tables([str(path)], str(tmp_path / "out")) == (first,) and os.stat(first).st_mtime_ns == before
    path.write_text("prompt\nab\n")
    (second,) = tables.with_tables([str(path)], str(tmp_path / "out"))
    assert second != first and json.loads(open(second).read()) == {"prompt": "ab"}


def test_a_copy_of_a_table_is_the_same_data(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("prompt\na\n")
    (first,) = tables.with_tables([str(tmp_path / "a.csv")], str(tmp_path / "out"))
    os.utime(tmp_path / "a.csv", (1, 1))
    monkeypatch.chdir(tmp_path)
    assert tables.with_tables(["a.csv"], str(tmp_path / "out")) == (first,)
    (tmp_path / "a.csv").write_text("prompt\nb\n")  # as long, at the same time
    os.utime(tmp_path / "a.csv", (1, 1))
    assert rows("a.csv", tmp_path / "out") == [{"prompt": "b"}]


def test_long_texts_of_csv_are_read_and_limited(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("prompt\n" + "a" * 200_000 + "\n")
    assert rows(tmp_path / "a.csv", tmp_path / "out") == [{"prompt": "a" * 200_000}]
    monkeypatch.setattr(limits, "LINE_BYTES", 200_001)
    (tmp_path / "a.csv").write_text("prompt\n" + "a" * 200_002 + "\n")
    with pytest.raises(UserError, match="a.csv is no CSV file in UTF-8 .field larger than field limit .200001"):
        rows(tmp_path / "a.csv", tmp_path / "out")


def test_no_column_of_parquet_hides_another(tmp_path):
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["prompt", "prompt"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has the columns .*prompt.*, must have each name once: rename one"):
        rows(tmp_path / "a.parquet", tmp_path / "out")


def test_tables_are_written_on_this_machine_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("prompt\na\n")
    with pytest.raises(UserError, match="a.csv cannot be written into gs://bucket/run/data: name a run folder on this"):
        tables.with_tables(["a.csv"], "gs://bucket/run/data")
    with pytest.raises(
        UserError, match="gs://bucket/a.csv is not on this machine: copy it here, or write it as Parquet"
    ):
        list(tables._of_csv(Entry("gs://bucket/a.csv", 1, "1")))
    assert os.listdir() == ["a.csv"]


def test_what_is_no_table_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    names = ("chats/a", "a/b.jsonl", "a/b.jsonl.gz", "chats.jsonl", "/a/b", "gs://bucket/a", "data/*.jsonl", "chats/")
    assert tables.with_tables(names, str(tmp_path / "out")) == names and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.parquet", None, "a.parquet does not exist"),
        ("a.parquet", b"PAR1 no table", "is no Parquet file, or cut short"),
        ("a.csv", b"", "has no rows"),
        ("a.csv", b"prompt\n", "has no rows"),
        ("a.csv", b"a,a\n1,2\n", "must begin with a name for each column"),
        ("a.csv", b"a,\n1,2\n", "must begin with a name for each column"),
        ("a.csv", b"a,b\n1\n", "a.csv:2 has 1 values, must have 2"),
        ("a.csv", b'a,b\n"1,2\n', "is no CSV file in UTF-8"),
        ("a.csv", b"a,b\n\xff,2\n", "is no CSV file in UTF-8"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        tables.with_tables([str(tmp_path / name)], str(tmp_path / "out"))
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_a_value_that_json_cannot_hold_is_named(tmp_path):
    table = pyarrow.table({"x": [decimal.Decimal("0.5")]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: record 1 of the data cannot be written as JSON \(a Decimal"):
        rows(tmp_path / "a.parquet", tmp_path / "out")


@pytest.fixture
def endpoint():
    with hub_server.running("datasets", FILES) as address:
        yield address


def test_a_split_of_a_data_set_of_the_hub_is_lines_and_mistakes_are_one_line(endpoint, tmp_path):
    code = (
        "import sys\nfrom capibara.core.types import UserError\nfrom capibara.data.shards import tables\n"
        "for name in sys.argv[2:]:\n"
        "    try: print('path', *tables.with_tables([name], sys.argv[1]))\n"
        "    except UserError as error: print('error', error)"
    )
    names = ("me/small:main:train", "me/small:odd:b", "me/small", "me/small:odd:c", "me/none")
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.getcwd()}
    own |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

    def lines(*names, **more):
        command = [sys.executable, "-c", code, str(tmp_path / "out"), *names]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own | more, check=True)
        return done.stdout.splitlines()

    train, odd, several, split, none = lines(*names)
    assert [len(open(line.removeprefix("path ")).readlines()) for line in (train, odd)] == [3, 1]
    assert several == "error me/small has the configurations main, odd: name one as me/small:CONFIG:SPLIT"
    assert 'Unknown split "c"' in split and none.startswith("error me/none is no file here, and cannot be read from")
    assert lines(names[0], HF_HUB_OFFLINE="1") == [train]  # from the copy on this machine, so that a run resumes


def first(path):
    with open(path, encoding="utf-8") as file:
        return json.loads(file.readline())


@pytest.fixture
def saved(tmp_path):
    """A data set with three splits, as save_to_disk and as to_parquet write it."""
    import datasets

    rows_of = {split: [{"text": f"{split} {i}"} for i in range(2)] for split in ("train", "validation", "test")}
    splits = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in rows_of.items()})
    splits.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for split, table in splits.items():
        table.to_parquet(str(tmp_path / "parquet" / "data" / f"{split}-00000-of-00001.parquet"))
    return tmp_path


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_a_folder_of_tables_is_read_by_its_splits(saved, kind):
    folder, out = str(saved / kind), str(saved / "lines")
    assert tables.is_table(folder)
    for use, split in (
        (tables.Use.TRAINING, "train"),
        (tables.Use.VALIDATION, "validation"),
        (tables.Use.EVALUATION, "test"),
    ):
        (path,) = tables.with_tables([folder], out, use=use)
        assert first(path) == {"text": f"{split} 0"}
    (path,) = tables.held_out([folder], out)
    assert first(path) == {"text": "validation 0"}


def test_a_saved_split_and_a_file_of_arrow_are_tables(saved, tmp_path):
    assert rows(saved / "saved" / "test", tmp_path / "out")[0] == {"text": "test 0"}
    assert rows(next((saved / "saved" / "train").glob("*.arrow")), tmp_path / "out")[1] == {"text": "train 1"}
    table = pyarrow.table({"n": [1, None]})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert rows(tmp_path / "a.arrow", tmp_path / "out") == [{"n": 1}, {}]


def test_a_saved_data_set_in_a_folder_of_a_split_s_name_is_for_training_alone(saved, tmp_path):
    folder = str(saved / "saved" / "validation")
    (path,) = tables.with_tables([folder], str(tmp_path / "out"))
    assert first(path) == {"text": "validation 0"} and not tables.held_out([folder], str(tmp_path / "out"))


def test_a_saved_data_set_without_a_known_split_is_one_line(tmp_path):
    import datasets

    table = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict({"old": table, "new": table}).save_to_disk(str(tmp_path / "x"))
    with pytest.raises(UserError, match="has the splits old, new: name the folder of one, such as .*/x/old"):
        tables.with_tables([str(tmp_path / "x")], str(tmp_path / "out"))
    for keys in (("test",), ("train_a", "train_b")):
        datasets.DatasetDict(dict.fromkeys(keys, table)).save_to_disk(str(tmp_path / keys[0]))
        with pytest.raises(UserError, match=f"has the splits {', '.join(keys)}: name the folder of one"):
            tables.with_tables([str(tmp_path / keys[0])], str(tmp_path / "out"))
    (tmp_path / "x" / "old" / "state.json").write_text("[]")
    with pytest.raises(UserError, match="is no data set that can be read"):
        tables.with_tables([str(tmp_path / "x")], str(tmp_path / "out"))
    (tmp_path / "a.arrow").write_bytes(b"ARROW1 and no more")
    with pytest.raises(UserError, match="a.arrow is no Arrow file"):
        tables.with_tables([str(tmp_path / "a.arrow")], str(tmp_path / "out"))


def test_a_folder_with_lines_is_no_folder_of_tables(saved):
    (saved / "parquet" / "train.jsonl").write_text('{"text": "x"}\n')
    assert not tables.is_table(str(saved / "parquet"))
