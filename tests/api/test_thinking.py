"""Thinking strategies by `infer`, `evaluate` and Python: the same answers, their cost, and what is refused by name."""

from __future__ import annotations

import json
import os
import re

import pytest

import capibara as cb
from capibara import config
from capibara.cli import evaluate, infer, serve
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.multihost import exits

from .conftest import save_reward

DRAWN = dict(max_new_tokens=3, temperature=1.5)


def run(verb, *argv) -> int:
    config.reset()
    return exits.run_verb(verb.main, [*argv])


@pytest.fixture(scope="module")
def model(folder):
    return cb.load(f"{folder}/hf")


@pytest.fixture(scope="module")
def reward(folder, tmp_path_factory):
    return save_reward(folder, tmp_path_factory.mktemp("reward"))


def test_python_votes_rates_and_asks_again(model, reward):
    samples = [model.generate("ab", **DRAWN, seed=seed) for seed in range(4)]
    assert len(set(samples)) > 1
    answer = model.think("ab", cb.SelfConsistency(samples=4), **DRAWN)
    assert answer.text in samples and answer.texts == 4 and answer.tokens == 12
    assert sum(answer.about["answers"].values()) <= 4 and answer.about["votes"] >= 1
    assert model.generate("ab", thinking=cb.SelfConsistency(samples=4), **DRAWN) == answer.text
    best = model.think("ab", cb.BestOfN(reward=reward, samples=4), **DRAWN)
    scorer, template = cb.load(reward), model._chat.template
    scores = []
    for text in samples:
        turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": text.strip()}]
        rendered = template.render(Conversation(turns), "x").text
        scores.append(float(scorer.logits(scorer.tokenizer.encode_rendered(rendered)[0])[-1, 0]))
    assert best.about["rewards"] == pytest.approx(scores, rel=1e-4, abs=1e-5)
    assert scorer.scores("ab", samples) == pytest.approx(best.about["rewards"], rel=1e-4, abs=1e-5)
    assert best.text == samples[scores.index(max(scores))] and min(scores) < max(scores)
    texts = model.generate(["ab", "ba"], thinking=cb.Rounds(rounds=2, again="{prompt}|{answer}"), **DRAWN)
    first = [model.generate(text, **DRAWN) for text in ("ab", "ba")]
    assert texts == [model.generate(f"{a}|{b.strip()}", **DRAWN) for a, b in zip(("ab", "ba"), first)]


def test_a_chat_asks_its_last_turn_again(model, reward):
    before = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    ask = lambda text: model.generate([*before, {"role": "user", "content": text}], **DRAWN)  # noqa: E731
    rounds = cb.Rounds(rounds=2, again="{answer} {prompt}")
    found = model.generate([*before, {"role": "user", "content": "ab"}], thinking=rounds, **DRAWN)
    assert found == ask(f"{ask('ab').strip()} ab")
    assert model.chat("ab", thinking=cb.BestOfN(reward=reward, samples=2), **DRAWN) in [
        model.chat("ab", **DRAWN, seed=seed) for seed in (0, 1)
    ]


