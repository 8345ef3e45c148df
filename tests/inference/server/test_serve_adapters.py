"""`capibara serve --adapter=NAME=PATH` and `infer`: requests name an adapter; an invalid one is a one-line error."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys

import jax
import numpy as np
import openai
import pytest
import tokenizers

from capibara import config
from capibara.cli import infer, serve
from capibara.core import tree
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server import server
from capibara.interop import gin_of, open_model
from capibara.interop.peft import folder as peft
from capibara.models import api
from capibara.models.api import Lora
from capibara.multihost import exits
from capibara.training import run_folder

sys.path.insert(0, os.path.dirname(__file__))
from test_server import Running  # noqa: E402

F32 = "--gin.DecoderConfig.dtype=float32"
QUICK = ("--port=0", "--gin.ServerConfig.warm_up=False", "--gin.EngineConfig.slots=4")
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
LORAS = {
    "poet": Lora(rank=2, alpha=4.0, targets=("all-linear",)),
    "coder": Lora(rank=3, alpha=2.0, targets=("query", "down"), rslora=True),
}


def adapted(run, lora, seed):
    model = api.build(dataclasses.replace(run.model.config, lora=lora))
    rng, new = np.random.default_rng(seed), jax.jit(model.adapt)(run.params, jax.random.key(seed))
    drawn = lambda name, x: jax.numpy.asarray(0.5 * rng.standard_normal(x.shape, np.float32))  # noqa: E731
    return model, tree.map_with_names(lambda name, x: drawn(name, x) if name.endswith("_lora/b") else x, new)


@pytest.fixture(scope="module")
def paths(run, folder, tmp_path_factory):
    """A PEFT folder, and a run that started from the model."""
    root = tmp_path_factory.mktemp("adapters")
    model, params = adapted(run, LORAS["poet"], 1)
    peft.write_peft(str(root / "poet"), params, model, "llama", base=folder)
    model, params = adapted(run, LORAS["coder"], 2)
    os.makedirs(root / "coder")
    own = gin_of.run(model.config, folder, {}, 64) + f'\nTrainer.init_from = "{folder}"\n'
    run_folder.save(str(root / "coder"), params, own)
    return root


@pytest.fixture(scope="module")
def want(run, paths):
    """The text after a prompt for each adapter, merged."""
    found = {}
    for number, name in enumerate((None, *LORAS)):
        params = run.params
        if name is not None:
            model, values = adapted(run, LORAS[name], number)
            params = jax.jit(model.merge)(values)
        one = Engine(run.model, params, run.tokenizer, 256, EngineConfig(slots=4))
        found[name] = one.submit("The river", GREEDY).result().text
    assert len({*found.values()}) == 3
    return found


def asked(folder, paths, *names):
    return [f"--model={folder}", F32, *(f"--adapter={name}={paths / name}" for name in names or LORAS)]


def test_requests_name_an_adapter(folder, paths, want, monkeypatch):
    seen = {}
    monkeypatch.setattr(server, "run", lambda listening, keys, load, *_: seen.update(served=load()[0]) or 0)
    config.reset()
    assert exits.run_verb(serve.main, [*asked(folder, paths), "--name=base", *QUICK]) == 0
    engine = seen["served"].engine
    with engine.start(), Running(seen["served"]) as running:
        client = running.client()
        listed = {one.id: getattr(one, "parent", None) for one in client.models.list()}
        assert listed == {"base": None, "poet": "base", "coder": "base"}
        assert client.models.retrieve("coder").id == "coder"
        how = dict(prompt="The river", temperature=0, max_tokens=12)
        for name in ("coder", "base", "poet", "coder"):
            answer = client.completions.create(model=name, **how)
            assert answer.model == name and answer.choices[0].text == want[None if name == "base" else name]
        vectors = {
            n: client.embeddings.create(model=n, input="The river").data[0].embedding for n in ("base", "poet", "coder")
        }
        assert len({tuple(vector) for vector in vectors.values()}) == 3
        for name in ("base", "poet"):  # a prompt is scored with the adapter, as its text is
            scored = client.completions.create(
                model=name, prompt="The river", echo=True, logprobs=3, max_tokens=1, temperature=0
            )
            of_river = client.completions.create(model=name, prompt="The rive", logprobs=3, max_tokens=1, temperature=0)
            last, first = scored.choices[0].logprobs.top_logprobs[-2], of_river.choices[0].logprobs.top_logprobs[0]
            assert max(last.values()) == pytest.approx(max(first.values()), abs=1e-3)
        chat = client.chat.completions.create(
            model="poet", messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=12, stream=True
        )
        assert {chunk.model for chunk in chat} == {"poet"}
        with pytest.raises(openai.NotFoundError, match="the models here are 'base', 'poet', 'coder'") as error:
            client.completions.create(model="painter", **how)
        assert error.value.code == "model_not_found" and error.value.param == "model"


def test_infer_reads_each_prompt_with_its_own(folder, paths, want, tmp_path, capfd):
    greedy = ["--gin.Sampling.temperature=0", "--gin.Sampling.max_new_tokens=12"]
    config.reset()
    assert exits.run_verb(infer.main, [*asked(folder, paths), *greedy, "--prompt=The river"]) == 0
    assert capfd.readouterr().out == "The river" + want["poet"] + "\n"
    lines = [{}, {"adapter": "coder"}, {"adapter": None}, {"adapter": "poet"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": "The river"} | one) + "\n" for one in lines))
    prompts = [f"--prompts={tmp_path}/in.jsonl", f"--out={tmp_path}/out.jsonl"]
    # From Gin, too.
    pairs = tuple((name, str(paths / name)) for name in LORAS)
    config.reset()
    assert (
        exits.run_verb(infer.main, [f"--model={folder}", F32, *greedy, f"--gin.Adapters.paths={pairs}", *prompts]) == 0
    )
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["text"] for one in found] == [want[name] for name in ("poet", "coder", None, "poet")]
    assert [one.get("adapter") for one in found] == ["poet", "coder", None, "poet"]
    assert found[0]["made_by"]["adapters"] == {name: str(paths / name) for name in LORAS}


def mistake(capfd, *argv):
    config.reset()
    capfd.readouterr()
    code = exits.run_verb(infer.main, [*argv, "--prompt=a"])
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), (code, out, err)
    return err


def test_a_bad_adapter_is_one_line(folder, paths, run, tmp_path, capfd):
    model = f"--model={folder}"
    assert "--adapter=poet must be NAME=PATH" in mistake(capfd, model, "--adapter=poet")
    assert "neither a PEFT folder (adapter_config.json) nor a run" in mistake(capfd, model, "--adapter=a=/none")
    twice = f"--adapter=poet={paths}/poet"
    assert "has the name of another adapter" in mistake(capfd, model, twice, twice)
    # Of another model, in both forms.
    other = api.build(dataclasses.replace(run.model.config, mlp_dim=48))
    checkpoint_of(other, tmp_path / "other")
    assert "poet: model.layers.0.mlp.gate_proj.lora_B.weight has the shape [64, 2], must be [48, 2]" in mistake(
        capfd, f"--model={tmp_path}/other", twice
    )
    found = mistake(capfd, f"--model={tmp_path}/other", f"--adapter=coder={paths}/coder")
    assert "coder: layers/mlp/down is [2, 64, 32] in the adapter and [2, 48, 32] in this model" in found
    # Cut short.
    shutil.copytree(paths / "poet", tmp_path / "cut")
    with open(tmp_path / "cut" / peft.WEIGHTS, "rb+") as file:
        file.truncate(os.path.getsize(file.name) // 2)
    assert f"{peft.WEIGHTS} cannot be read" in mistake(capfd, model, f"--adapter=a={tmp_path}/cut")
    # What cannot be beside another.
    saved = Lora(rank=2, modules_to_save=("final_norm/scale",))
    peft.write_peft(str(tmp_path / "saved"), adapted(run, saved, 3)[1], adapted(run, saved, 3)[0], "llama", base=folder)
    assert "saved: final_norm/scale is trained in full (Lora.modules_to_save)" in mistake(
        capfd, model, f"--adapter=a={tmp_path}/saved"
    )
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "adapter": "painter"}\n')
    prompts = [f"--prompts={tmp_path}/in.jsonl", f"--out={tmp_path}/out.jsonl"]
    assert "in.jsonl:1 has adapter = 'painter', must be null or one of poet" in mistake(capfd, model, twice, *prompts)
    assert "none: no adapter is loaded, pass --adapter" in mistake(capfd, model, *prompts)


def checkpoint_of(model, path):
    from capibara.interop.hf import config as hf_config
    from capibara.interop.hf import folder as hf_folder

    params = jax.jit(model.init)(jax.random.key(0))
    values = hf_config.to_hf(model.config, {"max_position_embeddings": 256})
    tensors = open_model.hf_tensors(params, model, "llama")
    hf_folder.save_hf(str(path), values, open_model.hf_shapes(model, "llama"), tensors, {}, dtype="float32")


def test_an_adapters_own_tokenizer_is_told(folder, paths, tmp_path, capfd):
    base, poet = shutil.copytree(folder, tmp_path / "base"), shutil.copytree(paths / "poet", tmp_path / "poet")
    about = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": "{{ messages[0].content }}"}))
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.enable_padding(length=8)  # as trainers save it
    padded = tokenizer.to_str(pretty=True)
    tokenizer.add_tokens(["<|poem|>"])
    ask = [f"--model={base}", F32, f"--adapter=poet={poet}", "--prompt=a", "--gin.Sampling.max_new_tokens=1"]
    cases = (
        ({"tokenizer.json": padded, "chat_template.jinja": "{{ messages[0].content }}"}, None),
        ({"chat_template.jinja": "{{ messages[1].content }}"}, "chat template"),
        ({"chat_template.jinja": "{{ messages[0].content }}", "tokenizer.json": tokenizer.to_str()}, "tokenizer"),
    )
    for own, different in cases:
        for name, text in own.items():
            (poet / name).write_text(text)
        config.reset()
        assert exits.run_verb(infer.main, ask) == 0
        error = capfd.readouterr().err
        note = f"note: --adapter=poet={poet} has a {different} that differs from the model's and is not used"
        assert note in error if different else "differs" not in error
