"""A corpus is prepared to the same bytes by any number of workers, however often it is killed."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from capibara.builders import workers
from capibara.builders.preparation import build, settings
from capibara.builders.preparation.filters import DatatroveFilter, Filter, Judged
from capibara.builders.preparation.near import NearDuplicates
from capibara.core import processes
from capibara.core.types import TryAgain, UserError
from capibara.data.packing import rows
from capibara.data.packing.packing import Packing
from capibara.data.shards.array_record import ArrayRecords
from capibara.data.text import protobuf
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.storage import stores
from tests.builders.preparation import corpora

ROOT = pathlib.Path(__file__).parents[3]
SMALL = settings.CorpusPreparation(length=256, part_bytes=8192, shard_parts=2)
FILTERED = dataclasses.replace(SMALL, filters=(DatatroveFilter(name="RegexFilter", options={"regex_exp": "^never$"}),))
CHOSEN = {"small": SMALL, "filtered": FILTERED}


def prepare(corpus, out, chosen=SMALL, num_workers=0, progress=lambda topic, detail: None):
    return build.prepare([str(corpus)], str(out), chosen, num_workers, progress)


def files(folder):
    """The files of an output folder by name; lineage has times."""
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir() if path.name != "lineage.jsonl"}


def shards_of(folder):
    """The files of an output folder that do not hold its settings."""
    return {name: content for name, content in files(folder).items() if name != "manifest.json"}


def rows_of(folder):
    found = []
    for entry in stores.listed([f"{folder}/*.array_record"]):
        shard_format = ArrayRecords(block_bytes=1 << 16)
        for _, start, stop in [(0, *block) for block in shard_format.blocks(entry).tolist()]:
            found += [rows.decode(protobuf.example(record)) for _, record in shard_format.records(entry, start, stop)]
    return found


def texts_of(folder):
    """The texts of a corpus by their number, put together again."""
    found = {}
    for row in rows_of(folder):
        edges = [*row.starts.tolist(), len(row.ids)]
        for number, first, last in zip(row.documents.tolist(), edges, edges[1:]):
            found.setdefault(number, []).append(row.ids[first:last].tolist())
    vocabulary, texts = ByteVocabulary(), {}
    for number, pieces in sorted(found.items()):
        pieces.sort(key=lambda ids: ids[-1] == vocabulary.eos_id)  # a rest may share an earlier row
        assert [ids[-1] == vocabulary.eos_id for ids in pieces].count(True) == 1
        texts[number] = vocabulary.decode([i for ids in pieces for i in ids])
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return corpora.write_corpus(tmp_path_factory.mktemp("corpus") / "in")


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "out"
    return prepare(corpus, out), out


def test_duplicates_go_and_nothing_else(prepared):
    manifest, out = prepared
    assert {name: manifest.counts[name] for name in ("documents", "exact_duplicates", "near_duplicates", "kept")} == {
        "documents": 101, "exact_duplicates": 20, "near_duplicates": 20, "kept": 61,
    }  # fmt: skip
    expected = [corpora.text(i) for i in range(60)] + [f"{corpora.text(1000, 3000)}\n{corpora.text(1001, 3000)}\n"]
    assert [*texts_of(out).values()] == expected


def test_rows_say_what_they_hold(prepared):
    manifest, out = prepared
    found = rows_of(out)
    assert len(found) == manifest.counts["rows"] and sum(len(row.ids) for row in found) == manifest.counts["tokens"]
    assert {(row.length, row.vocabulary) for row in found} == {(256, ByteVocabulary().fingerprint())}
    assert {*found[0].domains} == {"made"} and {*found[-1].domains} == {"markdown"}
    assert all(len(row.ids) <= 256 for row in found)
    begins = np.concatenate([row.previous == ByteVocabulary().bos_id for row in found])
    assert np.count_nonzero(begins) == 61  # the other pieces continue a document


def test_the_index_leads_to_the_input(prepared, corpus):
    _, out = prepared
    index = json.loads((out / build.summary.INDEX).read_text())
    assert sum(shard["rows"] for shard in index["shards"]) == len(rows_of(out))
    assert index["parts"][0]["pieces"][0] == [str(corpus / "a.jsonl"), 0, 8192]
    assert index["parts"][-1]["pieces"][-1][0] == str(corpus / "c.md") and index["documents"] == 101


def test_any_number_of_workers_writes_the_same_bytes(prepared, corpus, tmp_path):
    prepare(corpus, tmp_path / "out", num_workers=2)
    assert files(tmp_path / "out") == files(prepared[1])


def test_a_second_run_does_nothing(prepared, corpus):
    manifest, out = prepared
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.array_record")}
    assert prepare(corpus, out) == manifest and before == {path: path.stat().st_mtime_ns for path in before}


_KILLED = """
import os, signal, sys
from capibara.builders.preparation import build
from tests.builders.preparation.test_build import FILTERED, SMALL

