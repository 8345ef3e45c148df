"""What is planted in the input of `capibara prepare` is found and named; nothing good is lost, however often it is killed."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import zlib

import pytest

from capibara.cli import prepare
from capibara.multihost import exits
from tests.builders.preparation import corpora
from tests.builders.preparation.test_build import rows_of, texts_of
from tests.builders.redaction import planted
from tests.builders.routing import data

for _package in ("rensa", "detect_secrets", "tree_sitter_sql", "openlineage.client", "orjson"):
    pytest.importorskip(_package)
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import hostile_inputs  # noqa: E402

ROOT = HERE.parents[1]


def run(word: str, *arguments: object) -> int:
    """The exit code of `capibara prepare WORD`, in this process."""
    return exits.run_verb(prepare.main, [word, *map(str, arguments), *hostile_inputs.WORDS[word][1:]])


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    """The files of an output folder; lineage has times."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lineage.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Planted:
    """A folder of files with secrets, duplicates, and lines and files that cannot be read.

    Attributes:
      folder: the files.
      secrets: in the code and output of the records.
      texts: of all good records, in their order.
      near: how many texts are like an earlier one.
      problems: the lines that cannot be read, and their kinds, by file name.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder, self.near = folder, 0
        self.secrets: dict[str, str] = {}
        self.texts: list[str] = []
        self.problems: dict[str, set[tuple[int, str]]] = {}
        self._number = 0
        folder.mkdir()
        self._in_lines()
        self._in_a_cut_archive()
        self._in_other_encodings()

    def _record(self, shown: str, text: str) -> str:
        self._number += 1
        about = {"code": f"value = load({self._number})\nprint(value)", "session": f"s{self._number}", "text": text}
        return json.dumps({**about, "stdout": f"{shown}\n"})

    def _in_lines(self) -> None:
        """Secrets of all kinds; duplicates of the texts; lines that cannot be read."""
        lines = []
        for number, (kind, make) in enumerate({**planted.TOKENS, **planted.IN_CONTEXT}.items()):
            made = make(planted.Make(number))
            shown, self.secrets[kind] = made if isinstance(made, tuple) else (f"using {made} now", made)
            text = corpora.text(number)
            self.texts.append(text)
            lines.append(self._record(shown, text).encode())
            if number % 4 == 1:
                self.texts.append(text)
                lines.append(self._record("an equal text", text).encode())
            if number % 4 == 3:
                self.texts.append(corpora.changed(text, number))
                lines.append(self._record("a similar text", self.texts[-1]).encode())
                self.near += 1
        bad = {
            b"{bad": "malformed",
            b'{"text": "\xff"}': "encoding",
            b'{"text": "a\0b"}': "malformed",
            b"[1]": "malformed",
            b'{"text":' * 10_000: "malformed",
            b'{"text": NaN}': "malformed",
            b'{"text": "\\ud800"}': "encoding",
        }
        places = sorted(random.Random(0).sample(range(len(lines)), len(bad)))
        found = {(at + before + 1, kind) for before, (at, kind) in enumerate(zip(places, bad.values()))}
        for at, line in zip(reversed(places), reversed(bad)):
            lines.insert(at, line)
        lines.append(b'{"text": "cut')
        self.problems["a.jsonl"] = found | {(len(lines), "truncated")}
        (self.folder / "a.jsonl").write_bytes(b"\n".join(lines))

    def _in_a_cut_archive(self) -> None:
        texts = [corpora.text(1000 + number) for number in range(60)]
        packed = gzip.compress("".join(f"{self._record('', text)}\n" for text in texts).encode(), mtime=0)[:-600]
        whole = zlib.decompressobj(31).decompress(packed).count(b"\n")
        assert 0 < whole < len(texts)
        self.texts += texts[:whole]
        self.problems["b.jsonl.gz"] = {(whole + 1, "truncated")}
        (self.folder / "b.jsonl.gz").write_bytes(packed)

    def _in_other_encodings(self) -> None:
        texts = [corpora.text(2000 + number) for number in range(4)]
        lines = [self._record("ä", text).replace("\\u00e4", "ä") for text in texts]
        encoded = [line.encode("latin-1" if number == 2 else "utf-8") for number, line in enumerate(lines)]
        (self.folder / "c.jsonl").write_bytes(b"\n".join(encoded) + b"\n")
        self.texts += [text for number, text in enumerate(texts) if number != 2]
        (self.folder / "d.jsonl").write_text(lines[0], "utf-16")
        self.problems |= {"c.jsonl": {(3, "encoding")}, "d.jsonl": {(1, "encoding")}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Planted(tmp_path_factory.mktemp("planted") / "in")


def check_problems(corpus: Planted, out: pathlib.Path, printed: str) -> dict[str, int]:
    """Every problem is in the manifest and on the screen, with file and line; returns the counts."""
    manifest = json.loads((out / "manifest.json").read_text())
    found = {(pathlib.Path(one["path"]).name, one["line"], one["kind"]) for one in manifest["problems"]["first"]}
    expected = {(name, *problem) for name, problems in corpus.problems.items() for problem in problems}
    assert found == expected and manifest["problems"]["total"] == len(expected)
    assert all(f"{corpus.folder / name}:{line}: {kind}: " in printed for name, line, kind in expected)
    return manifest["counts"]


def test_planted_secrets_and_damage_in_logs(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("executions", corpus.folder, f"--out={out}", "--num_workers=0") == exits.EXIT_SKIPPED
    counts = check_problems(corpus, out, capsys.readouterr().err)
    assert counts["executions"] == counts["executions read"] == len(corpus.texts)
    written = b"\n".join(tree(out).values()).decode() + (out / "lineage.jsonl").read_text()
    assert len(corpus.secrets) > 90
    for kind, secret in corpus.secrets.items():
        for line in filter(None, secret.split("\n")):
            pieces = {line, *(line[at : at + 12] for at in range(0, len(line) - 12, 6) if "PRIVATE" not in line)}
            assert not [piece for piece in pieces if len(piece) > 5 and piece in written], kind
    assert sum(count for name, count in counts.items() if name.startswith("redacted ")) >= len(corpus.secrets)


def test_planted_duplicates_and_damage_in_a_corpus(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [corpus.folder, f"--out={out}", "--num_workers=0", "--gin.CorpusPreparation.length=256"]
    assert run("corpus", *arguments) == exits.EXIT_SKIPPED
    counts = check_problems(corpus, out, capsys.readouterr().err)
    unique = [*dict.fromkeys(corpus.texts)]
    assert counts["documents"] == len(corpus.texts) and counts["exact_duplicates"] == len(corpus.texts) - len(unique)
    assert counts["near_duplicates"] == corpus.near > 20
    kept = [*texts_of(out).values()]
    assert len(kept) == len(unique) - corpus.near and [text for text in unique if text in {*kept}] == kept
    assert len(rows_of(out)) == counts["rows"]
    assert run("corpus", *arguments, "--allow_skipped") == 0
    assert run("corpus", *arguments[1:], tmp_path / "missing") == 2


class Leaky:
    """Records that a split by chance, or by the names of sources alone, would leak, and an evaluation set that some have.

    Attributes:
      inputs: the files of the records; a record's name is FILE:LINE.
      quiz: the evaluation set.
      sources: records of one source, which stand in two files, or are linked by a record that names both sources.
      pairs: records of other sources than an earlier record that they share something with, by what they share.
      beside: a record of the same source as a copy of a text, by the name of the copy.
      contaminated: records that have a question of the evaluation set.
      good: all others, except copies of texts.
    """

    def __init__(self, folder: pathlib.Path):
        self._draw, self._number, self._folder = random.Random(5), 0, folder
        self._lines: dict[str, list[str]] = {f"{folder / name}.jsonl": [] for name in ("a", "b", "log")}
        self._a, self._b, self._log = self._lines
        self.inputs = [self._a, self._b, str(folder / "made" / "executions")]
        self.quiz = str(folder / "quiz.jsonl")
        self.sources: list[set[str]] = []
        self.pairs: dict[str, dict[str, str]] = {"text": {}, "piece": {}, "near": {}}
        self.beside: dict[str, str] = {}
        self.contaminated: set[str] = set()
        self.good: set[str] = set()
        self._share_sources()
        for number in range(8):
            self._share_texts(number)
            self._run(number)
        self._have_questions()
        for path, lines in self._lines.items():
            pathlib.Path(path).write_text("\n".join(lines))

    def _text(self, domain: str = "python") -> str:
        self._number += 1
        return data.FORMS[domain].format(self._number, data.prose(self._draw, 120))

    def _add(self, path: str, **record: object) -> str:
        self._lines[path].append(json.dumps(record))
        name = f"{path}:{len(self._lines[path])}".replace(self._log, f"{self.inputs[2]}/00000.jsonl")
        self.good.add(name)
        return name

    def _share_sources(self) -> None:
        for page in range(12):
            texts = [self._text(domain) for domain in self._draw.sample(data.DOMAINS, 3)]
            files = [self._a, self._b, self._draw.choice([self._a, self._b])]
            self.sources.append({self._add(file, text=text, source=f"page {page}") for file, text in zip(files, texts)})
        for one, other in ((1, 0), (3, 2)):
            bridge = self._add(self._b, text=self._text(), source=f"page {one}", task_id=f"page {other}")
            self.sources.append({bridge} | self.sources[one] | self.sources[other])

    def _share_texts(self, number: int) -> None:
        """A copy with other spaces and case, a conversation with the text, and a version with another word."""
        texts = {kind: self._text() for kind in self.pairs}
        first = {kind: self._add(self._a, text=text, source=f"{kind} {number}") for kind, text in texts.items()}
        shouted = texts["text"].replace(" ", "  ").upper()
        copy = self._add(self._b, text=shouted, source=f"copy {number}", domain="python")
        self.beside[copy] = self._add(self._b, text=self._text("sql"), source=f"copy {number}")
        asked = f"What does it do?\n\n```python\n{texts['piece']}```"
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It finds {number}."}]
        chat = self._add(self._b, messages=messages, source=f"chat {number}")
        words = texts["near"].split(" ")
        words[60] = "otherwise"
        near = self._add(self._b, text=" ".join(words), source=f"version {number}")
        for kind, later in {"text": copy, "piece": chat, "near": near}.items():
            self.pairs[kind][later] = first[kind]
        self.good.remove(copy)

    def _run(self, number: int) -> None:
        """A session that runs the code of a document."""
        text, about = self._text(), {"session": f"s{number}", "stdout": "None\n", "language": "python"}
        first = self._add(self._a, text=text, source=f"code {number}")
        ran = self._add(self._log, code=text, task=f"Find item {number}.", **about)
        self.pairs["piece"][ran] = first
        self.sources.append({ran, self._add(self._log, code=f"find = [1, {number}]\nprint(find[0])", **about)})

    def _have_questions(self) -> None:
        questions = [data.prose(self._draw, 16) for _ in range(4)]
        pathlib.Path(self.quiz).write_text("".join(f"{json.dumps({'question': one})}\n" for one in questions))
        messages = [{"role": "user", "content": questions[0]}, {"role": "assistant", "content": self._text()}]
        self.contaminated = {
            self._add(self._a, text=f"{self._text()}\n# {questions[1]}\n", source="page 5"),
            self._add(self._b, messages=messages, source="page 6"),
            self._add(self._log, code=f"# {questions[2].upper()}\nx = 1", session="s0", stdout="", language="python"),
        }
        self.good -= self.contaminated
        twelve_words = " ".join(questions[3].split()[:12])
        self._add(self._b, text=f"{self._text()}\n# {twelve_words}\n", source="page 7")

    def prepared(self, out: pathlib.Path, *flags: str) -> dict[str, str]:
        """The split of each record that a routing set has."""
        splits = ["--gin.Splits.train=0.4", "--gin.Splits.validation=0.3", "--gin.Splits.test=0.3"]
        splits += ["--gin.Balance.method='none'", "--gin.RoutingSet.min_examples=0", "--gin.EvaluationSet.name='quiz'"]
        splits += ["--gin.Decontamination.sets=(@EvaluationSet(),)", f"--gin.EvaluationSet.paths=('{self.quiz}',)"]
        command = ["routing", *self.inputs, f"--out={out}", "--num_workers=0", *splits, *flags]
        assert exits.run_verb(prepare.main, command) == 0
        return {f"{self._folder}/{one['record']}": one["split"] for one in data.examples(out)}


def test_planted_leaks_between_splits_and_from_an_evaluation_set(tmp_path, capsys):
    leaky = Leaky(tmp_path)
    assert run("executions", tmp_path / "log.jsonl", f"--out={tmp_path / 'made'}", "--num_workers=0") == 0
    split = leaky.prepared(tmp_path / "out")
    printed = capsys.readouterr().out
    assert split.keys() == leaky.good, "nothing else is lost"
    assert all(len({split[name] for name in source & split.keys()}) == 1 for source in leaky.sources)
    for later, first in (*leaky.pairs["piece"].items(), *leaky.pairs["near"].items()):
        assert split[later] == split[first]
    contaminated = data.read(tmp_path / "out", "contaminated.jsonl")
    assert {f"{one['path']}:{one['line']}" for one in contaminated} == leaky.contaminated
    assert len(contaminated) == 3 and {one["set"] for one in contaminated} == {"quiz"}
    assert re.search(r"contaminated by quiz +3\n", printed)
    assert re.search(r"repeated texts of other sources +8\n", printed)

    # What would have leaked: sources are as they were, but nothing links them.
    unlinked = leaky.prepared(tmp_path / "unlinked", "--gin.Splits.link_words=10000", "--gin.Splits.near=None")
    apart = {
        (later, first, kind)
        for kind, pairs in leaky.pairs.items()
        for later, first in pairs.items()
        if unlinked[leaky.beside.get(later, later)] != unlinked[first]
    }
    found = data.read(tmp_path / "out", "leaks.jsonl")
    reported = [(f"{one['path']}:{one['line']}", f"{one['of_path']}:{one['of_line']}", one["shared"]) for one in found]
    assert {*reported} == apart
    assert len(found) == len(apart) and {kind for _, _, kind in apart} == leaky.pairs.keys()
    assert re.search(rf"leaks prevented +{len(found)}\n", printed)
    # A split of the records by chance would have leaked of each kind.
    draw = random.Random(0)
    by_chance = {name: draw.choice("abc") for name in sorted(leaky.good | leaky.beside.keys())}
    for pairs in leaky.pairs.values():
        assert any(by_chance[later] != by_chance[first] for later, first in pairs.items())
    assert any(len({by_chance[name] for name in source & by_chance.keys()}) > 1 for source in leaky.sources)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Files that every word reads, a line of each corrupted."""
    folder = tmp_path_factory.mktemp("records") / "in"
    folder.mkdir()
    for name, first in (("a.jsonl", 0), ("b.jsonl", 40), ("c.jsonl", 80)):
        lines = [json.dumps(hostile_inputs.record(number)) for number in range(first, first + 40)]
        (folder / name).write_text("\n".join([*lines[:20], "{bad", *lines[20:]]) + "\n")
    return folder


