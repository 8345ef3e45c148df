"""A folder of PEFT is a model for every function: its adapters merged into their base, with the tokenizer that it has."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

import capibara as cb
from capibara.cli import finetune, infer
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.multihost import exits

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}!{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory) -> str:
    """Adapters of the small model, large enough to change its texts."""
    there = tmp_path_factory.mktemp("peft") / "adapter"
    there.mkdir()
    rng = np.random.default_rng(0)
    values = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        values[f"{name}.lora_A.weight"] = rng.normal(size=(4, 32)).astype(np.float32)
        values[f"{name}.lora_B.weight"] = rng.normal(size=(32, 4)).astype(np.float32)
    safetensors.numpy.save_file(values, there / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "task_type": "CAUSAL_LM"}
    write(there, config | {"base_model_name_or_path": f"{folder}/hf"})
    return str(there)


def write(there, config):
    (pathlib.Path(there) / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def merged(adapter) -> str:
    return cb.convert(adapter, f"{os.path.dirname(adapter)}/merged")


def rendered(model):
    return model.template.render(Conversation([{"role": "user", "content": "a"}], None), "here").text


def first_loss(model, folder, out, **options):
    data = f"{folder}/chats.jsonl"
    run = cb.finetune(model, data, str(out), steps=1, batch_size=8, length=64, **options)
    return next(row["eval_loss"] for row in run.history if "eval_loss" in row)


def test_a_run_begins_from_its_merged_weights(adapter, merged, folder, tmp_path):
    losses = [first_loss(path, folder, tmp_path / str(i)) for i, path in enumerate((adapter, merged, f"{folder}/hf"))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and abs(losses[0] - losses[2]) > 1e-3
    resumed = cb.finetune(adapter, f"{folder}/chats.jsonl", str(tmp_path / "0"), steps=2, batch_size=8, length=64)
    assert resumed.step == 2


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_all_weights_and_a_base_of_4_bits_begin_from_it(adapter, merged, folder, tmp_path, method):
    losses = [first_loss(path, folder, tmp_path / path[-3:], method=method) for path in (adapter, merged)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_it_is_a_teacher(adapter, merged, folder, tmp_path):
    hf, data = f"{folder}/hf", f"{folder}/chats.jsonl"
    divergences = []
    for teacher in (adapter, merged):
        run = cb.distill(hf, teacher, data, f"{tmp_path}/{len(divergences)}", steps=1, batch_size=8, length=64)
        divergences.append(next(row["eval_divergence"] for row in run.history if "eval_divergence" in row))
    assert divergences[0] == pytest.approx(divergences[1], rel=1e-5) and divergences[0] > 1e-3


def test_infer_writes_as_the_merged_model(adapter, merged, folder, capfd):
    texts = []
    for path in (adapter, merged, f"{folder}/hf"):
        flags = [
            f"--model={path}",
            "--prompt=river",
            "--gin.Sampling.temperature=0",
            "--gin.Sampling.max_new_tokens=12",
        ]
        assert exits.run_verb(infer.main, flags) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_base_in_the_home_folder_is_opened(adapter, folder, monkeypatch):
    monkeypatch.setenv("HOME", folder)
    assert cb.load(adapter, base="~/hf").base == f"{folder}/hf"


def test_its_own_chat_template_is_used_and_the_bases_where_it_has_none(adapter, folder, tmp_path):
    assert rendered(cb.load(adapter)) == "<|im_start|>user\na<|im_end|>\n"
    own = tmp_path / "own"
    shutil.copytree(adapter, own)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{folder}/hf/{name}", own)
    (own / "chat_template.jinja").write_text(TEMPLATE)
    assert rendered(cb.load(own)) == "<|im_start|>user!a<|im_end|>"
    run = cb.finetune(str(own), f"{folder}/chats.jsonl", str(tmp_path / "run"), steps=1, batch_size=8, length=64)
    assert pathlib.Path(run.folder, "tokenizer", "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize(
    "named, message",
    [
        ("/nowhere/base", "is an adapter of '/nowhere/base', which is not here: name its folder"),
        (None, "is an adapter of None, which is not here"),
        (["base"], "base_model_name_or_path = ['base'], must be a text or null"),
        ("me/nothing", "is an adapter of another model: me/nothing is no folder here"),
    ],
)
def test_a_base_that_is_not_here_is_named_by_every_verb(adapter, folder, tmp_path, monkeypatch, capfd, named, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lost = tmp_path / "lost"
    shutil.copytree(adapter, lost)
    write(lost, json.loads((lost / "adapter_config.json").read_text()) | {"base_model_name_or_path": named})
    for verb, flags in (
        (infer.main, [f"--model={lost}", "--prompt=a"]),
        (finetune.main, [f"--model={lost}", f"--data={folder}/chats.jsonl", f"--out={tmp_path}/run"]),
    ):
        assert exits.run_verb(verb, flags) == exits.EXIT_USER_ERROR
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and message in error
    with pytest.raises(UserError, match="lost"):
        cb.load(str(lost))


def test_an_own_tokenizer_without_rows_in_the_model_is_refused(adapter, folder, tmp_path):
    upper = tmp_path / "upper"
    shutil.copytree(adapter, upper)
    tokenizer = json.loads(pathlib.Path(folder, "hf", "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"new{i}": i for i in range(260, 266)}
    (upper / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="upper: its tokenizer has ids up to 265, its model rows for ids up to 263"):
        cb.load(upper)


@pytest.mark.parametrize("base", ["adapter", "itself"])
def test_an_adapter_of_an_adapter_is_refused_by_name(adapter, folder, tmp_path, base):
    upper = tmp_path / "upper"
    shutil.copytree(adapter, upper)
    lower = adapter if base == "adapter" else str(upper)
    write(upper, json.loads((upper / "adapter_config.json").read_text()) | {"base_model_name_or_path": lower})
    message = f"upper is an adapter of {lower}, which is an adapter itself, must be of a model: merge that first"
    for call in (
        lambda: cb.load(upper),
        lambda: cb.convert(str(upper), f"{tmp_path}/new"),
        lambda: cb.finetune(str(upper), f"{folder}/chats.jsonl", f"{tmp_path}/run", steps=1, batch_size=8, length=64),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_an_adapter_of_a_run_is_loaded_and_no_training_begins_from_it(adapter, folder, tmp_path):
    of_run = tmp_path / "of_run"
    shutil.copytree(adapter, of_run)
    write(
        of_run, json.loads((of_run / "adapter_config.json").read_text()) | {"base_model_name_or_path": f"{folder}/run"}
    )
    texts = [
        cb.load(path).generate("river", max_new_tokens=8, temperature=0) for path in (of_run, adapter, f"{folder}/run")
    ]
    assert str(texts[0]) == str(texts[1]) != str(texts[2])
    with pytest.raises(UserError, match="of_run is an adapter of the run .*/run, .*: merge it first, capibara convert"):
        cb.finetune(str(of_run), f"{folder}/chats.jsonl", f"{tmp_path}/out", steps=1, batch_size=8, length=64)


def test_adapters_are_added_with_their_scale(adapter, merged, folder):
    base, result = (safetensors.numpy.load_file(f"{path}/model.safetensors") for path in (f"{folder}/hf", merged))
    values = safetensors.numpy.load_file(f"{adapter}/adapter_model.safetensors")
    for name, value in base.items():
        expected = value
        if "o_proj" in name:
            a, b = (values[f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
            expected = value + 8 / 4 * (b @ a)  # lora_alpha / r
        np.testing.assert_allclose(result[name], expected, rtol=1e-5, atol=1e-5)