def progress(topic, detail):
    if f"{topic} {detail}" == sys.argv[4]:
        os.kill(os.getpid(), signal.SIGKILL)

build.prepare([sys.argv[1]], sys.argv[2], {"small": SMALL, "filtered": FILTERED}[sys.argv[3]], 0, progress)
"""


@pytest.mark.parametrize(
    "name, moments",
    [
        ("small", ["reading documents 2 of 9", "finding near duplicates 5 of 14", "writing shards 2 of 5"]),
        ("filtered", ["reading documents 8 of 9", "filtering documents 3 of 9", "finding near duplicates 5 of 14"]),
    ],
)
def test_a_killed_build_resumes_to_the_same_bytes(prepared, corpus, tmp_path, name, moments):
    for at in moments:
        command = [sys.executable, "-c", _KILLED, str(corpus), str(tmp_path / "out"), name, at]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
    calls = []
    prepare(corpus, tmp_path / "out", CHOSEN[name], progress=lambda topic, detail: calls.append(topic))
    assert "writing shards" in calls and shards_of(tmp_path / "out") == shards_of(prepared[1])


def test_scratch_that_a_power_loss_has_emptied_is_written_again(prepared, corpus, tmp_path):
    command = [sys.executable, "-c", _KILLED, str(corpus), str(tmp_path / "out"), "small", "writing shards 2 of 5"]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == -signal.SIGKILL
    scratch = tmp_path / "out" / ".building" / "scratch"
    names = ["exact/000001", "near/000002", "pairs/003-000-256", "done/near/000004.json", "done/pairs/005-000-256.json"]
    for name in names:
        os.truncate(scratch / name, 0)
    prepare(corpus, tmp_path / "out")
    assert files(tmp_path / "out") == files(prepared[1])


def test_filters_that_drop_nothing_change_nothing(prepared, corpus, tmp_path):
    """With filters documents are read twice, without them once."""
    found = prepare(corpus, tmp_path / "out", FILTERED)
    assert shards_of(tmp_path / "out") == shards_of(prepared[1]) and found.counts == prepared[0].counts


_WITH_WORKERS = """
import multiprocessing, os, signal, sys
from capibara.builders.preparation import build
from tests.builders.preparation.test_build import SMALL

