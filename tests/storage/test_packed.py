"""Lines of files, plain or compressed, and of pipes: one reader for all files of lines that a user names."""

import gzip
import os
import threading

import pytest
import zstandard

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.evaluation.metrics import exact_match
from capibara.evaluation.tasks import EvalTask, read_items
from capibara.inference.interactive.files import read_prompts
from capibara.inference.sampling.sampling import Sampling
from capibara.interop.quantize import calibration
from capibara.storage import packed

CONTENT = "\ufeffone\r\n\n zwei Größe\n\t \nlast".encode()
COMPRESS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": lambda content: zstandard.ZstdCompressor().compress(content),
}


@pytest.mark.parametrize("ending", COMPRESS)
def test_lines_are_those_of_the_plain_file(tmp_path, ending):
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(COMPRESS[ending](CONTENT))
    assert [*packed.lines(path)] == [(1, b"one"), (3, " zwei Größe".encode()), (5, b"last")]
    assert [line for _, line in packed.lines(path, blank=True)] == [
        b"one",
        b"",
        " zwei Größe".encode(),
        b"\t ",
        b"last",
    ]
    if ending:
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(UserError, match=rf"a.txt{ending} ends in the middle of its compressed data"):
            [*packed.lines(path)]


@pytest.mark.parametrize("ending", COMPRESS)
def test_prompts_are_read_from_files_and_pipes(tmp_path, ending):
    def texts(path):
        return [prompt.text for prompt in read_prompts(str(path), Sampling())]

    lines = COMPRESS[ending]('\ufeff{"prompt": "one"}\n\n{"prompt": "two"}\r\n'.encode())
    (tmp_path / f"a.jsonl{ending}").write_bytes(lines)
    assert texts(tmp_path / f"a.jsonl{ending}") == ["one", "two"]
    pipe = tmp_path / f"b.jsonl{ending}"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(lines))
    writer.start()
    assert texts(pipe) == ["one", "two"]
    writer.join()
    (tmp_path / f"c.txt{ending}").write_bytes(COMPRESS[ending]("\ufeffone\n\ntwo\n".encode()))
    assert texts(tmp_path / f"c.txt{ending}") == ["one", "", "two"]
    (tmp_path / f"d.jsonl{ending}").write_bytes(COMPRESS[ending](b'{"prompt": "one"}\n\n{"prompt": 1}\n'))
    with pytest.raises(UserError, match=rf"d.jsonl{ending}:3 must be a JSON object"):
        texts(tmp_path / f"d.jsonl{ending}")


@pytest.mark.parametrize("ending", COMPRESS)
def test_tasks_and_calibration_texts_are_read_compressed(tmp_path, ending):
    lines = '\ufeff{"text": "one", "answer": "1"}\n\n{"text": "two", "answer": "2"}\r\n'.encode()
    (tmp_path / f"a.jsonl{ending}").write_bytes(COMPRESS[ending](lines))
    task = EvalTask(
        files=(str(tmp_path / f"a.jsonl{ending}"),), prompt="{text}", target="answer", metrics=(exact_match,)
    )
    assert [(item.prompt, item.target) for item in read_items("a", task)] == [("one", "1"), ("two", "2")]
    vocabulary, eos = ByteVocabulary(), ByteVocabulary().eos_id
    rows = calibration.rows(str(tmp_path / f"a.jsonl{ending}"), {}, vocabulary, length=4, most=2)
    assert rows.ravel().tolist() == [*vocabulary.encode("one"), eos, *vocabulary.encode("two"), eos]
    (tmp_path / f"b.txt{ending}").write_bytes(COMPRESS[ending]("\ufeffone\r\ntwo".encode()))
    rows = calibration.rows(str(tmp_path / f"b.txt{ending}"), {}, vocabulary, length=8, most=1)
    assert rows.ravel().tolist() == [*vocabulary.encode("one\ntwo"), eos]
    (tmp_path / f"c.jsonl{ending}").write_bytes(COMPRESS[ending](lines)[:-2])
    if ending:
        for read in (
            lambda path: read_items(
                "a", EvalTask(files=(path,), prompt="{text}", target="answer", metrics=(exact_match,))
            ),
            lambda path: calibration.rows(path, {}, vocabulary, length=4, most=9),
        ):
            with pytest.raises(UserError, match=rf"c.jsonl{ending} ends in the middle of its compressed data"):
                read(str(tmp_path / f"c.jsonl{ending}"))
