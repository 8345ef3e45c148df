"""lm-eval's own evaluator on a model of ours, with YAML tasks from a folder."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from lm_eval.api.instance import Instance

from capibara import config
from capibara.core.types import UserError
from capibara.evaluation import harness
from capibara.evaluation.harness import CapibaraLM, Harness
from capibara.inference.sampling.sampling import Sampling

CHOICES = """
task: mc
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}="
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATED = """
task: gen
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}="
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 6}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def lm(subject):
    return CapibaraLM(subject)


def asked(kind, *args):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(args)]


def log_softmax(subject, text):
    """Of each byte of a text after those before it, the beginning token before all, by the model itself."""
    ids = [0, *subject.vocabulary.encode(text)]
    row = {name: np.zeros((1, 64), np.int32) for name in ("tokens", "segment_ids", "positions")}
    for name, values in {"tokens": ids, "segment_ids": [1] * len(ids), "positions": range(len(ids))}.items():
        row[name][0, : len(ids)] = values
    logits = jax.jit(subject.model.logits)(jax.device_put(subject.params, jax.devices()[0]), row)
    found = np.asarray(jax.nn.log_softmax(logits[0, : len(ids) - 1]), np.float64)
    return found[np.arange(len(ids) - 1), ids[1:]]


def test_loglikelihood_is_the_sum_of_log_softmax(lm, subject):
    requests = [("def f", "(x):"), ("", "abc"), ("a longer text", " and more"), ("x ", "y")]
    found = lm.loglikelihood(asked("loglikelihood", *requests), disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(requests, found):
        split = len(context.rstrip())
        want = log_softmax(subject, context + continuation)[split:].sum()
        assert value == pytest.approx(want, rel=1e-5) and isinstance(greedy, bool)


def test_rolling_takes_every_token_once(lm, subject):
    short, long = "def f(x):", "ab" * 60  # rows have 64 positions
    found = lm.loglikelihood_rolling(asked("loglikelihood_rolling", (short,), (long,)), disable_tqdm=True)
    assert found[0] == pytest.approx(log_softmax(subject, short).sum(), rel=1e-5)
    assert found[1] < found[0] and len(found) == 2


def test_texts_are_those_of_the_engine(lm, subject):
    kwargs = {"until": ["zz"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.7}
    greedy = lm.generate_until(asked("generate_until", ("def f", kwargs), ("class", kwargs)), disable_tqdm=True)
    sampling = Sampling(temperature=0.0, max_new_tokens=6)
    assert greedy == [subject.engine.submit(prompt, sampling).result().text for prompt in ("def f", "class")]
    first = greedy[0][:2]
    assert lm.generate_until(asked("generate_until", ("def f", kwargs | {"until": first[1]})))[0] == first[:1]
    drawn = lm._sampling({"do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (drawn.temperature, drawn.top_p, drawn.max_new_tokens) == (0.7, 0.9, 32)  # half a row


def test_what_is_asked_again_is_drawn_again(lm):
    kwargs = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    requests = asked("generate_until", *[("def f", kwargs)] * 3)
    texts = lm.generate_until(requests, disable_tqdm=True)
    assert len(set(texts)) == 3 and lm.generate_until(requests, disable_tqdm=True) == texts


def test_no_prompt_is_cut_to_a_single_token_unsaid(lm, subject, monkeypatch):
    given, submit = [], subject.engine.submit
    monkeypatch.setattr(subject.engine, "submit", lambda ids, *a, **k: (given.append(ids), submit(ids, *a, **k))[1])
    lm.generate_until(asked("generate_until", ("0123456789" * 2, {"until": ["\n"]})), disable_tqdm=True)
    assert len(given[0]) == 21
    with pytest.raises(UserError, match=r"max_gen_toks is 64, but prompt and answer must fit Dataset.length \(64\)"):
        lm.generate_until(asked("generate_until", ("a", {"max_gen_toks": 64})))


def test_the_harness_runs_local_tasks(subject, lm, tmp_path):
    texts = lm.generate_until(asked("generate_until", *[(f"{q}=", {"max_gen_toks": 6}) for q in "ab"]))
    lines = []
    for q, text in zip("ab", texts):
        choices = ["one", "two", "three"]
        scores = [log_softmax(subject, f"{q}={choice}")[2:].sum() for choice in choices]
        lines.append({"q": q, "choices": choices, "answer": int(np.argmax(scores)), "text": text})
    lines[1]["text"] += "!"
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, yaml in (("mc", CHOICES), ("gen", GENERATED)):
        (tmp_path / f"{name}.yaml").write_text(yaml.format(path=tmp_path / "data.jsonl"))
    config.parse([], ["Harness.num_fewshot = 0"])
    found = harness.evaluate(subject, ["mc", "gen"], str(tmp_path))
    assert found["results"]["mc"]["acc,none"] == 1.0 and found["results"]["gen"]["exact_match,none"] == 0.5
    assert found["capibara"]["weights"] == "raw" and found["n-samples"]["mc"]["effective"] == 2
    assert any("exact_match" in line for line in harness.table(found))
    assert harness.evaluate(subject, ["mc"], str(tmp_path), limit=1)["n-samples"]["mc"]["effective"] == 1


def test_what_cannot_be_asked_names_its_document(subject, tmp_path, monkeypatch, caplog):
    lines = [{"q": "a", "choices": ["x", "y"], "answer": 0, "text": "x"} for _ in range(3)]

    def run(name, yaml):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / f"{name}.yaml").write_text(yaml.format(path=tmp_path / "data.jsonl"))
        config.reset()
        config.parse([], ["Harness.num_fewshot = 0"])
        return harness.evaluate(subject, [name], str(tmp_path))

    scored = []
    monkeypatch.setattr(type(subject.scorer), "__call__", lambda *_: scored.append(1))
    lines[2]["choices"] = ["x", "y" * 65]
    with pytest.raises(
        UserError, match="^--harness=mc, document 2: a continuation has 65 tokens, must fit Dataset.length .64.: raise"
    ):
        run("mc", CHOICES)
    lines[2]["choices"], lines[1]["choices"] = ["x", "y"], ["", "y"]
    with pytest.raises(UserError, match="^--harness=mc, document 1: its continuation is empty, must have"):
        run("mc", CHOICES)
    assert not scored  # said before any is looked at
    with pytest.raises(
        UserError,
        match=r"^--harness=gen, document 0: its max_gen_toks is 64, but prompt and answer must fit Dataset.length .64.",
    ):
        run("gen", GENERATED.replace("max_gen_toks: 6", "max_gen_toks: 64"))
    monkeypatch.undo()
    lines[1]["q"] = "long " * 20
    with caplog.at_level("WARNING", logger="capibara"):
        run("gen", GENERATED)
    told = [record.getMessage() for record in caplog.records if "cut" in record.getMessage()]
    assert told == [
        "1 of 3 prompts were cut because they do not fit a row; the first is --harness=gen, document 1: raise "
        "Dataset.length"
    ]


def test_mistakes(subject, tmp_path):
    with pytest.raises(UserError, match="name a folder of YAML tasks"):
        harness.evaluate(subject, ["mc"], str(tmp_path / "none"))
    (tmp_path / "mc.yaml").write_text(CHOICES.format(path=tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="--harness=mc: its data is not available"):
        harness.evaluate(subject, ["mc"], str(tmp_path))
    with pytest.raises(UserError, match=r"\(or Harness.chat\) needs a tokenizer"):
        config.parse([], ["Harness.chat = True"])
        harness.evaluate(subject, ["mc"], str(tmp_path))


def test_begin_tokens(subject):
    chat = CapibaraLM(subject, Harness(chat=True))
    assert chat.tok_encode("a") == [100] and chat.tok_encode("a", add_special_tokens=True) == [0, 100]
    with_begin = CapibaraLM(subject)
    assert with_begin.tok_encode("a") == [0, 100] and with_begin.tok_encode("a", add_special_tokens=False) == [100]