_KILLED = """
import os, signal, sys
from capibara.cli import prepare

real, left = os.replace, int(sys.argv[1])

def replace(*arguments, **more):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **more)

os.replace = replace
sys.exit(prepare.main(sys.argv[2:]))
"""


_PARTS = {"corpus": ["--gin.CorpusPreparation.part_bytes=4096", "--gin.CorpusPreparation.shard_parts=2"]}


def command(word: str, folder: pathlib.Path, out: pathlib.Path, workers: int) -> list[str]:
    more = [*hostile_inputs.WORDS[word][1:], *_PARTS.get(word, [])]
    return [word, str(folder), f"--out={out}", f"--num_workers={workers}", *more]


@pytest.mark.parametrize(
    "word, files",
    [
        *((word, (5,)) for word in hostile_inputs.WORDS),
        *(pytest.param(word, (0, 1, 2, 3, 7, 10, 14, 30), marks=pytest.mark.heavy) for word in hostile_inputs.WORDS),
    ],
)
def test_a_killed_word_writes_the_same_bytes_when_it_is_run_again(records, tmp_path, word, files):
    """It is killed when it has written so many files."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for count in files:
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, str(count), *command(word, records, tmp_path / "killed", 0)],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode in (-signal.SIGKILL, exits.EXIT_SKIPPED), done.stderr
        assert done.returncode == -signal.SIGKILL or count != files[0]  # a later one may have had fewer to write
    for out in ("killed", "whole"):
        assert prepare.main(command(word, records, tmp_path / out, 0)) == exits.EXIT_SKIPPED
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


@pytest.mark.heavy
@pytest.mark.parametrize("word", hostile_inputs.WORDS)
def test_words_with_workers_that_are_killed_at_any_time(records, tmp_path, word):
    assert prepare.main(command(word, records, tmp_path / "whole", 2)) == exits.EXIT_SKIPPED
    for delay_s in (0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.6):
        arguments = command(word, records, tmp_path / "killed", 2)
        process = subprocess.Popen(
            [sys.executable, "-m", "capibara.prepare", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(delay_s)
        process.kill()
        process.wait()
        end_s = time.monotonic() + 30
        while (code := prepare_quietly(arguments)) == 2 and time.monotonic() < end_s:
            time.sleep(0.1)  # workers of the killed one hold the folder for a moment
        assert code == exits.EXIT_SKIPPED and tree(tmp_path / "killed") == tree(tmp_path / "whole")
        for path in sorted((tmp_path / "killed").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()


def prepare_quietly(arguments: list[str]) -> int:
    return exits.run_verb(prepare.main, arguments)


@pytest.mark.fault(61, 63)
@pytest.mark.parametrize(
    "only", [None, *(pytest.param(word, marks=pytest.mark.heavy) for word in hostile_inputs.WORDS)]
)
def test_hostile_inputs_lose_no_good_record(tmp_path, only):
    """The small ones, each by another word, or all by one; tests/faults/hostile.py measures time and memory, too."""
    words = [*hostile_inputs.WORDS] if only is None else [only]
    for number, one in enumerate(hostile_inputs.make(tmp_path / "in", large=False)):
        word, out = words[number % len(words)], tmp_path / one.name
        code = exits.run_verb(prepare.main, hostile_inputs.runs(one.path, out)[f"prepare {word}"][1:])
        assert code in ((0, 2, 3) if one.harmless else (2, 3)), one
        assert not one.good or not hostile_inputs.lost(f"prepare {word}", out, one.good), one
