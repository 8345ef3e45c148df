"""A loaded model generates, is scored and saved as the verbs do it."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import capibara as cb
from capibara.interop import hub

QA = cb.EvalTask(files=("qa.jsonl",), metrics=(cb.exact_match,))


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


def test_a_chat_ends_where_its_template_ends_a_turn(model, monkeypatch):
    assert model.chat("river?", max_tokens=5, temperature=0)
    monkeypatch.setitem(model._chat.__dict__, "ends", tuple(range(264)))  # as if it ended a turn with any token
    assert model.chat("river?", max_tokens=5, temperature=0) == ""
    assert model.generate("river?", max_tokens=5, temperature=0)


def test_numbers_of_a_text_agree(model):
    ids = model.tokenizer.prompt_ids("a b")
    logits = model.logits("a b")
    assert logits.shape == (len(ids), 264) and logits.dtype == np.float32
    log_probabilities = jax.nn.log_softmax(logits)
    wanted = sum(float(log_probabilities[i, ids[i + 1]]) for i in range(len(ids) - 1))
    score = model.score(model.tokenizer.decode(ids[1:]), model.tokenizer.decode(ids[:1]))
    assert score == pytest.approx(wanted, rel=1e-5) and model.score("ab") < 0
    # "ab" is one token: a continuation that it would join is tokenized by itself.
    after = jax.nn.log_softmax(model.logits([*model.tokenizer.encode("xa"), *model.tokenizer.encode("bc")]))
    b, c = model.tokenizer.encode("bc")
    assert model.score("bc", "xa") == pytest.approx(float(after[1, b] + after[2, c]), rel=1e-5)
    whole = model.score("sun", "ab") + model.score(" a", "absun")  # "ab" is one token
    assert model.score("sun a", "ab") == pytest.approx(whole, rel=1e-5)
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
        (lambda model: model.generate([]), "the prompt is [], must be a text, a list of texts, or messages"),
        (lambda model: model.generate(iter(["a", "b"])), "must be a text, a list of texts, or messages"),
        (
            lambda model: model.generate({"role": "user", "content": "a"}),
            "must be a text, a list of texts, or messages",
        ),
        (lambda model: model.generate(5), "the prompt is 5"),
        (lambda model: model.generate(["a", 5]), "is no message"),
        (lambda model: model.generate([{"role": "user", "content": None}]), "has no content"),
        (lambda model: model.generate("a", tools=[{}]), "tools are for messages"),
        (lambda model: model.generate("a", max_tokens=1, max_new_tokens=2), "are one option"),
        (lambda model: model.generate(["a", "x" * 300]), "300"),
        (lambda model: model.logits([264]), "whole numbers from 0 to 263"),
        (lambda model: model.logits([-1]), "whole numbers"),
        (lambda model: model.logits([1.5]), "whole numbers"),
        (lambda model: model.embed([]), "the texts are empty"),
        (lambda model: model.score("b", "x" * 500), "must have at most 128"),
        (lambda model: model.save(model.path + "-new", format="onnx"), "format is 'onnx', must be one of hf"),
        (lambda model: cb.load(None), "model is None, must be a path or a name"),
        (lambda model: cb.load(model.path, weights="best"), "weights is 'best'"),
        (lambda model: cb.serve(model, port=99999), "port is 99999"),
        (lambda model: cb.serve(model.path), "serve takes a loaded model"),
        (lambda model: cb.plan(model, "v5e-4", most=0), "most is 0"),
        (lambda model: cb.plan(model, None), "slice is None"),
        (lambda model: cb.prove(model), "prove takes a run"),
        (lambda model: cb.merge(model.path, "x", cb.Linear()), "must be several"),
        (lambda model: cb.merge([model, model], "x", "linear"), "method is 'linear', must be a method"),
        (lambda model: cb.evaluate(model), "is no run, so it has no validation split"),
        (lambda model: cb.evaluate(model, {"qa": "qa.jsonl"}), "tasks must be a dict of names and tasks"),
        (lambda model: cb.evaluate(model, {"my task": QA}), "tasks has the name 'my task', must be of letters"),
        (lambda model: cb.evaluate(model, {"": QA}), "tasks has the name '', must be of letters"),
        (lambda model: cb.evaluate(model, {1: QA}), "tasks has the name 1, must be of letters"),
        (lambda model: cb.evaluate(model, limit="1"), "limit is '1'"),
        (lambda model: cb.compare(model, model, "one text"), "prompts must be several texts"),
        (lambda model: cb.compare(model, model, ["a", [{}]]), "prompts has [{}], must have texts"),
        (lambda model: cb.compare("a", "b", ["x"]), "compare takes loaded models"),
        (
            lambda model: cb.compare(model, model, ["a"], score=lambda p, a: None, max_tokens=1),
            "must be a finite number",
        ),
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


def test_a_stream_that_nobody_reads_waits_for_nothing(model):
    model.generate("a", max_tokens=3, stream=True)
    with pytest.raises(cb.UserError):
        model.generate(["a", "x" * 300])
    model.generate("a", max_tokens=1)
    assert model.engine.load == (0, 0)


def test_what_was_loaded_otherwise_than_its_files_is_not_written_as_them(folder, tmp_path):
    model = cb.load(f"{folder}/run", step=0)
    uses = (
        lambda: model.save(str(tmp_path / "x")),
        lambda: cb.evaluate(model),
        lambda: cb.finetune(model, ["a"], str(tmp_path / "r")),
    )
    for use in uses:
        with pytest.raises(cb.UserError, match="was loaded with step=0, and its files are read again"):
            use()
    assert not [*tmp_path.iterdir()]


def test_an_encoder_has_embeddings_alone():
    import dataclasses

    config = cb.EncoderConfig(
        vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32", max_length=32
    )
    from capibara.api.language_model import LanguageModel
    from capibara.interop.open_model import LoadedModel
    from capibara.models import api

    built = api.build(config)
    data = cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=32, kind=config.data_kind)
    loaded = LoadedModel(built, jax.jit(built.init)(jax.random.key(0)), data, "encoder", None, "stored")
    encoder = LanguageModel(loaded, None)
    assert encoder.embed("abc").shape == (32,) and dataclasses.is_dataclass(encoder.config)
    for use in (lambda: encoder.logits("a"), lambda: encoder.score("a"), lambda: encoder.generate("a")):
        with pytest.raises(cb.UserError):
            use()


def test_models_are_opened_by_several_threads(folder):
    lengths = range(32, 36)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda n: cb.load(f"{folder}/hf", bindings=[f"Dataset.length = {n}"]).length, lengths)
        assert [*found] == [*lengths]


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


def test_a_machine_without_a_tpu_is_not_asked_for_one(folder):
    """libtpu, which compiles for slices, would look for chips and print errors."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    code = f"import capibara as cb; print(cb.load({f'{folder}/hf'!r}).step)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_model_is_pushed_with_its_card(folder, monkeypatch):
    """That of its folder, or a new one."""
    cards = {}
    monkeypatch.setattr(
        hub, "push", lambda path, name, private: cards.setdefault(name, open(f"{path}/README.md").read())
    )
    cb.load(f"{folder}/hf").push_to_hub("me/small")
    assert "model_name: small" in cards["me/small"] and "parameters, trained with capibara." in cards["me/small"]
