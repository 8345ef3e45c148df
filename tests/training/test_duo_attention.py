"""Whole runs that train gates of streaming heads; patterns are made of them, and serve."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import capibara as cb
from capibara.checkpoints.manager import Checkpointing
from capibara.cli import prepare
from capibara.config import written
from capibara.core.types import UserError
from capibara.models import api, head_patterns
from capibara.models.api import GATES
from capibara.sharding import Plan
from capibara.training import run_folder
from capibara.training.base.options import Evaluation

MODEL = cb.DecoderConfig(
    vocab_size=384, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48, dtype="float32"
)
GATED = dataclasses.replace(MODEL, streaming=cb.StreamingHeads(sink_tokens=2, recent_window=4))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} grass and river " * 40}) + "\n" for i in range(40)))
    return path


def trainer_of(texts, folder, **changes):
    source = cb.JsonlSource(files=(str(texts),), validation_fraction=0.2)
    options = dict(
        model_dir=str(folder),
        steps=12,
        model=GATED,
        plan=Plan(batch_size=8),
        dataset=cb.Dataset(source=source, vocabulary=cb.ByteVocabulary(), length=512),
        optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=0.05), weight_decay=0.0),
        evaluation=Evaluation(every=12),
        checkpointing=Checkpointing(every=12),
        loss=cb.DuoAttention(passkeys=2, passkey_words=2, gate_weight=20.0),
        log_every=1,
    )
    return cb.Trainer(**options | changes)


@pytest.fixture(scope="module")
def base(texts, tmp_path_factory):
    """A run folder of the model without gates."""
    folder = str(tmp_path_factory.mktemp("base") / "run")
    params = jax.jit(api.build(MODEL).init)(jax.random.key(3))
    trainer = trainer_of(texts, folder, model=MODEL, loss=None)
    run_folder.save(folder, jax.tree.map(lambda x: 3 * x, params), written.text_of(trainer))
    return folder


@pytest.fixture
def make_trainer(texts, base, tmp_path):
    return lambda folder="run", **changes: trainer_of(texts, tmp_path / folder, init_from=base, **changes)


def test_gates_alone_are_trained_and_become_a_pattern_that_serves(make_trainer, base, tmp_path, capsys):
    history = {row["step"]: row for row in cb.train(make_trainer()).history}
    first, last = history[1], history[12]
    assert first["distance"] == pytest.approx(0, abs=1e-9) and first["retrieval"] == 1.0
    assert last["retrieval"] < 0.9 and last["loss"] < first["loss"]
    assert last["loss"] == pytest.approx(last["distance"] + 20 * last["retrieval"], rel=1e-3)
    started = cb.load(base).loaded.params
    trained = cb.load(str(tmp_path / "run")).loaded.params
    gates = np.asarray(trained[GATES])
    assert gates.shape == (2, 2) and np.ptp(gates) > 0.001
    for name in started:
        jax.tree.map(np.testing.assert_array_equal, started[name], trained[name])
    out, theirs = tmp_path / "streaming_heads.json", tmp_path / "theirs"
    argv = ["streaming_heads", f"--run={tmp_path / 'run'}", "--share=0.5", f"--output={out}"]
    assert prepare.main([*argv, f"--duo_attention={theirs}"]) == 0
    assert "2 of 4 heads stream (2 sink tokens, 4 recent ones)" in capsys.readouterr().out
    pattern = cb.read_streaming_heads(str(out))
    order = np.argsort(-gates, axis=None, kind="stable")[2:]
    assert sorted(layer * 2 + head for layer, row in enumerate(pattern.heads) for head in row) == sorted(order)
    read, sizes = head_patterns.read_gates(str(theirs))
    np.testing.assert_allclose(read, np.clip(gates, 0, 1), atol=1e-4)
    assert (sizes.sink_tokens, sizes.recent_window) == (2, 4)
    bindings = [
        "DecoderConfig.streaming = @read_streaming_heads()",
        f"read_streaming_heads.path = {str(out)!r}",
    ]
    served = cb.load(base, bindings=bindings)
    assert served.loaded.model.config.streaming == pattern
    with pytest.raises(UserError, match="streaming is a pattern: open the model that the gates were trained for"):
        cb.load(str(tmp_path / "run"), bindings=bindings)


def test_a_mesh_trains_the_same_gates(make_trainer, train, tmp_path):
    metrics = []
    for devices, sizes in ((1, {}), (4, dict(fsdp=2, tensor=2))):
        options = dict(plan=Plan(batch_size=8, **sizes), evaluation=Evaluation(every=0), steps=3)
        metrics.append(train(make_trainer(folder=str(devices), **options), jax.devices()[:devices]).metrics)
    for step in (1, 2, 3):
        for name in ("loss", "distance", "retrieval"):
            assert metrics[0][step][name] == pytest.approx(metrics[1][step][name], rel=1e-4, abs=1e-7)
    assert metrics[0][3]["retrieval"] < 0.95 and metrics[0][3]["distance"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model=MODEL), r"streaming is None, without gates: set DecoderConfig.streaming = @StreamingHeads\(\)"),
        (
            dict(model=dataclasses.replace(MODEL, streaming=cb.StreamingHeads(heads=((0,), ())))),
            "streaming is a pattern: open the model that the gates were trained for with the pattern, or to train gates set",
        ),
        (dict(loss=cb.DuoAttention()), r"Dataset.length is 512, must be at least \d+ for DuoAttention.passkeys \(10\)"),
        (dict(loss=cb.DuoAttention(passkeys=2, passkey_words=2, shortest=9)), "DuoAttention.shortest is 9, must be at"),
    ],
)
def test_what_cannot_be_trained_is_refused(make_trainer, train, changes, message):
    with pytest.raises(UserError, match=message):
        train(make_trainer(**changes), jax.devices()[:1])
