"""Every family of interop/hf/catalog: the answers, losses and files that transformers has for it.

`make test` compares what was recorded of transformers: recorded/NAME.json. Against transformers itself, both ways:
    make test-families PEER_PYTHON=PATH/bin/python    (pip install torch "transformers==5.*" safetensors); NAMES="cohere olmo2"
    TORCH_PYTHON=PATH/bin/python python tests/interop/families/test_families.py [NAME ...]    records families
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import SingleDeviceSharding

from capibara import sharding
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.models import api
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training.base import state as states
from capibara.training.step import make_train_step

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "models" / "golden")]

import answers  # noqa: E402
import encdec_families  # noqa: E402
import encoder_families  # noqa: E402
from family_cases import CASES, RENAMED  # noqa: E402

PYTHON = os.environ.get("TORCH_PYTHON")
NAMES = os.environ.get("NAMES", " ".join(CASES)).split()
RECORDED = HERE / "recorded"
# Of the largest logit; float32's own error in transformers may be larger with random weights.
RELATIVE, ROUNDINGS = 1e-5, 4
LOSSES = 1e-4
START, LENGTH = 8, 24

live = pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch")


def peer(what, folder, names):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    argv = [PYTHON, HERE / "peer.py", what, folder, *names]
    done = subprocess.run(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]


def tokens():
    return np.random.default_rng(0).integers(3, answers.VOCAB, (answers.ROWS, answers.LENGTH)).astype(np.int32)


def of_encoder(name):
    return CASES[name]["model_type"] in encoder_families.TYPES


DECODERS = [name for name in NAMES if not of_encoder(name)]


def batch_of(tokens):
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "segment_ids": np.ones(tokens.shape, np.int32), "positions": positions}


def further(model):
    """What an encoder-decoder's batch has beside its decoder's tokens."""
    return encdec_families.encoder_entries() if model.config.data_kind == "encoder_decoder" else {}


def encoder_batch(config):
    batch = encoder_families.batch(config.token_types)
    return batch_of(batch["tokens"]) | batch


def loaded(path):
    foreign = open_model.open_model(str(path))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    open_model.check(foreign, model)
    here = SingleDeviceSharding(jax.devices()[0])
    return model, open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params)), foreign


def write_ours(path):
    model, params, foreign = loaded(path / "theirs")
    values = hf_config.to_hf(model.config, foreign.config)
    shapes = open_model.hf_shapes(model, values["model_type"])
    tensors = dict(open_model.hf_tensors(params, model, values["model_type"]))
    hf_folder.save_hf(str(path / "ours"), values, shapes, tensors.items(), {}, dtype="float32")
    return values


def check_tensors(name, where):
    """Our file has the tensors of theirs; of a wrapper, or with other names, it has the parameters of the model."""
    if "text_config" in CASES[name] or CASES[name]["model_type"] in RENAMED:
        theirs, ours = (loaded(where / of)[1] for of in ("theirs", "ours"))
    else:
        theirs, ours = (safetensors.numpy.load_file(where / of / "model.safetensors") for of in ("theirs", "ours"))
        assert {name: x.dtype for name, x in theirs.items()} == {name: x.dtype for name, x in ours.items()}
    assert theirs.keys() == ours.keys()
    jax.tree.map(np.testing.assert_array_equal, theirs, ours)


def logits(model, params):
    batch = encoder_batch(model.config) if model.config.data_kind == "masked" else batch_of(tokens()) | further(model)
    rows = getattr(model.config, "output_rows", None)  # transformers has no logits of other tokens
    return np.asarray(jax.jit(model.logits)(params, batch))[..., :rows]


def shown(name, logits):
    """The logits that are compared: 0 at an encoder's padding, which sees other tokens than in transformers."""
    return logits * (encoder_families.batch(0)["segment_ids"] == 1)[..., None] if of_encoder(name) else logits


def greedy(model, params, count):
    """The tokens after the first ones of each row, by the engine; they end where the engine does."""
    entries, asked = further(model), Sampling(temperature=0.0, max_new_tokens=count)
    prompts, read = [row[:START] for row in tokens()], encdec_families.LENGTH if entries else None
    if entries:
        real = entries["encoder_segment_ids"] == 1
        prompts = [row[kept] for row, kept in zip(entries["encoder_tokens"], real, strict=True)]
    engine = Engine(model, params, ByteVocabulary(), START + count + 1, EngineConfig(slots=2), read)
    streams = [engine.submit(prompt.tolist(), asked) for prompt in prompts]
    return [stream.result().tokens for stream in streams]


def losses(model, params, steps):
    if model.config.moe is not None:  # transformers adds a balance loss only if it is configured
        moe = dataclasses.replace(model.config.moe, balance_loss=0.0)
        model = api.build(dataclasses.replace(model.config, moe=moe))
    plan, ids = Plan(batch_size=2), tokens()
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    optimizer = Optimizer(schedule=Schedule(kind="constant", learning_rate=1e-4), weight_decay=0.0, b2=0.95, eps=1e-6)
    tx = optimizer.build(100, model.axes)
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=False)
    state = states.init_state(model, tx, jax.random.key(0), ema=False)
    state = jax.device_put(dataclasses.replace(state, params=params), shardings)
    step = make_train_step(model, tx, optimizer.schedule.build(100), plan, mesh)
    step = jax.jit(step, out_shardings=(shardings, None))
    weights = np.ones((len(ids), ids.shape[1] - 1), np.float32)
    batch = batch_of(ids[:, :-1]) | {"targets": ids[:, 1:], "weights": weights} | further(model)
    if model.config.data_kind == "masked":
        batch = encoder_families.masked(encoder_batch(model.config))
    batch = sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), batch)
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return np.array(found)