def test_mistakes_in_python_are_named(model, folder, reward, tmp_path):
    for call, message in (
        (lambda: model.think("a", "vote"), "the strategy is 'vote', must be one such as cb.SelfConsistency"),
        (
            lambda: model.generate("a", thinking=cb.Rounds(), stream=True),
            "stream and thinking=Rounds.* do not go together",
        ),
        (lambda: model.think("a", cb.SelfConsistency(), temperature=0.0), "Sampling.temperature is 0"),
        (
            lambda: model.think([{"role": "assistant", "content": "a"}], cb.Rounds()),
            "the last message is .* a user's text",
        ),
        (lambda: model.think("a", cb.BestOfN(reward=f"{folder}/hf")), "hf is no reward model \\(its head is 'tied'\\)"),
        (lambda: model.think("a", cb.BestOfN(reward=f"{tmp_path}/no")), "no"),
        (lambda: model.scores("a", ["b"]), "is no reward model \\(its head is 'tied'\\)"),
        (lambda: cb.load(reward).scores("a", "b"), "the answers are 'b', must be a list of texts"),
        (lambda: cb.load(reward).scores(["a", "b"], ["c"]), "must be a text or messages: score the answers to each"),
        (lambda: cb.load(reward).score("a"), r"is a reward model, and score is of language models: use scores"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_reward_model_that_has_diverged_is_named(model, folder, tmp_path):
    diverged = save_reward(folder, tmp_path, largest=3e38)
    with pytest.raises(UserError, match="answers to prompt 1: .* scores an answer as nan or infinity: name a reward"):
        model.think("ab", cb.BestOfN(reward=diverged, samples=2), **DRAWN)


def test_infer_answers_a_prompt_and_a_file(folder, model, tmp_path, capfd):
    flags = ["--gin.Thinking.strategy=@SelfConsistency()", "--gin.SelfConsistency.samples=3"]
    flags += ["--gin.Sampling.max_new_tokens=3", "--gin.Sampling.temperature=1.5", f"--model={folder}/hf"]
    assert run(infer, *flags, "--prompt=ab") == 0
    out, err = capfd.readouterr()
    want = model.think("ab", cb.SelfConsistency(samples=3), **DRAWN)
    assert out == f"ab{want.text}\n" and "3 texts, 9 tokens: {" in err and '"tie": ' in err
    (tmp_path / "in.txt").write_text("ab\nba\nab\n")
    files = [f"--prompts={tmp_path}/in.txt", f"--out={tmp_path}/out.jsonl"]
    assert run(infer, *flags, *files) == 0
    content = (tmp_path / "out.jsonl").read_text()
    lines = [json.loads(line) for line in content.splitlines()]
    assert lines[0]["text"] == want.text and lines[0]["texts"] == 3 and lines[0]["thinking"] == want.about
    assert lines[0]["made_by"]["thinking"] == {"strategy": "SelfConsistency", "samples": 3, "pattern": None}
    with open(tmp_path / "out.jsonl", "w") as file:
        file.write(content[: content.index("\n") + 10])
    assert run(infer, *flags, *files) == 0
    assert (tmp_path / "out.jsonl").read_text() == content, "an interrupted file is resumed with the same texts"
    assert run(infer, *flags, "--gin.SelfConsistency.samples=4", *files) == 2
    assert "has another made_by" in capfd.readouterr().err


@pytest.mark.parametrize(
    "verb, flags, message",
    [
        (infer, ["--benchmark"], "Thinking.strategy is @Rounds(), and --benchmark has none: leave it out"),
        (infer, ["--prompt=a", "--gin.Sampling.num_decodes=2"], "Sampling.num_decodes is 2, and Rounds chooses among"),
        (infer, ["--prompt=a", "--gin.Rounds.rounds=0"], "Rounds.rounds is 0, must be from 1 to 64"),
        (serve, ["--port=0"], "Thinking.strategy"),
    ],
    ids=["benchmark", "num_decodes", "rounds", "serve"],
)
def test_a_mistake_is_one_line(folder, capfd, verb, flags, message):
    assert run(verb, f"--model={folder}/hf", "--gin.Thinking.strategy=@Rounds()", *flags) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]


def test_evaluate_scores_the_chosen_answers_and_says_what_they_cost(folder, reward, tmp_path, capfd):
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps({"prompt": p, "target": "x"}) + "\n" for p in ("ab", "ba")))
    (tmp_path / "qa.gin").write_text(
        f'qa/EvalTask.files = ("{tmp_path}/qa.jsonl",)\nqa/EvalTask.metrics = (@exact_match,)\n'
        "qa/EvalTask.sampling = @Sampling()\nqa/Sampling.max_new_tokens = 3\nqa/Sampling.temperature = 1.5\n"
        f'qa/EvalTask.thinking = @BestOfN()\nqa/BestOfN.reward = "{reward}"\nqa/BestOfN.samples = 3\n'
    )
    flags = [f"--model={folder}/hf", f"--gin_file={tmp_path}/qa.gin", f"--predictions={tmp_path}/said.jsonl"]
    assert run(evaluate, *flags, f"--out={tmp_path}/one.json") == 0
    result = json.loads((tmp_path / "one.json").read_text())["tasks"]["qa"]
    assert result["thinking"] == {
        "strategy": "BestOfN", "reward": reward, "samples": 3, "steps": "product", "mean_texts": 3.0, "mean_tokens": 9.0
    }  # fmt: skip
    content = (tmp_path / "said.jsonl").read_text()
    lines = [json.loads(line) for line in content.splitlines()[1:]]
    assert [line.get("sample") for line in lines] == [0, 1, 2, 0, 1, 2, None, None]
    for i, line in enumerate(lines[6:]):
        best = max(range(3), key=line["rewards"].__getitem__)
        assert line["prediction"] == lines[3 * i + best]["prediction"]
    os.truncate(tmp_path / "said.jsonl", len(content) // 2)
    assert run(evaluate, *flags, f"--out={tmp_path}/two.json") == 0
    assert (tmp_path / "said.jsonl").read_text() == content, "an interrupted evaluation is resumed with the same texts"
    assert run(evaluate, *flags, "--gin.BestOfN.steps='min'") == 2
    assert "is of another request than now" in capfd.readouterr().err
    task = cb.EvalTask(
        files=(str(tmp_path / "qa.jsonl"),), metrics=(cb.exact_match,), sampling=cb.Sampling(**DRAWN),
        thinking=cb.SelfConsistency(samples=2),
    )  # fmt: skip
    by_vote = cb.evaluate(f"{folder}/hf", {"qa": task})["tasks"]["qa"]["thinking"]
    assert by_vote["mean_texts"] == 2 and by_vote["ties"] in (0, 1, 2)


def test_a_prompt_of_a_file_that_does_not_fit_is_named(folder, tmp_path, capfd):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "temperature": 0}\n')
    flags = [
        "--gin.Thinking.strategy=@SelfConsistency()",
        f"--prompts={tmp_path}/in.jsonl",
        f"--out={tmp_path}/o.jsonl",
    ]
    assert run(infer, f"--model={folder}/hf", *flags) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.search(r"in.jsonl:2: Sampling.temperature is 0, and SelfConsistency needs texts that differ", last)
