"""A loaded model generates, is scored and saved as the verbs do it."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import capibara as cb


@pytest.fixture(scope="module")
def model(folder):
    return cb.load(f"{folder}/hf")


def test_it_says_what_it_is(model, folder):
    assert repr(model) == (
        f"LanguageModel('{folder}/hf': DecoderConfig with 29,088 parameters, float32, rows of 128 tokens)"
    )
    assert model.step is None and model.config.num_layers == 2 and model.chats


def test_texts_are_continued_alone_together_and_in_pieces(model):
    one = model.generate("a b", max_tokens=6, temperature=0)
    assert one and one == model.generate("a b", max_new_tokens=6, temperature=0.0)
    assert model.generate(["a b", "sun"], max_tokens=6, temperature=0)[0] == one
    pieces = list(model.generate("a b", max_tokens=6, temperature=0, stream=True))
    assert "".join(pieces) == one and len(pieces) > 1
    first = next(stream := model.generate("a b", max_tokens=100, temperature=0, stream=True))
    stream.close()  # ends the text
    assert first == pieces[0] and model.generate("a b", max_tokens=6, temperature=0) == one
    stop = one[2:4]
    assert model.generate("a b", max_tokens=6, temperature=0, stop=stop) == one.partition(stop)[0]


def test_a_chat_is_what_infer_answers(model, folder):
    answer = model.chat("river?", max_tokens=5, temperature=0)
    messages = [{"role": "user", "content": "river?"}]
    assert (
        answer
        == model.generate(messages, max_tokens=5, temperature=0)
        == model.chat(messages, max_tokens=5, temperature=0)
    )
    assert answer != model.chat("river?", system="Be short.", max_tokens=5, temperature=0)
    flags = ["--gin.Sampling.max_new_tokens=5", "--gin.Sampling.temperature=0.0"]
    command = [sys.executable, "-m", "capibara.infer", f"--model={folder}/hf", "--chat", "--prompt=river?", *flags]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == answer + "\n"


def test_numbers_of_a_text_agree(model):
    ids = model.tokenizer.prompt_ids("a b")
    logits = model.logits("a b")
    assert logits.shape == (len(ids), 264) and logits.dtype == np.float32
    log_probabilities = jax.nn.log_softmax(logits)
    wanted = sum(float(log_probabilities[i, ids[i + 1]]) for i in range(len(ids) - 1))
    score = model.score(model.tokenizer.decode(ids[1:]), model.tokenizer.decode(ids[:1]))
    assert score == pytest.approx(wanted, rel=1e-5) and model.score("ab") < 0
    one, two = model.embed(["a b", "sun"])
    np.testing.assert_allclose(one, model.embed("a b"), rtol=1e-6)
    assert one.shape == (32,) and not np.allclose(one, two)


def test_all_forms_are_one_model_and_leave_again(model, folder, tmp_path):
    wanted = model.logits("a b")
    np.testing.assert_array_equal(cb.load(f"{folder}/m.gguf").logits("a b"), wanted)
    assert model.save(str(tmp_path / "new")) == str(tmp_path / "new")
    np.testing.assert_array_equal(cb.load(str(tmp_path / "new")).logits("a b"), wanted)
    assert cb.load(f"{folder}/hf", dtype="bfloat16").config.dtype == "bfloat16"
    assert cb.load(f"{folder}/hf", bindings=["Dataset.length = 64"]).length == 64
    on_mesh = cb.load(f"{folder}/hf", mesh=cb.ServingMesh(tensor=2))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(on_mesh.params)} == {2}
    np.testing.assert_allclose(on_mesh.logits("a b"), wanted, rtol=1e-5, atol=1e-5)
    assert cb.model_config(f"{folder}/hf") == model.config


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: model.generate("a", temprature=0), "no option 'temprature': did you mean temperature?"),
        (lambda model: model.generate([]), "the prompt is empty"),
        (lambda model: model.generate([{"content": "x"}]), "is no message"),
        (lambda model: model.generate(["a"], stream=True), "stream is for one prompt"),
        (lambda model: model.generate("a", temperature=-1), "Sampling.temperature is -1"),
        (lambda model: model.generate("a", adapter="poet"), "poet"),
        (lambda model: model.logits([]), "has 0 tokens"),
        (lambda model: model.logits("x" * 200), "has 200 tokens, must have from 1 to 128"),
        (lambda model: model.score(""), "at least one token"),
        (lambda model: model.save(model.path), "exists already"),
        (lambda model: cb.load("/nowhere/at/all"), "/nowhere/at/all does not exist"),
        (lambda model: cb.load(model.path, base="other"), "is for adapters"),
        (lambda model: cb.load(model.path, dtype="float7"), "float7"),
    ],
)
def test_mistakes_are_one_line(model, call, said):
    with pytest.raises(cb.UserError) as caught:
        call(model)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_a_template_says_so_when_it_is_asked_to_chat(folder, tmp_path):
    cb.load(f"{folder}/hf").save(plain := str(tmp_path / "plain"))
    path = tmp_path / "plain" / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    for left in (tmp_path / "plain").glob("chat_template*"):
        left.unlink()
    model = cb.load(plain)
    assert not model.chats and model.generate("a", max_tokens=1) is not None
    with pytest.raises(cb.UserError, match="chat"):
        model.chat("Hello")