def ended(row):
    end = ByteVocabulary().eos_id
    return row[: row.index(end)] if end in row else row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    peer("write", folder, NAMES)
    for name in NAMES:
        write_ours(folder / name)
    peer("read", folder, NAMES)
    return folder


@live
@pytest.mark.parametrize("name", NAMES)
def test_a_family_answers_as_transformers_does(name, folder):
    model, params, _ = loaded(folder / name / "theirs")
    want = np.load(folder / name / "answers.npz")
    exact = shown(name, want["exact"])
    size, own = np.abs(exact).max(), np.abs(shown(name, want["logits"]) - exact).max()
    apart = np.abs(shown(name, logits(model, params)) - exact).max()
    print(
        f"\n{name:>14}: logits differ by {apart / size:.1e}, transformers' float32 by {own / size:.1e}", file=sys.stderr
    )
    assert apart <= max(RELATIVE * size, ROUNDINGS * own)


@live
@pytest.mark.parametrize("name", DECODERS)
def test_the_engine_continues_as_transformers_does(name, folder):
    model, params, _ = loaded(folder / name / "theirs")
    want = np.load(folder / name / "answers.npz")["greedy"].tolist()
    assert greedy(model, params, len(want[0])) == [ended(row) for row in want]


@live
@pytest.mark.parametrize("name", NAMES)
def test_five_losses_are_those_of_torch(name, folder):
    model, params, _ = loaded(folder / name / "theirs")
    want = np.load(folder / name / "answers.npz")["exact_losses"]
    got = losses(model, params, len(want))
    print(f"\n{name:>14}: losses differ by {np.abs(got - want).max():.1e}", file=sys.stderr)
    np.testing.assert_allclose(got, want, rtol=0, atol=LOSSES)
    assert abs(got[-1] - got[0]) > 10 * LOSSES, "it has learned nothing to compare"


@live
@pytest.mark.parametrize("name", NAMES)
def test_transformers_answers_alike_with_what_we_write(name, folder):
    check_tensors(name, folder / name)
    want, got = np.load(folder / name / "answers.npz"), np.load(folder / name / "read.npz")
    np.testing.assert_array_equal(got["logits"], want["logits"])


def write_drawn(folder, recorded):
    """A folder with the weights that the peer program draws, without torch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    tensors = {
        name: answers.drawn(name, tuple(shape), recorded["config"]) for name, shape in recorded["tensors"].items()
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


# Every third of them in `make test`; all in `make test-families`.
OF_MIXERS = (
    "kimi_linear",
    "lfm2",
    "mamba",
    "mamba2",
    "olmo_hybrid",
    "recurrent_gemma",
    "rwkv",
    "zamba2",
)  # one of each


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if at % 3 == 0 or name in OF_MIXERS else pytest.mark.heavy)
        for at, name in enumerate(sorted(CASES))
    ],
)
def test_a_family_answers_as_recorded(name, tmp_path):
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    write_drawn(tmp_path / "theirs", recorded)
    model, params, foreign = loaded(tmp_path / "theirs")
    got = np.array([answers.some(row) for row in shown(name, logits(model, params))])
    np.testing.assert_allclose(got, recorded["logits"], rtol=0, atol=max(2e-5, RELATIVE * recorded["size"]))
    values = write_ours(tmp_path)
    assert hf_config.differences(values, model.config) == {}
    check_tensors(name, tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_a_family_learns_and_continues_as_recorded(name, tmp_path):
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    write_drawn(tmp_path, recorded)
    model, params, _ = loaded(tmp_path)
    if not of_encoder(name):
        assert greedy(model, params, len(recorded["greedy"][0])) == [ended(row) for row in recorded["greedy"]]
    np.testing.assert_allclose(losses(model, params, len(recorded["losses"])), recorded["losses"], rtol=0, atol=LOSSES)


def record(names):
    """Writes what transformers answers for families, a file each."""
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        peer("write", folder, names)
        for name in names:
            found = np.load(folder / name / "answers.npz")
            config = json.loads((folder / name / "theirs" / "config.json").read_text())
            tensors = safetensors.numpy.load_file(folder / name / "theirs" / "model.safetensors")
            values = {
                "transformers": config.pop("transformers_version"),
                "config": config,
                "tensors": {key: list(x.shape) for key, x in sorted(tensors.items())},
                "logits": [answers.some(row) for row in shown(name, found["exact"])],
                "size": round(float(np.abs(shown(name, found["exact"])).max()), 3),
                **({} if of_encoder(name) else {"greedy": found["greedy"].tolist()}),
                "losses": [round(x, 7) for x in found["exact_losses"].tolist()],
            }
            lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in values.items()]
            (RECORDED / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record(sys.argv[1:] or list(CASES))
