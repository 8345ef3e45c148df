"""`capibara prepare corpus`: flags, settings from Gin, what it prints, and its exit codes."""

import json
import re

import pytest

from capibara.multihost.exits import EXIT_SKIPPED, EXIT_USER_ERROR, run_verb
from capibara.prepare import main
from tests.builders.preparation import corpora


@pytest.fixture
def corpus(tmp_path):
    return corpora.write_lines(tmp_path / "in.jsonl", [corpora.text(0), corpora.text(0), corpora.text(1)])


def run(*arguments):
    return run_verb(main, ["corpus", *map(str, arguments), "--num_workers=0"])


def test_settings_come_from_gin(corpus, tmp_path, capfd):
    (tmp_path / "corpus.gin").write_text(
        "CorpusPreparation.filters = (@DatatroveFilter(),)\n"
        'DatatroveFilter.name = "RegexFilter"\n'
        f'DatatroveFilter.options = {{"regex_exp": "{corpora.text(1)[:20]}"}}\n'
    )
    flags = (f"--gin_file={tmp_path / 'corpus.gin'}", "--gin.CorpusPreparation.length=64", "--json")
    assert run(corpus, f"--out={tmp_path / 'out'}", *flags) == 0
    manifest = json.loads(capfd.readouterr().out)
    assert manifest["config"]["length"] == 64 and manifest["kind"] == "corpus"
    counts = {name: manifest["counts"][name] for name in ("documents", "exact_duplicates", "filtered", "kept")}
    assert counts == {"documents": 3, "exact_duplicates": 1, "filtered": 1, "kept": 1}


def test_skipped_input_has_an_exit_code_of_its_own(corpus, tmp_path, capfd):
    corpus.write_text(corpus.read_text() + "{bad\n")
    assert run(corpus, f"--out={tmp_path / 'out'}") == EXIT_SKIPPED
    printed = capfd.readouterr()
    assert f"{corpus}:4: malformed" in printed.err and re.search(r"\bkept +2$", printed.out, re.MULTILINE)
    assert run(corpus, f"--out={tmp_path / 'out'}", "--allow_skipped") == 0


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num_workers=-1"], "--num_workers (-1) must be at least 0"),
        (["--beam_options=--x"], "--beam_options needs --runner"),
        (
            ["--gin.NearDuplicates.bands=0", "--gin.CorpusPreparation.near=@NearDuplicates()"],
            "NearDuplicates.bands (0)",
        ),
        (["--gin.CorpusPreparation.lenght=3"], "lenght"),
    ],
)
def test_mistakes_are_one_line(corpus, tmp_path, capfd, flags, words):
    code = run_verb(main, ["corpus", str(corpus), f"--out={tmp_path / 'out'}", *flags])
    error = capfd.readouterr().err
    assert (
        code == EXIT_USER_ERROR
        and words in error
        and [line[:7] for line in error.splitlines()][-1:] == ["error: "]
        and error.count("error: ") == 1
    )


def test_a_missing_file_is_one_line(tmp_path, capfd):
    assert run(tmp_path / "no.jsonl", f"--out={tmp_path / 'out'}") == EXIT_USER_ERROR
    assert "matches no file" in capfd.readouterr().err
