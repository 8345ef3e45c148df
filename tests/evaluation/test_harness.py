"""lm-eval's own evaluator on a model of ours, with YAML tasks from a folder."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import pathlib
import types

import jax
import numpy as np
import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs

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


PEER = [  # what generation_kwargs may have, in lm-eval's tasks or for its models
    {"do_sample": (None, True, False, "absent")},
    {"temperature": (0, 0.0, 0.2, 1, 1.5, "0.7", "absent")},
    {"max_gen_toks": (None, 7, "absent"), "max_new_tokens": (9, "absent")},
    {"max_tokens": (11, "absent"), "max_completion_tokens": (13, "absent")},
    {"until": (None, "x", ["x", "", "yy"], [], "absent")},
]


def test_generation_kwargs_mean_what_the_harness_says():
    """Against lm-eval's own `normalize_gen_kwargs`; what a model does with its result is that of `HFLM._model_generate`."""
    spaces = {name: values for part in PEER for name, values in part.items()}
    count = 0
    for values in itertools.product(*spaces.values()):
        kwargs = {name: value for name, value in zip(spaces, values) if value != "absent"}
        want = normalize_gen_kwargs(kwargs, 5)
        temperature = float(want.get("temperature", 0.0))
        count += 1
        if want["do_sample"] and temperature == 0:  # transformers raises, too
            with pytest.raises(UserError, match="its do_sample is true, but its temperature is 0 or missing"):
                harness.sampling_of(kwargs, 5)
            continue
        found = harness.sampling_of(kwargs, 5, seed=3)
        assert found.temperature == (temperature if want["do_sample"] else 0), kwargs
        assert (found.max_new_tokens, found.seed) == (want["max_gen_toks"], 3), kwargs
        assert list(found.stop) == [part for part in want["until"] if part], kwargs
    assert count == 4 * 7 * 3 * 2 * 2 * 2 * 5


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"top_k": 40, "top_p": 0.9, "min_p": 0.05}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}),
        ({"top_k": 0}, {}),
        ({"top_k": -1}, {}),
        ({"top_k": None, "top_p": None, "num_beams": None}, {}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "length_penalty": 2.0}, {}),
    ],
)
def test_other_options_are_those_of_sampling(options, fields):
    drawn = harness.sampling_of({"temperature": 0.5, "max_gen_toks": 3} | options, 5)
    assert drawn == Sampling(temperature=0.5, max_new_tokens=3, **fields)
    greedy = harness.sampling_of({"max_gen_toks": 3} | options, 5)  # transformers draws nothing, but penalises
    penalty = fields.get("repetition_penalty", 1.0)
    assert greedy == Sampling(temperature=0.0, max_new_tokens=3, repetition_penalty=penalty)


# Of transformers 5.24's GenerationConfig, with a value that changes the text; the rest has none.
CHANGING = {
    "num_beams": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 3, "min_length": 5, "min_new_tokens": 5,
    "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.4, "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2, "max_length": 30, "max_time": 1.0, "stop_strings": ["x"], "bad_words_ids": [[5]],
    "forced_bos_token_id": 4, "forced_eos_token_id": 4, "exponential_decay_length_penalty": [5, 1.1],
    "suppress_tokens": [4], "begin_suppress_tokens": [4], "sequence_bias": [[[5], 2.0]], "guidance_scale": 1.5,
    "watermarking_config": {}, "penalty_alpha": 0.6, "diversity_penalty": 0.5, "num_beam_groups": 2,
    "force_words_ids": [[5]], "constraints": [5], "dola_layers": "low", "eos_token_id": 4, "bos_token_id": 4,
    "decoder_start_token_id": 4, "renormalize_logits": True, "remove_invalid_values": True,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1.0}, "seed": 7, "n": 2, "best_of": 2,
    "stop": ["x"], "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True, "guided_choice": ["a"],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_what_would_be_dropped_is_refused_by_name(name, temperature):
    with pytest.raises(UserError, match=f"^its {name} "):
        harness.sampling_of({"temperature": temperature, name: CHANGING[name]}, 5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": None}, "its generation_kwargs .* a limit or a temperature that is no number"),
        ({"temperature": "hot"}, "its generation_kwargs .* no number"),
        ({"max_gen_toks": "many"}, "its generation_kwargs .* no number"),
        ({"do_sample": "false", "temperature": 1}, "its do_sample is 'false', must be true or false"),
        ({"max_completion_tokens": 0}, "its max_completion_tokens is 0, must be at least 1"),
        ({"temperature": 1, "top_p": 0}, "its top_p is 0.0, must be above 0"),
        ({"temperature": 1, "top_p": "0.9"}, "its top_p is '0.9', must be a number"),
        ({"temperature": 1, "top_k": 2.5}, "its top_k is 2.5, must be a number"),
        ({"repetition_penalty": 0}, "its repetition_penalty is 0.0, must be above 0"),
        ({"until": [5]}, r"its until is \[5\], must be strings"),
    ],
)
def test_options_out_of_range_are_named(kwargs, message):
    with pytest.raises(UserError, match=f"^{message}"):
        harness.sampling_of(kwargs, 5)


