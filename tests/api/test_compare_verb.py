"""`capibara compare`: two models, one file of prompts, one page and the figures."""

from __future__ import annotations

import json

import pytest

from capibara import config
from capibara.cli import compare
from capibara.cli.arguments import comparing
from capibara.multihost import exits


def run(*argv) -> int:
    config.reset()
    return exits.run_verb(compare.main, [*argv])


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(4)))
    return str(path)


def test_a_page_and_figures_say_which_is_better(folder, questions, tmp_path, capfd):
    page = tmp_path / "page.html"
    asked = [f"{folder}/hf", f"{folder}/m.gguf", f"--prompts={questions}", f"--out={page}", "--max_new_tokens=4"]
    assert run(*asked, "--score=token_f1", "--json") == 0
    figures = json.loads(capfd.readouterr().out)
    # The same weights in two formats: equal answers.
    assert figures["difference"] == 0 and figures["p_value"] == 1 and figures["interval_95"] == [0, 0]
    assert figures["prompts"] == 4 and figures["models"] == [f"{folder}/hf", f"{folder}/m.gguf"]
    assert page.read_text().count("<tr>") == 5 and "3 + 1?" in page.read_text()
    assert run(*asked) == 0
    out = capfd.readouterr().out
    assert "4 prompts, 4 equal answers" in out and f"{page}: the answers side by side" in out


def test_it_stops_early_and_says_what_was_saved(folder, tmp_path, capfd):
    """The same weights: surely no difference of 0.5 after some prompts of many."""
    path, page = tmp_path / "questions.jsonl", tmp_path / "page.html"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(64)))
    asked = [f"{folder}/hf", f"{folder}/m.gguf", f"--prompts={path}", f"--out={page}", "--max_new_tokens=1"]
    assert run(*asked, "--score=exact_match", "--stop_early", "--negligible=0.5", "--json") == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["reason"] == "negligible" and figures["asked"] < 64 == figures["prompts"]
    assert figures["answers_saved"] == 2 * (64 - figures["asked"]) and figures["bound"]["high"] < 0.5
    assert f"stopped after {figures['asked']} of 64 prompts" in page.read_text()
    assert page.read_text().count("<tr>") == 1 + figures["asked"]


@pytest.mark.parametrize(
    "text, name, flags, message",
    [
        ("", "p.txt", [], "p.txt has no prompt: write one a line"),
        ("{", "p.jsonl", [], "p.jsonl:1 cannot be read"),
        ('{"prompt": 5}', "p.jsonl", [], "p.jsonl:1 must be an object with prompt, texts that are not empty"),
        ('{"prompt": "a"}', "p.jsonl", ["--score=exact_match"], "p.jsonl:1 must be an object with prompt and answer"),
        ("a\n", "p.txt", ["--score=bleu"], "invalid choice: 'bleu'"),
        ("a\n", "p.txt", ["--temperature=-1"], "Sampling.temperature is -1.0"),
        ("a\n", "p.txt", ["--stop_early"], "--stop_early needs --score: add --score=exact_match"),
        ("a\n", "p.txt", ["--alpha=0.1"], "--alpha=0.1 is for --stop_early: add that"),
        ("a\n", "p.txt", ["--negligible=0.1"], "--negligible=0.1 is for --stop_early: add that"),
        ("a\n", "p.txt", ["--stop_early", "--score=token_f1", "--alpha=2"], "SequentialStopping.alpha is 2.0"),
    ],
    ids=range(10),
)
def test_a_mistake_is_one_line(folder, tmp_path, capfd, text, name, flags, message):
    (tmp_path / name).write_text(text)
    assert run(f"{folder}/hf", f"{folder}/hf", f"--prompts={tmp_path / name}", *flags) == 2
    out, err = capfd.readouterr()
    assert out == "" and message in err.splitlines()[-1], err


def test_prompts_that_are_not_there_are_named(folder, tmp_path, capfd):
    assert run(f"{folder}/hf", f"{folder}/hf", f"--prompts={tmp_path}/none.txt") == 2
    assert f"--prompts={tmp_path}/none.txt does not exist: name a file of prompts" in capfd.readouterr().err


def test_a_line_ends_with_a_line_feed_alone(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\u2028still one\r\ntwo\n".encode())
    assert comparing.read(str(path), needs_answers=False)[0] == ["one\u2028still one", "two"]
