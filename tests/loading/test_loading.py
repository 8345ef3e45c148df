"""A run folder, and the Hugging Face folder and GGUF file made of it, are one model."""

from __future__ import annotations

import json
import os
import shutil

import jax
import numpy as np
import pytest
import tokenizers

from capibara import config
from capibara.checkpoints import run_manifest
from capibara.checkpoints.policy import Verify
from capibara.cli.composition import models
from capibara.core.types import UserError
from capibara.interop import conversion, gin_of
from capibara.interop.hf import config as hf_config
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.training import run_folder
from capibara.training.run_folder import own_tokenizer
from capibara.training.trainer import Trainer

CONFIG = DecoderConfig(
    vocab_size=258, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=64, dtype="float32", max_length=128
)
READER = models.ModelReader()
OURS = ("Dataset.length = 64", "DecoderConfig.dtype = 'float32'")


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """A folder with the model as a run, a Hugging Face folder and a file; and its parameters."""
    folder = tmp_path_factory.mktemp("models")
    pieces = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", *sorted(pieces), "ab"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    params = jax.jit(api.build(CONFIG).init)(jax.random.key(0))
    os.makedirs(folder / "run")
    made.save(str(folder / "run" / "tokenizer.json"))
    files = {"tokenizer.json": b"", "tokenizer_config.json": b'{"eos_token": "<eos>"}'}
    run_folder.save(str(folder / "run"), params, gin_of.run(CONFIG, str(folder / "run"), files))
    for form, target in (("hf", "hf"), ("gguf", "m.gguf")):
        conversion.convert(str(folder / "run"), str(folder / target), form, "f32", None, READER)
    config.reset()
    return folder, params


@pytest.mark.parametrize("form, step, weights", [("run", 0, "raw"), ("hf", None, "stored"), ("m.gguf", None, "stored")])
def test_all_forms_are_one_model(forms, form, step, weights):
    folder, params = forms
    opened = models.load(str(folder / form), bindings=OURS)
    assert (opened.step, opened.weights, opened.path) == (step, weights, str(folder / form))
    jax.tree.map(np.testing.assert_array_equal, opened.params, params)
    vocabulary = opened.tokenizer
    assert vocabulary.decode(vocabulary.encode("Grüße, a b")) == "Grüße, a b" and vocabulary.size == 258
    assert opened.dataset.length == 64 and opened.model.config.dtype == "float32"


def test_a_run_that_was_moved_is_loaded_with_its_own_tokenizer(forms, tmp_path):
    shutil.copytree(forms[0] / "run", tmp_path / "run")
    text = gin_of.run(CONFIG, str(tmp_path / "tokenizer"), {"tokenizer.json": b""})
    shutil.copytree(forms[0] / "hf", tmp_path / "tokenizer")
    config.parse((), [line for line in text.split("\n") if line and not line.startswith("#")])
    trainer = config.build(Trainer)
    own_tokenizer.keep(trainer.dataset, str(tmp_path / "run"))
    run_manifest.replace(run_manifest.folder_of(str(tmp_path / "run")), {"config.gin": text.encode()})
    shutil.rmtree(tmp_path / "tokenizer")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    opened = models.load(str(tmp_path / "moved"), bindings=OURS)
    assert opened.tokenizer.path == str(tmp_path / "moved/tokenizer") and opened.tokenizer.decode([1, 2]) != ""


def test_a_folder_is_loaded_with_the_tokens_that_its_files_name(forms, tmp_path):
    shutil.copytree(forms[0] / "hf", tmp_path / "hf")
    values = {
        "eos_token": "<eos>",
        "additional_special_tokens": ["ab"],
    }  # a token of the vocabulary, and no special one there
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(values))
    vocabulary = models.load(str(tmp_path / "hf"), bindings=OURS).tokenizer
    (token,) = vocabulary.encode("ab")
    assert vocabulary.spelling(token) == "ab" and vocabulary.decode([token]) == ""


def test_options_of_sampling_that_a_folder_names_are_said_to_be_unused(forms, tmp_path, caplog):
    shutil.copytree(forms[0] / "hf", tmp_path / "hf")
    values = {
        "eos_token_id": 0,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 1.0,
        "suppress_tokens": [3],
        "_from_model_config": 1,
    }
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(values))
    models.load(str(tmp_path / "hf"), bindings=OURS)
    assert "has do_sample = True, temperature = 0.6, suppress_tokens = [3], which is not used" in caplog.text


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"model_type": "none"}', b"\xff"])
def test_a_corrupted_config_json_of_the_origin_is_one_line(text):
    with pytest.raises(UserError, match="config.json"):
        hf_config.kept_by_run(text)


def test_what_a_foreign_model_does_not_have(forms, tmp_path):
    folder, _ = forms
    for given, why in (
        ({"step": 3}, "--step=3 is only for run folders"),
        ({"weights": "ema"}, "--weights=ema is only for run folders"),
    ):
        with pytest.raises(UserError, match=why):
            models.load(str(folder / "hf"), **given)
    with pytest.raises(UserError, match="keeps no average"):
        models.load(str(folder / "run"), weights="ema")
    with pytest.raises(UserError, match="has no checkpoint of step 5: there are 0"):
        models.load(str(folder / "run"), step=5)
    with pytest.raises(UserError, match="does not exist"):
        models.load(str(tmp_path / "none"))
    with pytest.raises(UserError, match="config.json"):
        models.load(str(tmp_path))
    with pytest.raises(UserError, match=r"has the shape \[64, 32\], must be \[96, 32\]"):
        models.load(str(folder / "hf"), bindings=("DecoderConfig.mlp_dim = 96",))


def test_adapters_for_a_foreign_model_are_read_as_gin_says(forms, monkeypatch):
    folder, _ = forms
    how = []
    monkeypatch.setattr(run_folder, "adapters", lambda path, checkpointing: how.append(checkpointing))
    bound = ("Trainer.checkpointing = @Checkpointing()", "Checkpointing.verify = 'off'")
    loaded = models.load(str(folder / "hf"), bindings=bound)
    with pytest.raises(UserError, match="a run without adapters"):
        models.with_adapters(loaded, [f"poet={folder / 'run'}"])
    assert [one.verify for one in how] == [Verify.OFF]