class Loader(yaml.SafeLoader):
    """Reads the harness's tasks without their functions."""


Loader.add_multi_constructor("!", lambda *_: None)


def generation_kwargs(value):
    if isinstance(value, dict):
        yield from (found for name, found in value.items() if name == "generation_kwargs" and isinstance(found, dict))
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from generation_kwargs(part)


@pytest.mark.heavy
def test_no_task_of_the_harness_has_an_option_that_is_dropped():
    """All are ours, neutral, or refused by name: of lm-eval 0.4.13, one, with ten beams."""
    folder = pathlib.Path(importlib.metadata.distribution("lm_eval").locate_file("lm_eval/tasks"))
    refused, count = [], 0
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".md", ".json", ".txt", ".jsonl") or not path.is_file():
            continue
        if b"generation_kwargs" not in (data := path.read_bytes()):
            continue
        for kwargs in generation_kwargs(yaml.load(data, Loader)):
            count += 1
            want = normalize_gen_kwargs(kwargs)
            try:
                found = harness.sampling_of(kwargs, 256)
            except UserError as error:
                refused.append((path.parent.name, str(error)))
                continue
            assert found.max_new_tokens == want["max_gen_toks"]
            assert found.temperature == (want.get("temperature", 0) if want["do_sample"] else 0)
            assert found.top_p == (want.get("top_p") if want["do_sample"] else None)
            assert set(want) <= {"until", "do_sample", "temperature", "max_gen_toks", "num_beams", "top_p"}
    assert count > 300
    assert refused == [("code-text", "its num_beams is 10, which capibara does not have: remove it, or set it to 1")]


def test_a_temperature_alone_draws(lm, subject):
    kwargs = {"until": ["zz"], "max_gen_toks": 6, "temperature": 1.5}
    found = lm.generate_until(asked("generate_until", *[("def f", kwargs)] * 2), disable_tqdm=True)
    for seed, text in enumerate(found):
        sampling = Sampling(temperature=1.5, max_new_tokens=6, seed=seed)
        assert text == subject.engine.submit("def f", sampling).result().text


def test_a_default_that_does_not_fit_is_told(lm, caplog):
    with caplog.at_level("WARNING", logger="capibara"):
        lm._tell_default([types.SimpleNamespace(task_name="gen", doc_id=3)])
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("1 texts end after 32 tokens, half of a row") and "--harness=gen, document 3" in line


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
    for name, text in (("mc", CHOICES), ("gen", GENERATED)):
        (tmp_path / f"{name}.yaml").write_text(text.format(path=tmp_path / "data.jsonl"))
    options = Harness(num_fewshot=0)
    found = harness.evaluate(subject, ["mc", "gen"], options, str(tmp_path))
    assert found["results"]["mc"]["acc,none"] == 1.0 and found["results"]["gen"]["exact_match,none"] == 0.5
    assert found["capibara"]["weights"] == "raw" and found["n-samples"]["mc"]["effective"] == 2
    assert any("exact_match" in line for line in harness.table(found))
    assert harness.evaluate(subject, ["mc"], options, str(tmp_path), limit=1)["n-samples"]["mc"]["effective"] == 1


def test_what_cannot_be_asked_names_its_document(subject, tmp_path, monkeypatch, caplog):
    lines = [{"q": "a", "choices": ["x", "y"], "answer": 0, "text": "x"} for _ in range(3)]

    def run(name, text):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / f"{name}.yaml").write_text(text.format(path=tmp_path / "data.jsonl"))
        return harness.evaluate(subject, [name], Harness(num_fewshot=0), str(tmp_path))

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
        harness.evaluate(subject, ["mc"], Harness(), str(tmp_path / "none"))
    (tmp_path / "mc.yaml").write_text(CHOICES.format(path=tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="--harness=mc: its data is not available"):
        harness.evaluate(subject, ["mc"], Harness(), str(tmp_path))
    with pytest.raises(UserError, match=r"\(or EvalTask.pairs, or Harness.chat\) needs a tokenizer"):
        harness.evaluate(subject, ["mc"], Harness(chat=True), str(tmp_path))


def test_begin_tokens(subject):
    chat = CapibaraLM(subject, Harness(chat=True))
    assert chat.tok_encode("a") == [100] and chat.tok_encode("a", add_special_tokens=True) == [0, 100]
    with_begin = CapibaraLM(subject)
    assert with_begin.tok_encode("a") == [0, 100] and with_begin.tok_encode("a", add_special_tokens=False) == [100]
