"""Models of families beside what transformers answers for them: adapters, meshes, plans and GGUF files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.cli import convert, plan
from capibara.core import tree
from capibara.interop import gin_of
from capibara.interop.hf import config as hf_config
from capibara.models import api
from capibara.models.api import Lora
from capibara.multihost import exits
from capibara.optim import Optimizer
from capibara.planner.model import workload
from capibara.sharding import Plan

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "models" / "architectures")]

import mesh_gradients  # noqa: E402
import test_families  # noqa: E402

NAMES = (
    "aria_text", "blenderbot", "data2vec-text", "esm", "esm_absolute", "flaubert", "lara_mini", "m2m_100", "marian", "mvp", "plbart",
    "roformer", "roformer_whole", "xlm",
)  # fmt: skip
SMALL = ("esm", "xlm", "voxtral")
SOUND = ("audioflamingo3", "glmasr", "granite_speech", "qwen2_audio", "voxtral")
ROWS = 4


def recorded(name):
    return json.loads((HERE / "recorded" / f"{name}.json").read_text())


def of(*names):
    return [pytest.param(name, marks=() if name in SMALL else pytest.mark.heavy) for name in names]


def built(name, **changes):
    return api.build(dataclasses.replace(hf_config.from_hf(recorded(name)["config"], dtype="float32"), **changes))


def batch_of(model):
    """Two rows with padding, and the same once more."""
    batch = test_families.batch_of(test_families.tokens()) | test_families.further(model)
    if model.config.data_kind == "masked":
        batch = test_families.encoder_batch(model.config)
    return {key: np.concatenate([value] * (ROWS // len(value))) for key, value in batch.items()}


def drawn(model):
    """Small: large ones multiply rounding in deep layers."""
    return jax.tree.map(lambda x: 0.4 * x, mesh_gradients.random_params(model))


@pytest.mark.parametrize("name", of(*NAMES))
def test_adapters_of_all_weights_merge_to_the_same_logits(name):
    model = built(name, lora=Lora(rank=2, alpha=2.0, targets=("all-linear",)))
    params, batch = drawn(model), batch_of(model)
    adapted = {key.rpartition("/")[0] for key in tree.path_names(model.abstract_params) if key.endswith("_lora/b")}
    assert adapted
    got = np.asarray(jax.jit(model.logits)(params, batch))
    merged = jax.jit(model.merge)(params)
    want = np.asarray(jax.jit(model.plain.logits)(merged, batch))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
    without = np.asarray(jax.jit(model.plain.logits)(jax.jit(model.unmerge)(merged, model.trained(params)), batch))
    assert np.abs(without - want).max() > 1e-2 * np.abs(want).max()


@pytest.mark.parametrize("name", of(*NAMES))
def test_a_mesh_gives_the_loss_and_the_gradients_of_one_device(name):
    model = built(name)
    batch = batch_of(model)
    got = mesh_gradients.on_mesh(model, batch, Plan(batch_size=ROWS, fsdp=2, tensor=2), jax.devices()[:4])
    want = mesh_gradients.on_mesh(model, batch, Plan(batch_size=ROWS), jax.devices()[:1])
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest), got, want)


def flops_by_hand(values, length, encoder_length):
    """Model FLOPs of a trained token, by the sizes of a config.json: of an encoder, or of an encoder and a decoder."""
    if "d_model" in values:
        width, mlp = values["d_model"], 2 * values["d_model"] * values["encoder_ffn_dim"]
        read, written = values["encoder_layers"], values["decoder_layers"]
        encoder = encoder_length * read * (6 * (4 * width**2 + mlp) + 12 * width * encoder_length)
        across = written * 6 * 2 * width**2 * (encoder_length + length)  # keys and values, queries and results
        keys = written * 12 * width * length * (length / 2 + encoder_length)
        decoder = 6 * length * (written * (4 * width**2 + mlp) + values["vocab_size"] * width)
        return (encoder + across + keys + decoder) / length
    width = values.get("hidden_size") or values["emb_dim"]
    mlp, layers = values.get("intermediate_size", 4 * width), values.get("num_hidden_layers") or values["n_layers"]
    narrow = values.get("embedding_size", width)
    weights = layers * (4 * width**2 + 2 * width * mlp) + values["vocab_size"] * narrow
    weights += 0 if "emb_dim" in values else width * narrow  # the head's own layer
    weights += width * narrow if narrow != width else 0
    return 6 * weights + layers * 12 * width * length


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("aria_text", "lara_mini")])
def test_the_planner_counts_what_its_config_says(name):
    model, values = built(name), recorded(name)["config"]
    encoder_length = 40 if model.config.data_kind == "encoder_decoder" else None
    work = workload.describe(model, Optimizer(), length=24, encoder_length=encoder_length)
    assert model.flops_per_token(24, encoder_length) == pytest.approx(flops_by_hand(values, 24, encoder_length))
    sizes = {key: int(np.prod(shape)) for key, shape in recorded(name)["tensors"].items()}
    other = ("esm.contact_head.",) + (
        () if model.config.positions == "learned" else ("roformer.encoder.embed_positions.",)
    )
    assert work.params.total() == 4 * sum(size for key, size in sizes.items() if not key.startswith(other))


@pytest.mark.parametrize("name", of(*NAMES))
def test_a_model_is_planned(name, tmp_path, capsys):
    model = built(name)
    gin, out = tmp_path / "run.gin", tmp_path / "plan.json"
    gin.write_text(gin_of.run(model.config, str(tmp_path / "run"), {}, 64))
    assert exits.run_verb(plan.main, [f"--gin_file={gin}", "--slice=v5e-4", f"--json={out}"]) == 0, capsys.readouterr()
    first = json.loads(out.read_text())["plans"][0]
    assert first["fits"] and first["batch_size"] == 8
    trained = sum(leaf.size for leaf in jax.tree.leaves(model.trained(model.abstract_params)))
    assert first["predicted"]["memory"]["parameters"] >= 4 * trained / 4  # in float32, on 4 chips that pad small ones


@pytest.mark.parametrize("name", of(*NAMES))
def test_a_gguf_file_of_a_family_without_one_is_refused_by_a_line(name, tmp_path, capsys):
    test_families.write_drawn(tmp_path / "theirs", recorded(name))
    model_type = recorded(name)["config"]["model_type"]
    assert exits.run_verb(convert.main, [f"--from={tmp_path / 'theirs'}", f"--to={tmp_path / 'model.gguf'}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"model_type '{model_type}' has no GGUF form here, must be one of" in line
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("name", of(*SOUND))
def test_the_language_model_of_one_that_reads_sound_is_a_gguf_file(name, tmp_path):
    test_families.write_drawn(tmp_path / "theirs", recorded(name))
    assert exits.run_verb(convert.main, [f"--from={tmp_path / 'theirs'}", f"--to={tmp_path / 'model.gguf'}"]) == 0
    (model, params, _), (other, theirs, _) = (test_families.loaded(tmp_path / of) for of in ("theirs", "model.gguf"))
    got = test_families.logits(other, theirs)
    np.testing.assert_allclose(got, test_families.logits(model, params), rtol=0, atol=1e-5)