def progress(topic, detail):
    if topic == "finding near duplicates":
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    build.prepare([sys.argv[1]], sys.argv[2], SMALL, 2, progress)
"""


def test_workers_end_with_a_killed_build(corpus, tmp_path):
    (tmp_path / "program.py").write_text(_WITH_WORKERS)
    command = [sys.executable, str(tmp_path / "program.py"), str(corpus), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) >= 2
    end_s = time.monotonic() + 30
    while any(processes.start_of(pid) for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(processes.start_of(pid) for pid in pids)


def test_a_killed_worker_is_reported():
    with pytest.raises(TryAgain, match="a worker process was killed"), workers.Workers(1) as pool:
        pool.each(_kill, [1, 2, 3], lambda: None)


def _kill(task):
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_of_a_worker_arrives():
    with pytest.raises(UserError, match="of 2"), workers.Workers(1) as pool:
        pool.each(_fail, [1, 2, 3], lambda: None)


def _fail(task):
    if task == 2:
        raise UserError("of 2")


def test_no_worker_writes_after_an_error(tmp_path):
    with pytest.raises(UserError, match="the first"), workers.Workers(2) as pool:
        pool.each(_fail_or_write, [None, str(tmp_path / "late")], lambda: None)
    before = os.listdir(tmp_path)
    time.sleep(0.5)
    assert os.listdir(tmp_path) == before == ["late"]


def _fail_or_write(path):
    if path is None:
        raise UserError("the first")
    time.sleep(0.3)
    pathlib.Path(path).touch()


def test_problems_have_the_lines_of_the_files(tmp_path):
    lines = [json.dumps({"text": corpora.text(i)}) for i in range(60)]
    lines[3], lines[30], lines[55] = "{bad", "", '{"text": 1}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out")
    assert {(one.line, one.kind) for one in manifest.problems} == {(4, "malformed"), (56, "no_text")}
    assert manifest.counts["documents"] == 57
    assert len(json.loads((tmp_path / "out" / "index.json").read_text())["parts"]) > 3


def test_filters_are_counted_and_texts_rewritten(tmp_path):
    good = [f"{corpora.text(i, 40)}\n{corpora.text(i + 500, 40)}\n" for i in range(4)]
    corpora.write_lines(tmp_path / "a.jsonl", [*good, "short", "  ", f"{good[0]}no end"])
    c4 = DatatroveFilter(name="C4QualityFilter", options={"min_num_sentences": 2})
    chosen = settings.CorpusPreparation(length=64, filters=(c4,))
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", chosen)
    counts = [manifest.counts[name] for name in ("blank", "filtered", "filtered_too_few_sentences", "near_duplicates")]
    assert counts == [1, 1, 1, 1]  # the last one loses its line without an end, and is like the first then
    assert [*texts_of(tmp_path / "out").values()] == [one.strip() for one in good]


def test_near_duplicates_may_be_kept(corpus, tmp_path):
    manifest = prepare(corpus, tmp_path / "out", settings.CorpusPreparation(length=256, near=None))
    assert (manifest.counts["near_duplicates"], manifest.counts["kept"]) == (0, 81)


def test_texts_that_share_a_key_alone_are_kept(tmp_path):
    one = corpora.text(0, 200)
    corpora.write_lines(tmp_path / "a.jsonl", [one, corpora.changed(one, 1, 12)])  # a similarity of about 0.5
    many = {"bands": 112, "rows": 1}
    strict = settings.CorpusPreparation(length=64, near=NearDuplicates(**many))
    loose = settings.CorpusPreparation(length=64, near=NearDuplicates(**many, similarity=0.0))
    assert prepare(tmp_path / "a.jsonl", tmp_path / "strict", strict).counts["kept"] == 2
    assert prepare(tmp_path / "a.jsonl", tmp_path / "loose", loose).counts["kept"] == 1


def test_concatenated_rows_are_full(corpus, tmp_path):
    chosen = settings.CorpusPreparation(length=100, packing=Packing.CONCAT)
    prepare(corpus, tmp_path / "out", chosen)
    sizes = [len(row.ids) for row in rows_of(tmp_path / "out")]
    assert {*sizes[:-1]} == {100} and len(texts_of(tmp_path / "out")) == 61


def test_other_settings_need_another_folder(prepared, corpus):
    with pytest.raises(UserError, match="built with other settings.*length"):
        prepare(corpus, prepared[1], settings.CorpusPreparation(length=512))


def test_a_corpus_without_documents_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(UserError, match="IN has no document.*has no field 'text'"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out")


def test_a_filter_of_the_users_own_is_applied(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Short(Filter):
        most: int = 20

        def judge(self, text):
            return Judged(text) if len(text) < self.most else Judged(None, "long")

    corpora.write_lines(tmp_path / "a.jsonl", ["short one", corpora.text(1)])
    chosen = settings.CorpusPreparation(length=64, filters=(Short(),))
    assert chosen.as_json()["filters"] == [{"filter": "Short", "most": 20}]
    assert prepare(tmp_path / "a.jsonl", tmp_path / "out", chosen).counts["filtered_long"] == 1


@pytest.mark.parametrize("wrong", [{"length": 1}, {"part_bytes": 0}, {"packing": Packing.NONE}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(UserError, match=f"CorpusPreparation.{next(iter(wrong))}"):
        settings.CorpusPreparation(**wrong)
