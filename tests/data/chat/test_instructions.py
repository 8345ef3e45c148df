"""`python -m capibara.prepare instructions`: conversations out of files and archives, on two sides."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile

import pytest

from capibara.cli import prepare
from capibara.core.types import UserError
from capibara.data.chat.formats import read_conversation, read_preference
from capibara.data.chat.instructions import prepare_instructions
from capibara.multihost import exits

ALPACA = [{"instruction": f"question {i}", "input": "", "output": f"answer {i}"} for i in range(200)]
PAIRS = [{"prompt": f"question {i}", "chosen": "good", "rejected": "bad"} for i in range(50)]


@pytest.fixture
def archive(tmp_path):
    """An sdist with a list of instructions, lines of pairs, and something else."""
    path = tmp_path / "data-1.0.tar.gz"
    contents = {
        "data-1.0/data/alpaca.json": json.dumps(ALPACA),
        "data-1.0/data/pairs.jsonl": "\n\n".join(map(json.dumps, PAIRS)),
        "data-1.0/data/info.json": "{}",
        "data-1.0/setup.py": "",
    }
    with tarfile.open(path, "w:gz") as file:
        for name, text in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            file.addfile(member, io.BytesIO(text.encode()))
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_archive_by_the_command_line(archive, tmp_path, capsys):
    arguments = ["instructions", "--files", str(archive), "--members", "alpaca.json", f"--output={tmp_path}/out"]
    assert exits.run_verb(prepare.main, arguments) == 0
    assert "alpaca.json: 200 conversations" in capsys.readouterr().out
    train, held_out = (lines_of(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "held_out"))
    assert 8 < len(held_out) < 40
    messages = [read_conversation(line, "x").messages for line in train + held_out]
    assert sorted((asked["content"], told["content"]) for asked, told in messages) == sorted(
        (record["instruction"], record["output"]) for record in ALPACA
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["held_out.jsonl", "train.jsonl"]


def test_a_zip_that_unpacks_to_far_more_is_refused_by_its_directory(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.jsonl", bytes((64 << 20) + 1))
    with pytest.raises(UserError, match="a.jsonl unpacks to 67,108,865 bytes, must have at most 67,108,864"):
        prepare_instructions([str(tmp_path / "bomb.zip")], str(tmp_path), members=("a.jsonl",), report=len)


def test_pairs_and_several_files_keep_a_question_on_one_side(archive, tmp_path):
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as file:
        file.writestr("x/alpaca.json", json.dumps(ALPACA[:50]))
    files = [str(archive), str(tmp_path / "more.zip")]
    with pytest.raises(UserError, match="--members .'pairs.jsonl'. is none of the files of .*more.zip: alpaca.json"):
        prepare_instructions(files, str(tmp_path / "none"), members=["pairs.jsonl"])
    prepare_instructions(files[:1], str(tmp_path), members=["pairs.jsonl"], report=len)
    pairs = [
        read_preference(line, "x") for name in ("train", "held_out") for line in lines_of(tmp_path / f"{name}.jsonl")
    ]
    assert sorted(pair.chosen.messages[0]["content"] for pair in pairs) == sorted(pair["prompt"] for pair in PAIRS)
    assert {pair.rejected.messages[1]["content"] for pair in pairs} == {"bad"}
    asked = {line["chosen"][0]["content"] for line in lines_of(tmp_path / "held_out.jsonl")}
    prepare_instructions(files, str(tmp_path), members=["alpaca.json"], report=len)
    again = [line["messages"][0]["content"] for line in lines_of(tmp_path / "held_out.jsonl")]
    assert asked == {question for question in again if int(question.split()[1]) < 50} and len(again) > len(set(again))


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ((), {}, "--files is empty: name at least one"),
        (("none.json",), {}, r"--files \('none.json'\) matches no file"),
        (("a.txt",), {}, r"--files \('a.txt'\) must end in one of .json, .jsonl, .tar.gz"),
        (
            ("data-1.0.tar.gz",),
            {},
            "--members is not set: name some of the files of .*: alpaca.json, info.json, pairs.jsonl",
        ),
        (("data-1.0.tar.gz",), {"members": ["info.json"]}, "info.json must be a list of conversations, not dict"),
        (("bad.zip",), {"members": ["x"]}, "bad.zip cannot be read as an archive"),
        (("bad.jsonl",), {}, r"bad.jsonl is not JSON \("),
        (("text.jsonl",), {}, r"text.jsonl:2 has no conversation \(it has: text\)"),
        (("one.jsonl",), {}, "conversations to train on and .* held out: add more"),
        (("one.jsonl",), {"held_out": 1.0}, r"--held_out \(1.0\) must lie between 0 and 1"),
    ],
)
def test_mistakes(archive, tmp_path, monkeypatch, files, options, message):
    monkeypatch.chdir(tmp_path)
    good = json.dumps(ALPACA[0])
    contents = {
        "a.txt": "",
        "bad.zip": "PK",
        "bad.jsonl": "{",
        "one.jsonl": good,
        "text.jsonl": f'{good}\n{{"text": "x"}}',
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        prepare_instructions(files, "out", report=len, **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_told(archive, tmp_path):
    (tmp_path / "file").write_text("mine")
    options = {"members": ("alpaca.json",), "held_out": 0.5}
    with pytest.raises(UserError, match="--output=.*file cannot be written"):
        prepare_instructions((str(archive),), str(tmp_path / "file"), report=len, **options)
    assert (tmp_path / "file").read_text() == "mine"
