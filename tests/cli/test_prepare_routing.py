"""`capibara prepare routing`: flags, settings from Gin, what it prints, and its exit codes."""

from __future__ import annotations

import json
import re

import pytest

from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import JsonlSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.multihost.exits import EXIT_SKIPPED, EXIT_USER_ERROR, run_verb
from capibara.prepare import main
from tests.builders.routing import data

for _package in ("tree_sitter_sql", "rensa", "detect_secrets", "pyarrow", "openlineage.client"):
    pytest.importorskip(_package)


def run(*arguments):
    return run_verb(main, ["routing", "--num_workers=0", *map(str, arguments)])


@pytest.fixture
def path(tmp_path):
    return data.write(tmp_path / "in" / "docs.jsonl", data.documents(40, of_source=1))


def test_a_folder_becomes_a_routing_set_that_a_run_reads(path, tmp_path, capfd):
    out = tmp_path / "out"
    assert run(tmp_path / "in", f"--out={out}") == 0
    printed = capfd.readouterr().out
    assert re.search(r"labelled +240\n", printed) and re.search(r"train sql +\d+\n", printed)
    assert run(tmp_path / "in", f"--out={out}") == 0  # there is nothing to do
    assert capfd.readouterr().out == printed
    source = JsonlSource(files=(f"{out}/train.jsonl",), validation_files=(f"{out}/validation.jsonl",))
    dataset = Dataset(source=source, vocabulary=ByteVocabulary(), length=256, domains=data.DOMAINS)
    batch = next(make_loader(dataset, batch_size=32))
    assert {*batch["domains"].ravel().tolist()} == {*range(7)}


def test_settings_come_from_gin(path, tmp_path, capfd):
    (tmp_path / "set.gin").write_text(
        """
        RoutingSet.domains = ("python", "sql", @query/Domain())
        query/Domain.name = "query"
        query/Domain.imports = ("requests",)
        RoutingSet.balance = @Balance()
        Balance.method = "oversample"
        Decontamination.sets = (@quiz/EvaluationSet(),)
        quiz/EvaluationSet.name = "quiz"
        quiz/EvaluationSet.paths = (%QUIZ,)
        """
    )
    quiz = data.write(tmp_path / "quiz.jsonl", data.documents(2))
    flags = (f"--gin_file={tmp_path / 'set.gin'}", f"--gin.QUIZ='{quiz}'", "--gin.Splits.train=0.8", "--json")
    flags += ("--gin.Splits.validation=0.1", "--gin.Splits.test=0.1", "--gin.Splits.near=None")
    assert run(path, f"--out={tmp_path / 'out'}", *flags) == 0
    manifest = json.loads(capfd.readouterr().out)
    config, counts = manifest["config"], manifest["counts"]
    assert [one["name"] for one in config["domains"]] == ["python", "sql", "query"]
    assert (config["splits"]["train"], config["splits"]["near"], config["balance"]["method"]) == (
        0.8,
        None,
        "oversample",
    )
    assert counts["contaminated by quiz"] == 12 and counts["train query"] and "train api" not in counts
    assert config["decontamination"]["sets"][0].keys() == {"name", "files", "fields"}


def test_skipped_input_has_an_exit_code_of_its_own(path, tmp_path, capfd):
    with open(path, "a") as file:
        file.write('{"title": "x"}\n')
    assert run(path, f"--out={tmp_path / 'out'}") == EXIT_SKIPPED
    assert f"{path}:241: malformed: has title, must have text" in capfd.readouterr().err
    assert run(path, f"--out={tmp_path / 'out'}", "--allow_skipped") == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gin.Splits.train=0.5"], "Splits.train, validation and test (0.5, 0.05, 0.05)"),
        (["--gin.RoutingSet.domains=('python','pyton')"], "did you mean python?"),
        (["--gin.RoutingSet.domains=('debug','ml','api')", "--gin.RoutingSet.min_examples=99"], "domain 'debug' has"),
        (["--gin.Decontamination.sets=(@EvaluationSet(),)", "--gin.EvaluationSet.name='mmlu'"], "paths of 'mmlu'"),
        (["--gin.Balance.methd='cap'"], "methd"),
        (["--gin.Balance.method='caps'"], "caps"),
    ],
)
def test_mistakes_are_one_line(path, tmp_path, capfd, flags, words):
    assert run(path, f"--out={tmp_path / 'out'}", *flags) == EXIT_USER_ERROR
    error = capfd.readouterr().err
    assert (
        words in error and [line[:7] for line in error.splitlines()][-1:] == ["error: "] and error.count("error: ") == 1
    )
